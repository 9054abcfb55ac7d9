"""The crash proof: a service under load is killed again and again, and every acknowledgement is held against the end.

By hand, for longer than the tests run it:

    python tests/crash_run.py --kills 200 --seed 7 --resume
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession
from crash_agent import turns_in
from crash_load import Ledger, Load
from crash_snapshot import Snapshot, missing_from, take_snapshot
from crash_stage import FaultyTrainer, Life, build_shim, dice

from rollout.state.sqlite_file import open_file
from rollout.testing import MockTrainer, RecordedRequest

CALLERS = 12
LOG = "service.log"
_DATABASE = "state.db"
_LONGEST_WAIT_SECONDS = 60.0
_LONGEST_LIFE_SECONDS = 1.5
_SNAPSHOT_SHARE = 0.5
_FSYNC_MS = (0, 5, 30)
"""How slow the disk is in one life: what is written while an fsync goes on is what a kill can take."""
_OPEN_PHASES = ("queued", "running", "delivering", "undelivered")


@dataclasses.dataclass
class Report:
    """What was seen. All fields from `lost` on must be zero."""

    seed: int
    resumes: bool
    kills: int = 0
    kills_while_starting: int = 0
    accepted: int = 0
    rejected: int = 0
    unanswered: int = 0
    asked_again: int = 0
    completed: int = 0
    interrupted: int = 0
    failed_otherwise: int = 0
    run_again: int = 0
    """Completed in a second run or later."""
    callbacks: int = 0
    repeats: int = 0
    snapshots: int = 0
    seconds: float = 0.0
    lost: int = 0
    """Accepted, and the trainer never took a terminal result."""
    contradictory: int = 0
    """More than one distinct terminal result, or more than one idempotency key for it."""
    run_though_rejected: int = 0
    """An LLM call or a callback for an init that was refused."""
    run_after_end: int = 0
    """An LLM call after the first callback."""
    untruthful: int = 0
    """COMPLETED with other turns than the request asked for."""
    answers_differing: int = 0
    """A repeated init was answered in another way than the first."""
    answered_wrongly: int = 0
    """Accepted though the request was bad, or refused for another reason than that or a full queue."""
    errors_of_ours: int = 0
    """Tracebacks in the service's log."""
    not_kept: int = 0
    """In the file at the end not as it was delivered."""
    missing_after_power_loss: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    """Each of the above in words."""

    def count(self, field: str, problems: Sequence[str]) -> None:
        """Add problems of one kind."""
        setattr(self, field, getattr(self, field) + len(problems))
        self.problems += [f"{field}: {problem}" for problem in problems]

    def table(self) -> str:
        """One line a number, and the first problems."""
        rows = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "problems"}
        rows["seconds"] = round(self.seconds, 1)
        lines = [f"{name.replace('_', ' '):26} {value!s:>8}" for name, value in rows.items()]
        return "\n".join([*lines, *self.problems[:20]])


