"""The demo: a real service, a mock trainer, and every row of the dataset through real HTTP, in one process.

`python -m rollout demo` runs it; `python -m rollout.demo` plays only the trainer, for requests made by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientSession, TCPConnector, web

from rollout.agent.messages import get_message_content, is_user_message
from rollout.demo_report import (
    TRAINER_PORT,
    RowReport,
    print_json,
    print_problems,
    print_report,
    progress,
    totals_of,
)
from rollout.examples.calculator import agent
from rollout.examples.dataset import BUNDLED, Row, load_rows
from rollout.server.app import create_app
from rollout.server.serving import why_not_listening
from rollout.settings import RolloutServerSettings, RolloutSettings
from rollout.testing.builders import make_tool_call
from rollout.testing.client import drive
from rollout.testing.faults import Reply, text, tool_calls
from rollout.testing.mock_trainer import MockTrainer
from rollout.testing.peer import RecordedRequest

_ROW_SECONDS = 30.0
"""How long one row may take before it counts as failed."""

_UNKNOWN = "I only know the word problems of the demo's dataset."


def run_demo(*, rows: int | None, concurrency: int, as_json: bool, dataset: Path | str = BUNDLED) -> int:
    """Run the demo and print what came of it; 0 if every row got the reward 1, else 1 with the reasons on stderr.

    More `rows` than there are begin again with the first. Must not be called where an event loop runs. Raises
    `DatasetError` for a dataset that cannot be read.
    """
    known = load_rows(dataset)
    wanted = list(_repeated(known, len(known) if rows is None else rows))
    with progress(len(wanted), quiet=as_json) as advance:
        played = asyncio.run(_play(wanted, concurrency, advance))
    reports, totals = played.reports, totals_of(played.reports, played.seconds)
    try:
        if as_json:
            print_json(reports, totals)
        else:
            print_report(reports, totals, known[0])
        print(end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print_problems(reports)
    return 0 if totals.solved == totals.rollouts else 1


def _repeated(rows: Sequence[Row], count: int) -> Iterator[tuple[str, Row]]:
    """So many rows, each with a rollout id of its own."""
    for number, row in enumerate(itertools.islice(itertools.cycle(rows), count)):
        lap = number // len(rows)
        yield (f"{row.id}-{lap + 1}" if lap else row.id), row


# ---------------------------------------------------------------- the trainer's model


class ScriptedModel:
    """Answers chats by the plans of the rows. No state: the question tells the row, the history the turn."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {_question(row.messages): row for row in rows}

    def answer(self, request: RecordedRequest) -> Reply:
        """The completion for a chat request, to be given to `MockTrainer.on_chat()`."""
        messages = request.json["messages"]
        row = self._rows.get(_question(messages))
        if row is None:
            return text(_UNKNOWN)
        move = row.next_move(messages)
        if not move.calls:
            return text(move.text)
        turn = len(messages) - len(row.messages)
        return tool_calls(
            make_tool_call(call.name, call.arguments, id=f"call_{turn}_{number}")
            for number, call in enumerate(move.calls, 1)
        )


def _question(messages: Sequence[dict[str, Any]]) -> str:
    """What the user asks first."""
    return next((get_message_content(message) for message in messages if is_user_message(message)), "")


# ---------------------------------------------------------------- the rollouts


class _Played(NamedTuple):
    """The reports in the order of the rows, and how long all of it took, starting and stopping left out."""

    reports: list[RowReport]
    seconds: float


async def _play(rows: Sequence[tuple[str, Row]], concurrency: int, advance: Callable[[], None]) -> _Played:
    """All rows, so many at a time."""
    reports: dict[str, RowReport] = {}
    waiting = iter(rows)
    async with (
        MockTrainer() as trainer,
        _serving() as url,
        ClientSession(url, connector=TCPConnector(limit=0)) as session,
    ):
        trainer.on_chat(ScriptedModel(row for _, row in rows).answer)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(rows))):
                workers.create_task(_work(waiting, reports, session, trainer, advance), name="demo worker")
        seconds = time.perf_counter() - began
    return _Played([reports[rollout_id] for rollout_id, _ in rows], seconds)


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    """The URL of a service for the calculator on a free port. What is interrupted ends at once."""
    settings = RolloutSettings(server=RolloutServerSettings(shutdown_grace_seconds=0))
    runner = web.AppRunner(
        create_app(agent, settings), access_log=None, auto_decompress=False, handle_signals=False, shutdown_timeout=1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _work(
    waiting: Iterator[tuple[str, Row]],
    reports: dict[str, RowReport],
    session: ClientSession,
    trainer: MockTrainer,
    advance: Callable[[], None],
) -> None:
    for rollout_id, row in waiting:
        reports[rollout_id] = await _drive(rollout_id, row, session, trainer)
        advance()


async def _drive(rollout_id: str, row: Row, session: ClientSession, trainer: MockTrainer) -> RowReport:
    request = {
        "rollout_id": rollout_id,
        "messages": row.messages,
        "completion_params": {"temperature": 0.7},
        "metadata": row.metadata,
    }
    began = time.perf_counter()
    try:
        response = await drive(session, request, trainer=trainer, timeout=_ROW_SECONDS)
    except (RuntimeError, TimeoutError, ClientError) as exc:
        return RowReport(id=rollout_id, latency_ms=(time.perf_counter() - began) * 1e3, problem=str(exc))
    metrics = response["metrics"]
    return RowReport(
        id=rollout_id,
        latency_ms=(time.perf_counter() - began) * 1e3,
        turns=metrics["num_llm_calls"],
        tools=metrics["num_tool_calls"],
        reward=response.get("reward"),
        finish_reason=response.get("finish_reason"),
        problem=_problem(response, row),
    )


def _problem(response: dict[str, Any], row: Row) -> str | None:
    if response["status"] != "COMPLETED":
        return f"{response['status']}: {response.get('error_message')}"
    reward = response.get("reward")
    if reward == 1:
        return None
    said = get_message_content(response["final_messages"][-1])
    return f"the reward is {reward}, not 1: expected {row.metadata.get('answer')!r}, the answer was {said!r}"


# ---------------------------------------------------------------- the trainer alone


async def serve_trainer(port: int, on_ready: Callable[[str], None]) -> None:
    """Play the trainer on this port (0: a free one) until cancelled; `on_ready` is told its URL. `OSError` if taken."""
    async with MockTrainer(port=port) as trainer:
        trainer.on_chat(ScriptedModel(load_rows()).answer)
        on_ready(trainer.url)
        await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m rollout.demo`: the trainer alone, until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m rollout.demo", description=main.__doc__)
    parser.add_argument("--port", type=int, default=TRAINER_PORT, help="0 takes a free one (default: %(default)s)")
    port = parser.parse_args(argv).port
    try:
        asyncio.run(serve_trainer(port, lambda url: print(f"the demo's trainer plays on {url}", flush=True)))
    except KeyboardInterrupt:
        return 130
    except (OSError, OverflowError) as exc:
        why = why_not_listening(exc) if isinstance(exc, OSError) else "a port is a number from 0 to 65535"
        print(f"rollout: cannot listen on 127.0.0.1:{port}: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
