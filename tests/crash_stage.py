"""Who plays in the crash proof: a trainer that fails by plan, and a service that is killed and started again.

What happens to whom is drawn from the seed and the name of the thing itself, never from the order of arrival, so a
seed gives the same rollouts and the same faults however fast the machine is. Only the instants are the machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from crash_agent import turns_in
from support import PACKAGE_ROOT, START_SECONDS, environment

from rollout.testing import (
    Answer,
    MockTrainer,
    Peer,
    RecordedRequest,
    Reply,
    close_before_answer,
    delay,
    half_body,
    lost_acknowledgement,
    reset,
    status,
    text,
    tool_calls,
)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_SHIM_SOURCE = PACKAGE_ROOT / "benchmarks" / "fsync_shim.c"
TESTS = Path(__file__).resolve().parent
LAST_FAULTY_ATTEMPT = 5
"""From the next attempt on a callback is taken, so that no pause between attempts grows long."""


class _TakenInHalf(Answer):
    """A 200 whose body breaks off: the status line alone is the acknowledgement."""

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        request.accepted = True
        await half_body().play(peer, request, default)


_NEVER = delay(600)  # longer than any client waits
_Faults: TypeAlias = tuple[tuple[Answer, int], ...]
_CALLBACK_FAULTS: _Faults = (
    (status(500), 6),
    (status(429, retry_after=0), 4),
    (_NEVER, 1),
    (lost_acknowledgement(), 6),
    (_TakenInHalf(), 4),
    (close_before_answer(), 3),
    (reset(), 3),
    (delay(0.05), 3),
)
_CHAT_FAULTS: _Faults = (
    (status(503), 3),
    (status(429, retry_after=0), 3),
    (reset(), 2),
    (half_body(text("cut")), 2),
    (_NEVER, 1),
)


def dice(seed: int, *names: object) -> random.Random:
    """Chance that depends on the seed and on these names only."""
    return random.Random(f"{seed}/{'/'.join(map(str, names))}")  # a text is hashed the same way in every process


def _drawn(chance: random.Random, faults: _Faults) -> Answer:
    return chance.choices([fault for fault, _ in faults], [weight for _, weight in faults])[0]


def build_shim(folder: Path) -> Path | None:
    """A library to preload that counts fsyncs and makes them slow; None where there is no compiler."""
    if shutil.which("gcc") is None:
        return None
    library = folder / "fsync_shim.so"
    command = ("gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SHIM_SOURCE), "-ldl")
    subprocess.run(command, check=True, timeout=60)
    return library


class FaultyTrainer:
    """Answers for a MockTrainer: faults by plan until `heal()`, and never from then on."""

    def __init__(self, trainer: MockTrainer, seed: int) -> None:
        self.trainer = trainer
        self._seed = seed
        self._is_well = False
        self._turns: dict[tuple[str, int], int] = {}
        trainer.on_chat(self._chat)
        trainer.on_completed(self._callback)

    def heal(self) -> None:
        """From now on every request is answered well and at once."""
        self._is_well = True

    def _chat(self, request: RecordedRequest) -> Answer:
        rollout_id = request.rollout_id or ""
        turn = turns_in(request.json["messages"])
        attempt = self._turns[rollout_id, turn] = self._turns.get((rollout_id, turn), 0) + 1
        chance = dice(self._seed, rollout_id, "chat", turn, attempt)
        answer = text(f"answer {turn} of {rollout_id}")
        if "tool" in rollout_id and turn % 2 == 0:
            answer = tool_calls([("add", {"a": turn, "b": 1})])
        if self._is_well:
            return answer
        if chance.random() < 0.06:
            return _drawn(chance, _CHAT_FAULTS)
        return delay(chance.uniform(0.1, 0.6) if "long" in rollout_id else chance.uniform(0, 0.03), answer)

    def _callback(self, request: RecordedRequest) -> Answer | None:
        rollout_id = request.rollout_id or ""
        attempt = len(self.trainer.completions(rollout_id))
        chance = dice(self._seed, rollout_id, "callback", attempt)
        if self._is_well or attempt > LAST_FAULTY_ATTEMPT or chance.random() < 0.5:
            return None
        return _drawn(chance, _CALLBACK_FAULTS)


class Life:
    """One life of the service process, from its start to its death."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.url = ""

    @classmethod
    async def begin(
        cls, database: Path, log: Path, settings: Mapping[str, object] = _NOTHING, extra: Mapping[str, str] = _NOTHING
    ) -> Life:
        """Start a service on this database; its log is added to the file, `extra` to its environment."""
        env = environment(
            **{
                "SERVER_PORT": 0,
                "SERVER_STATE_URL": f"sqlite:///{database}",
                "SERVER_MAX_CONCURRENT_ROLLOUTS": 16,
                "SERVER_MAX_QUEUED_ROLLOUTS": 48,
                "CLIENT_TIMEOUT_SECONDS": 1,
                "CLIENT_RETRY_BASE_DELAY": 0.01,
                "CLIENT_RETRY_MAX_DELAY": 0.05,
                **settings,
            }
        )
        env |= {**extra, "PYTHONPATH": os.pathsep.join((str(PACKAGE_ROOT), str(TESTS)))}
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollout", "serve", "crash_agent:agent"),
                cwd=database.parent,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
            )
        return cls(process)

    async def wait_ready(self) -> str:
        """Where it listens, once it does."""
        assert self._process.stdout is not None
        said = b""
        async with asyncio.timeout(START_SECONDS):
            while not (found := re.search(rb"http://\S+:\d+", said)):
                line = await self._process.stdout.readline()
                assert line, f"the service ended with {await self._process.wait()} before it listened"
                said += line
        self.url = found[0].decode()
        return self.url

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone and its locks with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        async with asyncio.timeout(START_SECONDS):
            await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """No instruction of the process runs inside this block."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)