class CrashRun:
    """One run: lives and deaths of a service on one file, under one load, before one trainer."""

    def __init__(self, folder: Path, seed: int, *, kills: int, resumes: bool, shim: Path | None) -> None:
        self.report = Report(seed=seed, resumes=resumes)
        self._folder = folder
        self._database = folder / _DATABASE
        self._log = folder / LOG
        self._seed = seed
        self._kills = kills
        self._shim = shim
        self._settings = {"SERVER_RESUME_ROLLOUTS": resumes, "SERVER_CHECKPOINT_TURNS": resumes}
        self._start_seconds = 1.0
        self._ledger = Ledger()

    async def run(self) -> Report:
        """Kill and restart, heal the trainer, let everything end, and look."""
        began = time.monotonic()
        async with asyncio.timeout(_LONGEST_WAIT_SECONDS * (2 + self._kills / 10)), MockTrainer() as trainer:
            faulty = FaultyTrainer(trainer, self._seed)
            load = Load(self._seed, trainer.url, self._ledger)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run(CALLERS))
                for number in range(1, self._kills + 1):
                    await self._live_and_die(number, load, trainer)
                load.stop()
                faulty.heal()
                await self._live_to_the_end(load, trainer)
            self._judge(trainer)
        self.report.seconds = time.monotonic() - began
        return self.report

    # ------------------------------------------------------------ lives

    async def _begin(self, fsync_ms: int = 0) -> Life:
        extra = {} if self._shim is None else {"LD_PRELOAD": str(self._shim), "FSYNC_MS": str(fsync_ms)}
        return await Life.begin(self._database, self._log, self._settings, extra)

    async def _live_and_die(self, number: int, load: Load, trainer: MockTrainer) -> None:
        chance = dice(self._seed, "life", number)
        began = time.monotonic()
        life = await self._begin(chance.choice(_FSYNC_MS))
        snapshot = None
        try:
            if chance.random() < 0.15:
                self.report.kills_while_starting += 1
                await asyncio.sleep(chance.uniform(0.3, 1.1) * self._start_seconds)
            else:
                load.service_up(await life.wait_ready())
                self._start_seconds = time.monotonic() - began
                if chance.random() < _SNAPSHOT_SHARE:
                    snapshot = await self._take_snapshot(number, life, trainer)
                await self._wait_for_the_instant(chance, trainer)
        finally:
            await life.kill()
            load.service_down()
        self.report.kills += 1
        if snapshot is not None:
            self.report.snapshots += 1
            missing = await missing_from(snapshot, _DATABASE, dice(self._seed, "power", number))
            self.report.count("missing_after_power_loss", missing)

    async def _live_to_the_end(self, load: Load, trainer: MockTrainer) -> None:
        life = await self._begin()
        try:
            load.service_up(await life.wait_ready())
            await load.ended.wait()
            await self._wait_until_paid(life.url, trainer)
            exit_code = await life.stop()
            self.report.count("not_kept", [f"the last service ended with {exit_code}"] if exit_code else [])
        finally:
            await life.kill()

    async def _wait_for_the_instant(self, chance: Any, trainer: MockTrainer) -> None:
        """Any instant, or the one right after a callback, an LLM call or an answer: where a crash may hurt."""
        what = chance.choice(("time", "callback", "chat", "answer", "answer"))
        more = chance.randint(1, 12)
        try:
            async with asyncio.timeout(chance.uniform(0, _LONGEST_LIFE_SECONDS)):
                if what == "callback":
                    await trainer.wait_completed(len(trainer.completions()) + more, _LONGEST_WAIT_SECONDS)
                elif what == "chat":
                    await trainer.wait_chats(len(trainer.chats()) + more, timeout=_LONGEST_WAIT_SECONDS)
                elif what == "answer":
                    enough = len(self._ledger.accepted) + more
                    await self._ledger.wait_until(lambda: len(self._ledger.accepted) >= enough)
                else:
                    await asyncio.Event().wait()
        except TimeoutError:
            return  # the instant has come by the clock

    async def _take_snapshot(self, number: int, life: Life, trainer: MockTrainer) -> Snapshot:
        folder = self._folder / f"snapshot-{number}"
        async with asyncio.timeout(_LONGEST_WAIT_SECONDS):
            return await take_snapshot(life, self._database, folder, self._ledger, trainer)

    async def _wait_until_paid(self, url: str, trainer: MockTrainer) -> None:
        """Return when the service says that it owes nothing; or after long enough, for the report to tell."""
        try:
            async with asyncio.timeout(_LONGEST_WAIT_SECONDS), ClientSession(url) as session:
                while await _open_rollouts(session):
                    seen = len(trainer.requests)
                    await _next_request(trainer, seen)
        except TimeoutError:
            self.report.count("lost", [f"the service still owes something after {_LONGEST_WAIT_SECONDS:g} s"])

    # ------------------------------------------------------------ the verdict

    def _judge(self, trainer: MockTrainer) -> None:
        ledger, report = self._ledger, self.report
        callbacks = _by_rollout(trainer.completions())
        chats = _by_rollout(trainer.chats())
        report.accepted, report.rejected = len(ledger.accepted), len(ledger.rejected)
        report.unanswered, report.asked_again = len(ledger.unanswered), ledger.asked_again
        report.callbacks = sum(map(len, callbacks.values()))
        report.repeats = report.callbacks - len(callbacks)
        report.count("lost", [i for i in ledger.accepted if not any(c.accepted for c in callbacks.get(i, ()))])
        report.count("contradictory", [i for i, sent in callbacks.items() if _distinct(sent) != 1])
        report.count("run_though_rejected", [i for i in ledger.rejected if i in callbacks or i in chats])
        report.count("run_after_end", [i for i, sent in callbacks.items() if _is_after(chats.get(i, ()), sent[0])])
        report.count("answers_differing", ledger.differing)
        report.count("answered_wrongly", _answered_wrongly(ledger))
        report.count("errors_of_ours", re.findall(r"(?m)^Traceback.*", self._log.read_text()))
        report.count("untruthful", [i for i, sent in callbacks.items() if self._is_untruthful(i, sent[0].json)])
        report.count("not_kept", self._differing_in_file(callbacks))

    def _is_untruthful(self, rollout_id: str, result: dict[str, Any]) -> bool:
        report = self.report
        if result["status"] == "ERROR":
            if result["finish_reason"] == "interrupted":
                report.interrupted += 1
                return (result["error_category"], result["retryable"]) != ("interrupted", True)
            report.failed_otherwise += 1
            return False
        report.completed += 1
        report.run_again += result["extra_fields"]["run"] > 1
        return not turns_in(result["final_messages"]) == result["reward"] == self._ledger.turns[rollout_id]

    def _differing_in_file(self, callbacks: dict[str, list[RecordedRequest]]) -> list[str]:
        connection = open_file(self._database)
        try:
            rows = connection.execute("SELECT id, phase, body FROM records LEFT JOIN results USING (number)").fetchall()
        finally:
            connection.close()
        known = {rollout_id for rollout_id, _, _ in rows}
        held = {rollout_id: body for rollout_id, phase, body in rows if phase == "delivered"}
        differing = [rollout_id for rollout_id, sent in callbacks.items() if held.get(rollout_id) != sent[0].body]
        differing += [f"{rollout_id} is {phase}" for rollout_id, phase, _ in rows if phase in _OPEN_PHASES]
        return differing + [f"{i} is there though it was rejected" for i in self._ledger.rejected if i in known]


