"""What durable state costs: the same service with its state in memory, in a file, and in a file on a slow disk.

    python benchmarks/state_cost.py --reps 3 --json state_cost.json

The service, the trainer and the load are three processes. Every sample is a fresh service on a fresh file; the stores
take turns, and the table shows medians and half the spread. The slow disk is `fsync_shim.c` (5 ms for every fsync),
which needs gcc. On few cores trainer and load bound `rollouts/s` and `inits/s`: trust the CPU figures there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult

HERE = Path(__file__).resolve().parent
FSYNC_MS = 5
CALLERS = 64
TURNS = 3
WARM_UP = 200
_PREFIX = "OSMOSIS_ROLLOUT_"
_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 30.0
_numbers = itertools.count(100_000_000)  # ids of one length, so that the head of the request is the same for all
_HEAD = (
    b"POST /v1/rollout/init HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


# ---------------------------------------------------------------- the agent, in the service's process


class CostAgent(RolloutAgentLoop):
    """Chats `metadata["turns"]` times and ends; without turns it never does."""

    name = "cost"

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        """Grow the history turn by turn."""
        turns = ctx.request.metadata["turns"]
        if turns is None:
            await asyncio.Event().wait()
        messages = list(ctx.request.messages)
        for _ in range(turns):
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
        return ctx.complete(messages, reward=1.0)


agent = CostAgent()


# ---------------------------------------------------------------- the trainer, in a process of its own


async def run_trainer() -> None:
    """Say where it listens; for every number on stdin say so when so many callbacks have come, then forget them."""
    from rollout.testing import MockTrainer

    async with MockTrainer() as trainer:
        print(trainer.url, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await trainer.wait_completed(int(line), timeout=600)
            trainer.forget()
            print("done", flush=True)


@dataclasses.dataclass
class Trainer:
    """The parent's end of a trainer process."""

    process: asyncio.subprocess.Process
    url: str

    async def wait_completed(self, count: int) -> None:
        """Return when so many callbacks have come since the last call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"%d\n" % count)
        assert await self.process.stdout.readline() == b"done\n", "the trainer has died"


@contextlib.asynccontextmanager
async def running_trainer() -> AsyncIterator[Trainer]:
    """A trainer process, ended on leaving."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "state_cost.py"), "--as-trainer", env=environment({}), stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdout is not None
        yield Trainer(process, (await process.stdout.readline()).decode().strip())
    finally:
        process.kill()
        await process.wait()


# ---------------------------------------------------------------- the service, in a process of its own


@dataclasses.dataclass(frozen=True)
class Store:
    """One thing to measure."""

    name: str
    in_file: bool = False
    shim: Path | None = None


@dataclasses.dataclass
class Service:
    """A running service and what the system says of its process."""

    pid: int
    port: int
    database: Path

    @property
    def cpu_seconds(self) -> float:
        """User and system time so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def memory_bytes(self) -> int:
        """Resident set size."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    @property
    def disk_bytes(self) -> int:
        """Size of the database and its log."""
        return sum(part.stat().st_size for part in self.database.parent.glob(f"{self.database.name}*"))


def environment(settings: dict[str, object]) -> dict[str, str]:
    """The environment without settings of whoever measures, and with these."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(_PREFIX)}
    path = os.pathsep.join((str(HERE), str(HERE.parent)))
    return {**clean, "PYTHONPATH": path, **{_PREFIX + name: str(value) for name, value in settings.items()}}


@contextlib.asynccontextmanager
async def running_service(store: Store) -> AsyncIterator[Service]:
    """A fresh service on this store, killed on leaving."""
    with tempfile.TemporaryDirectory(prefix="rollout-cost-") as folder:
        database = Path(folder) / "state.db"
        settings: dict[str, object] = {
            "SERVER_PORT": 0,
            "SERVER_MAX_CONCURRENT_ROLLOUTS": 100_000,
            "SERVER_MAX_QUEUED_ROLLOUTS": 1_000_000,
            "SERVER_STATE_URL": f"sqlite:///{database}" if store.in_file else "memory:",
        }
        env = environment(settings)
        if store.shim is not None:
            env |= {"LD_PRELOAD": str(store.shim), "FSYNC_MS": str(FSYNC_MS)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollout", "serve", "state_cost:agent"),
            cwd=folder,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield Service(process.pid, await _port_of(process), database)
        finally:
            process.kill()
            await process.communicate()


async def _port_of(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    async with asyncio.timeout(_START_SECONDS):
        while line := await process.stdout.readline():
            if found := re.search(rb"http://\S+:(\d+)", line):
                return int(found[1])
    raise RuntimeError("the service ended before it listened")


# ---------------------------------------------------------------- the load


async def send_inits(service: Service, trainer: Trainer, count: int, turns: int | None) -> list[float]:
    """Send so many inits from 64 callers, each as fast as it is answered; the seconds that each took."""
    template = json.dumps(
        {
            "rollout_id": "@",
            "server_url": trainer.url,
            "messages": [{"role": "user", "content": "What is the answer to everything? " * 8}],
            "completion_params": {"temperature": 0.7, "max_tokens": 256},
            "metadata": {"turns": turns},
        }
    ).encode()
    numbers = itertools.islice(_numbers, count)
    seconds: list[float] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(_call(service.port, template, numbers, seconds))
    return seconds


async def _call(port: int, template: bytes, numbers: Iterator[int], seconds: list[float]) -> None:
    """One keep-alive connection. A full HTTP client would be slower than the service that it measures."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    before, after = template.split(b"@")
    length = len(before) + 9 + len(after)
    before = _HEAD % length + before
    for number in numbers:
        began = time.perf_counter()
        writer.write(b"%b%d%b" % (before, number, after))
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 202"):
            raise RuntimeError(f"an init was refused: {answer!r}")
        found = re.search(rb"(?i)content-length: (\d+)", answer)
        assert found is not None
        await reader.readexactly(int(found[1]))
        seconds.append(time.perf_counter() - began)
    writer.close()


