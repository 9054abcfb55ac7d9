"""Agents made of one function, and the service as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from served import GENEROUS_SECONDS, Served

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.setting_spec import PREFIX
from rollout.testing import MockTrainer, ReadResponse, make_request, post_init

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 20
"""How long a process may take to come up or to end: only a failing test waits so long."""

USER = [{"role": "user", "content": "What is 2 + 2?"}]
OK = {"role": "assistant", "content": "ok"}
"""What the mock trainer answers to a chat."""

Run = Callable[[RolloutContext], Any]


class Doing(RolloutAgentLoop):
    """An agent whose `run()` is the function it was given."""

    name = "doing"

    def __init__(self, run: Run, tools: Sequence[Any] = ()) -> None:
        self._run = run
        self.tools = tools

    async def run(self, ctx: RolloutContext) -> Any:
        returned = self._run(ctx)
        return await returned if isinstance(returned, Awaitable) else returned


async def swallow(ctx: RolloutContext) -> RolloutResult:
    """Does not end when it is told to, nor when it loses its slot; then it comes with a result."""
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    return ctx.complete(USER, reward=1.0)


async def chat_and_stay(ctx: RolloutContext) -> RolloutResult:
    """One turn, then a second LLM call, which a trainer may leave open."""
    messages = list(ctx.request.messages)
    messages.append((await ctx.chat(messages)).message)
    messages.append({"role": "user", "content": "go on"})
    await ctx.chat(messages)
    return ctx.complete(messages)


async def state_of(server: Served, rollout_id: str) -> dict[str, Any]:
    """The RolloutState of a known rollout."""
    answer = await server.get(f"/v1/rollout/status/{rollout_id}")
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


async def until_phase(server: Served, rollout_id: str, phase: str) -> dict[str, Any]:
    """The RolloutState once its phase is this one."""
    async with asyncio.timeout(GENEROUS_SECONDS):
        while (found := await state_of(server, rollout_id))["phase"] != phase:
            pass  # asking takes a turn of the loop or two
    return found


class Process:
    """`python -m rollout serve`, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.port = 0
        self.stdout = ""
        self.stderr = ""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def wait_ready(self) -> None:
        """Return when it has said where it listens."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            while not (found := re.search(r"http://\S+:(\d+)", self.stdout)):
                line = await self._process.stdout.readline()
                assert line, f"the process ended: {await self.end()}\n{self.stderr}"
                self.stdout += line.decode()
        self.port = int(found[1])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def end(self) -> int:
        """The exit code, waited for; what it has printed is in `stdout` and `stderr` then."""
        async with asyncio.timeout(START_SECONDS):
            out, err = await self._process.communicate()
        self.stdout += out.decode()
        self.stderr += err.decode()
        assert self._process.returncode is not None
        return self._process.returncode

    async def init(self, trainer: MockTrainer, **fields: Any) -> ReadResponse:
        """POST an init for this trainer."""
        return await post_init(self.url, make_request(**{"server_url": trainer.url, **fields}))


def environment(**settings: object) -> dict[str, str]:
    """The environment without settings of whoever runs the tests, and with these."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    chosen = {PREFIX + name: str(value) for name, value in settings.items()}
    return {**clean, "PYTHONPATH": str(PACKAGE_ROOT), "PYTHONWARNINGS": "error", **chosen}


@contextlib.asynccontextmanager
async def process_of(
    arguments: Sequence[str], cwd: Path, env: dict[str, str], program: str | None = None
) -> AsyncIterator[Process]:
    """A running `python -m rollout ARGUMENTS`, or this program; killed if it has not ended by then."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(("-m", "rollout") if program is None else ("-c", program)),
        *arguments,
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    running = Process(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
            await running.end()


async def run_command(arguments: Sequence[str], cwd: Path, **settings: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -m rollout ARGUMENTS`, run to its end."""
    async with process_of(arguments, cwd, environment(**settings)) as running:
        code = await running.end()
    return code, running.stdout, running.stderr
