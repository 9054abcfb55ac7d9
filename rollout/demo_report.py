"""What the demo shows: progress while it runs, then a table, totals, and lines to try by hand.

With rich installed it looks nicer; nothing depends on it. Text that comes from data is made printable ASCII, and is
never read as markup.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from rollout.examples.dataset import Row
from rollout.wire import encode_strict

SERVICE_PORT = 9000
TRAINER_PORT = 9001

_HEADINGS = ("id", "turns", "tools", "reward", "latency", "finish reason")
_TEXT_COLUMNS = {"id", "finish reason"}


class RowReport(Struct, kw_only=True):
    """How one row went. `latency_ms` is what the trainer sees: from sending the init to having the result."""

    id: str
    latency_ms: float
    turns: int = 0
    tools: int = 0
    reward: float | None = None
    finish_reason: str | None = None
    problem: str | None = None
    """Why the row does not count as solved; None if it does."""


class Totals(Struct, kw_only=True):
    """How all rows went together. A row without a reward counts as 0 in the mean."""

    rollouts: int
    solved: int
    seconds: float
    rollouts_per_second: float
    mean_reward: float
    tool_calls: int
    llm_calls: int
    p50_latency_ms: float
    p95_latency_ms: float


def totals_of(reports: Sequence[RowReport], seconds: float) -> Totals:
    """The totals of at least one report, all made within so many seconds."""
    latencies = sorted(report.latency_ms for report in reports)
    return Totals(
        rollouts=len(reports),
        solved=sum(report.problem is None for report in reports),
        seconds=seconds,
        rollouts_per_second=len(reports) / seconds,
        mean_reward=math.fsum(report.reward or 0.0 for report in reports) / len(reports),
        tool_calls=sum(report.tools for report in reports),
        llm_calls=sum(report.turns for report in reports),
        p50_latency_ms=_percentile(latencies, 50),
        p95_latency_ms=_percentile(latencies, 95),
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of all do not exceed."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def printable(text: str) -> str:
    """The text in printable ASCII, so that no terminal obeys it and every encoding carries it."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


# ---------------------------------------------------------------- while it runs


@contextlib.contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A live bar on stderr, gone when it is left; the function moves it on by one. Nothing where nobody looks."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield _do_nothing
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        line = _PlainProgress(total)
        try:
            yield line.advance
        finally:
            line.clear()
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rollouts", total=total)
        yield lambda: bar.advance(task)


def _do_nothing() -> None:
    pass


class _PlainProgress:
    """One line that is written over and over."""

    _WIDTH = 40

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._shown = ""

    def advance(self) -> None:
        self._done += 1
        bar = ("#" * (self._done * self._WIDTH // self._total)).ljust(self._WIDTH, ".")
        self._write(f"rollouts [{bar}] {self._done}/{self._total}")

    def clear(self) -> None:
        self._write(" " * len(self._shown) + "\r")

    def _write(self, text: str) -> None:
        self._shown = text
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()


# ---------------------------------------------------------------- afterwards


def print_json(reports: Sequence[RowReport], totals: Totals) -> None:
    """A JSON object a line for each row, and one `{"totals": {...}}`."""
    for line in (*reports, {"totals": totals}):
        print(encode_strict(line).decode())


def print_report(reports: Sequence[RowReport], totals: Totals, row: Row) -> None:
    """The table, the totals, and how to do the same by hand with this row."""
    lines = [_cells(report) for report in reports]
    try:
        _print_rich(lines)
    except ImportError:
        _print_plain(lines)
    print(
        f"\n{totals.rollouts} rollouts in {totals.seconds:.2f} s ({totals.rollouts_per_second:.0f}/s), "
        f"{totals.solved} solved, mean reward {totals.mean_reward:.3f}\n"
        f"{totals.llm_calls} LLM calls, {totals.tool_calls} tool calls, "
        f"latency p50 {totals.p50_latency_ms:.0f} ms, p95 {totals.p95_latency_ms:.0f} ms\n\n"
        f"{by_hand(row)}"
    )


def print_problems(reports: Sequence[RowReport]) -> None:
    """Why the rows that were not solved were not, on stderr."""
    for report in reports:
        if report.problem is not None:
            print(printable(f"{report.id}: {report.problem}"), file=sys.stderr)


def _cells(report: RowReport) -> tuple[str, ...]:
    reward = "-" if report.reward is None else f"{report.reward:g}"
    ending = printable(report.finish_reason or "-")
    return (printable(report.id), str(report.turns), str(report.tools), reward, f"{report.latency_ms:.1f} ms", ending)


def _print_rich(lines: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in _TEXT_COLUMNS else "right")
    for cells in lines:
        table.add_row(*map(Text, cells))
    console = Console()
    with console.capture() as captured:  # when rich itself finds the pipe broken, it ends the process
        console.print(table)
    print(captured.get(), end="")


def _print_plain(lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *lines, strict=True)]
    for cells in (_HEADINGS, *lines):
        aligned = [
            cell.ljust(width) if heading in _TEXT_COLUMNS else cell.rjust(width)
            for heading, cell, width in zip(_HEADINGS, cells, widths, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def by_hand(row: Row) -> str:
    """Lines for a shell that serve the calculator, play the trainer, and send this row through; correct as they are."""
    curl = r"curl -sS -w '\n'"
    service, rollout_id = f"http://127.0.0.1:{SERVICE_PORT}", "by-hand-1"
    request = {
        "rollout_id": rollout_id,
        "server_url": f"http://127.0.0.1:{TRAINER_PORT}",
        "messages": row.messages,
        "completion_params": {"temperature": 0.7},
        "metadata": row.metadata,
    }
    body = shlex.quote(json.dumps(request))  # in ASCII: every terminal can show and paste it
    return f"""\
The same by hand. The service, in a terminal of its own:
  python -m rollout serve rollout.examples.calculator:agent --port {SERVICE_PORT}
A trainer that plays the demo's model (or take the URL of yours), in another one:
  python -m rollout.demo --port {TRAINER_PORT}
And the requests:
  {curl} {service}/v1/rollout/init -H 'Content-Type: application/json' -d {body}
  {curl} {service}/v1/rollout/status/{rollout_id}
  {curl} '{service}/v1/rollout/result/{rollout_id}?wait=10'
  {curl} {service}/metrics"""