async def _open_rollouts(session: ClientSession) -> int:
    async with session.get("/status") as response:
        phases = msgspec.json.decode(await response.read())["rollouts"]["by_phase"]
    return sum(phases[phase] for phase in _OPEN_PHASES)


async def _next_request(trainer: MockTrainer, seen: int) -> None:
    """Return when the trainer has got another request, or after a moment: the last thing to happen is not a request."""
    with contextlib.suppress(TimeoutError):
        await trainer.wait_until(lambda: len(trainer.requests) > seen, timeout=0.1)


def _answered_wrongly(ledger: Ledger) -> list[str]:
    answers = {**dict.fromkeys(ledger.accepted, 202), **ledger.rejected}
    usual = {202, 503}
    right = {"invalid": {422}, "refused": {422, 503}}
    return [f"{i}: {status}" for i, status in answers.items() if status not in right.get(i.partition("-")[0], usual)]


def _by_rollout(requests: Sequence[RecordedRequest]) -> dict[str, list[RecordedRequest]]:
    grouped: dict[str, list[RecordedRequest]] = collections.defaultdict(list)
    for request in requests:
        grouped[request.rollout_id or ""].append(request)
    return dict(grouped)


def _distinct(callbacks: Sequence[RecordedRequest]) -> int:
    return len({(callback.headers.get("Idempotency-Key"), callback.body) for callback in callbacks})


def _is_after(chats: Sequence[RecordedRequest], first_callback: RecordedRequest) -> bool:
    return any(chat.at > first_callback.at for chat in chats)


# ---------------------------------------------------------------- by hand


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and print the table; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--resume", action="store_true", help="with RESUME_ROLLOUTS and a checkpoint after every turn")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rollout-crash-") as folder:
        shim = build_shim(Path(folder))
        run = CrashRun(Path(folder), seed, kills=options.kills, resumes=options.resume, shim=shim)
        report = asyncio.run(run.run())
        if report.problems:
            print((Path(folder) / LOG).read_text()[-20_000:], file=sys.stderr)
    print(report.table())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