# ---------------------------------------------------------------- what is measured


Sample = dict[str, float]


async def measure_rollouts(store: Store, trainer: Trainer, count: int) -> Sample:
    """Whole rollouts: CPU of the service for each, and how many it does in a second."""
    async with running_service(store) as service:
        await send_inits(service, trainer, WARM_UP, TURNS)
        await trainer.wait_completed(WARM_UP)
        cpu, began = service.cpu_seconds, time.perf_counter()
        await send_inits(service, trainer, count, TURNS)
        await trainer.wait_completed(count)
        return {
            "CPU ms/rollout": (service.cpu_seconds - cpu) * 1e3 / count,
            "rollouts/s": count / (time.perf_counter() - began),
        }


async def measure_inits(store: Store, trainer: Trainer, count: int) -> Sample:
    """Inits alone: the agent of each waits for ever."""
    async with running_service(store) as service:
        await send_inits(service, trainer, WARM_UP, None)
        cpu, began = service.cpu_seconds, time.perf_counter()
        seconds = sorted(await send_inits(service, trainer, count, None))
        return {
            "inits/s": count / (time.perf_counter() - began),
            "init p50 ms": seconds[count // 2] * 1e3,
            "init p99 ms": seconds[count * 99 // 100] * 1e3,
            "CPU ms/init": (service.cpu_seconds - cpu) * 1e3 / count,
        }


async def measure_memory(store: Store, trainer: Trainer, count: int) -> Sample:
    """Ended and delivered rollouts that are still remembered."""
    async with running_service(store) as service:
        await send_inits(service, trainer, WARM_UP * 5, 0)
        await trainer.wait_completed(WARM_UP * 5)
        memory, disk = service.memory_bytes, service.disk_bytes
        for _ in range(10):
            await send_inits(service, trainer, count // 10, 0)
            await trainer.wait_completed(count // 10)
        scale = 100_000 / count / 1e6
        return {
            "RSS MB/100k": (service.memory_bytes - memory) * scale,
            "disk MB/100k": (service.disk_bytes - disk) * scale,
        }


async def measure(options: argparse.Namespace, stores: Sequence[Store]) -> dict[str, dict[str, list[float]]]:
    """All samples, by store and figure."""
    samples: dict[str, dict[str, list[float]]] = {store.name: {} for store in stores}
    async with running_trainer() as trainer:
        for _ in range(options.reps):
            for store in stores:
                found = await measure_rollouts(store, trainer, options.rollouts)
                found |= await measure_inits(store, trainer, options.inits)
                if store.shim is None:
                    found |= await measure_memory(store, trainer, options.records)
                print(f"{store.name}: {found}", file=sys.stderr)
                for figure, value in found.items():
                    samples[store.name].setdefault(figure, []).append(value)
    return samples


# ---------------------------------------------------------------- the door


def build_shim(folder: Path) -> Path | None:
    """The library that makes fsync slow; None where there is no compiler."""
    if shutil.which("gcc") is None:
        return None
    library = folder / "fsync_shim.so"
    command = ("gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "fsync_shim.c"), "-ldl")
    subprocess.run(command, check=True)
    return library


def table(samples: dict[str, dict[str, list[float]]]) -> str:
    """Medians and half the spread, a column for each store."""
    names = list(samples)
    lines = [["", *names]]
    for figure in samples[names[0]]:
        cells = [_cell(samples[name].get(figure)) for name in names]
        lines.append([figure, *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(values: list[float] | None) -> str:
    if values is None:
        return "-"
    middle = statistics.median(values)
    spread = (max(values) - min(values)) / 2
    return f"{middle:,.2f} ±{spread:,.2f}"


def main() -> int:
    """Measure, print the table and the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=2000, help="whole rollouts in a sample")
    parser.add_argument("--inits", type=int, default=5000, help="inits in a sample")
    parser.add_argument("--records", type=int, default=20_000, help="kept records in a sample")
    parser.add_argument("--json", type=Path, help="write the samples to this file, too")
    parser.add_argument("--as-trainer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_trainer:
        asyncio.run(run_trainer())
        return 0
    with tempfile.TemporaryDirectory(prefix="rollout-shim-") as folder:
        shim = build_shim(Path(folder))
        stores = [Store("memory"), Store("sqlite", in_file=True)]
        if shim is None:
            print("no gcc: the slow disk is left out", file=sys.stderr)
        else:
            stores.append(Store(f"sqlite, {FSYNC_MS} ms fsync", in_file=True, shim=shim))
        samples = asyncio.run(measure(options, stores))
    text = json.dumps(samples)
    print(f"{table(samples)}\n\n{text}")
    if options.json is not None:
        options.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
