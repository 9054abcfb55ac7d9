"""The demo as a person sees it: exit code, table, reasons, and the lines to try by hand."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import needs
from conftest import Serve
from served import GENEROUS_SECONDS

from rollout import demo
from rollout.cli import main
from rollout.demo import ScriptedModel, run_demo, serve_trainer
from rollout.demo_report import SERVICE_PORT, TRAINER_PORT, RowReport, by_hand, printable, totals_of
from rollout.examples import calculator
from rollout.examples.dataset import DatasetError, Row, load_rows
from rollout.testing import MockTrainer, drive, make_request

HOSTILE_ID = "[/oops] \x1b[31m \u2028"


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and may do something when it is first written to."""

    def __init__(self, on_write: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._on_write = on_write

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        on_write, self._on_write = self._on_write, None
        if on_write is not None:
            on_write()
        return super().write(text)


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rich", "rich.console", "rich.progress", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Puts back what the command line changes in the process's logging."""
    switches = ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks", "_srcfile")
    before = {name: getattr(logging, name) for name in switches if hasattr(logging, name)}
    loggers = [logging.getLogger(name) for name in ("", "aiohttp.access", "aiohttp.server")]
    states = [(logger.handlers[:], logger.filters[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, filters, level) in zip(loggers, states, strict=True):
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.setLevel(level)
    for name, value in before.items():
        setattr(logging, name, value)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def dataset_of(folder: Path, *rows: Row) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    return path


def make_row(id: str = "row", *, answer: Any = 4, reply: str = "It is 4.") -> Row:
    messages = [{"role": "user", "content": f"question of {id}"}]
    return Row(id=id, messages=messages, metadata={"answer": answer}, reply=reply)


# ---------------------------------------------------------------- a run that goes well


def test_demo_shows_every_row_and_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_demo(rows=5, concurrency=2, as_json=False)

    shown = capsys.readouterr()
    assert code == 0
    assert re.findall(r"calc-\d+", shown.out) == [f"calc-00{n}" for n in range(1, 6)]
    assert re.search(r"^5 rollouts in \d+\.\d\d s \(\d+/s\), 5 solved, mean reward 1\.000$", shown.out, re.MULTILINE)
    assert "10 LLM calls, 5 tool calls, latency p50" in shown.out
    assert shown.err == ""


def test_demo_does_without_rich(capsys: pytest.CaptureFixture[str], without_rich: None) -> None:
    code = run_demo(rows=2, concurrency=2, as_json=False)

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0] == "id        turns  tools  reward  latency  finish reason"
    assert re.fullmatch(r"calc-001 +2 +1 +1 +\d+\.\d ms  stop", lines[1])


def test_json_has_a_line_for_each_row_and_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_demo(rows=None, concurrency=16, as_json=True)

    shown = capsys.readouterr()
    *rows, last = map(msgspec.json.decode, shown.out.splitlines())
    assert code == 0
    assert [row["id"] for row in rows] == [row.id for row in load_rows()]
    assert {row["reward"] for row in rows} == {1}
    assert {row["problem"] for row in rows} == {None}
    assert last["totals"]["solved"] == last["totals"]["rollouts"] == 50
    assert last["totals"]["tool_calls"] == sum(row["tools"] for row in rows) == 109
    assert shown.err == ""


def test_more_rollouts_than_rows_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = dataset_of(tmp_path, make_row("a"), make_row("b"))

    code = run_demo(rows=5, concurrency=50, as_json=True, dataset=dataset)

    rows = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert code == 0
    assert [row["id"] for row in rows] == ["a", "b", "a-2", "b-2", "a-3"]


def test_the_command_line_leads_to_the_demo(capfd: pytest.CaptureFixture[str], logging_restored: None) -> None:
    code = main(["demo", "--json"])

    shown = capfd.readouterr()
    assert (code, shown.err) == (0, ""), "tools that fail on purpose are nothing to log"
    assert shown.out.count("\n") == 51


@pytest.mark.slow
def test_the_demo_runs_as_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "demo", "--rows", "5"], capture_output=True, text=True, timeout=30
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "5 solved" in done.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_failure() -> None:
    command = f"{sys.executable} -m rollout demo --rows 5; echo code=$? >&2"
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        assert running.stderr.read() == "code=0\n"


# ---------------------------------------------------------------- a run that does not


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        pytest.param(
            make_row(reply="It is 5."),
            "row: the reward is 0.0, not 1: expected 4, the answer was 'It is 5.'",
            id="wrong-answer",
        ),
        pytest.param(
            make_row(answer="many"),
            "row: ERROR: ValueError: metadata.answer holds no number to compare with",
            id="agent-failed",
        ),
        pytest.param(make_row(" "), " : init was answered 422: ", id="refused"),
        pytest.param(make_row("caf\u00e9", answer=5), "caf\\xe9: the reward is 0.0", id="text-made-printable"),
    ],
)
def test_a_row_that_is_not_solved_is_named_with_the_reason(
    row: Row, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = dataset_of(tmp_path, make_row("good"), row)

    code = run_demo(rows=None, concurrency=2, as_json=True, dataset=dataset)

    shown = capsys.readouterr()
    assert code == 1
    assert shown.err.startswith(reason)
    assert shown.err.count("\n") == 1
    assert msgspec.json.decode(shown.out.splitlines()[-1])["totals"]["solved"] == 1


def test_a_dataset_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        run_demo(rows=None, concurrency=1, as_json=True, dataset=tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_text_from_data_is_neither_markup_nor_a_control_sequence(
    rich: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    for fixture in () if rich else ("without_rich",):
        request.getfixturevalue(fixture)

    code = run_demo(rows=None, concurrency=1, as_json=False, dataset=dataset_of(tmp_path, make_row(HOSTILE_ID)))

    out = capsys.readouterr().out
    assert code == 0
    assert r"[/oops] \x1b[31m \u2028" in out
    assert "\x1b" not in out


def test_printable_leaves_plain_text_alone() -> None:
    assert printable("it's [bold] \\ text") == "it's [bold] \\ text"
    assert printable("\ud800\r\n") == r"\ud800\r\n"


# ---------------------------------------------------------------- progress


def test_progress_is_drawn_and_wiped_on_a_plain_terminal(monkeypatch: pytest.MonkeyPatch, without_rich: None) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    run_demo(rows=4, concurrency=1, as_json=False)

    steps = terminal.getvalue().split("\r")
    assert [step.rpartition(" ")[2] for step in steps[1:5]] == ["1/4", "2/4", "3/4", "4/4"]
    assert steps[1].startswith("rollouts [##########....")
    assert steps[5:] == [" " * len(steps[4]), ""]


def test_progress_is_drawn_with_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")

    code = run_demo(rows=4, concurrency=1, as_json=False)

    assert code == 0
    assert "rollouts" in terminal.getvalue()


def test_json_has_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    run_demo(rows=1, concurrency=1, as_json=True)

    assert terminal.getvalue() == ""


def test_ctrl_c_ends_the_demo_cleanly(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    without_rich: None,
) -> None:
    terminal = Terminal(on_write=interrupt)
    monkeypatch.setattr(sys, "stderr", terminal)

    with pytest.raises(KeyboardInterrupt):
        run_demo(rows=1000, concurrency=8, as_json=False)

    assert "Traceback" not in terminal.getvalue()
    assert capsys.readouterr().out == ""
    assert "did not end within" not in caplog.text, "what is interrupted gets the time to end"


# ---------------------------------------------------------------- by hand


@pytest.mark.skipif(shutil.which("curl") is None, reason=needs("curl"))
async def test_the_lines_to_try_by_hand_work_as_they_are(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(calculator.agent)
    row = load_rows()[46]
    trainer.on_chat(ScriptedModel([row]).answer)
    shown = by_hand(row).replace(f":{SERVICE_PORT}/", f":{server.port}/")
    shown = shown.replace(f"http://127.0.0.1:{TRAINER_PORT}", trainer.url)

    answers = [await _shell(line) for line in shown.splitlines() if line.lstrip().startswith("curl")]

    init, state, result, metrics = answers
    assert msgspec.json.decode(init)["rollout_id"] == "by-hand-1"
    assert msgspec.json.decode(state)["rollout_id"] == "by-hand-1"
    assert msgspec.json.decode(result)["reward"] == 1
    assert b"# HELP " in metrics


async def _shell(line: str) -> bytes:
    process = await asyncio.create_subprocess_shell(line, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(GENEROUS_SECONDS):
        out, _ = await process.communicate()
    return out


def test_the_commands_to_try_by_hand_are_those_that_exist() -> None:
    shown = by_hand(load_rows()[0])

    assert f"python -m rollout serve rollout.examples.calculator:agent --port {SERVICE_PORT}" in shown
    assert f"python -m rollout.demo --port {TRAINER_PORT}" in shown
    assert shown.isascii()


async def test_the_trainer_alone_plays_the_dataset(serve: Serve) -> None:
    server = await serve(calculator.agent)
    row = load_rows()[0]
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    playing = asyncio.create_task(serve_trainer(0, ready.set_result))
    url = await ready

    known = await server.post_init(
        rollout_id="known", server_url=url, messages=row.messages, metadata=row.metadata, completion_params={}
    )
    unknown = await server.post_init(rollout_id="unknown", server_url=url)
    results = [await server.result(rollout_id) for rollout_id in ("known", "unknown")]

    playing.cancel()
    await asyncio.wait([playing])
    assert (known.status, unknown.status) == (202, 202)
    assert results[0]["reward"] == 1
    assert "I only know" in results[1]["final_messages"][-1]["content"]


def test_the_trainer_alone_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal(on_write=interrupt)
    monkeypatch.setattr(sys, "stdout", out)

    code = demo.main(["--port", "0"])

    assert code == 130
    assert "the demo's trainer plays on http://127.0.0.1:" in out.getvalue()


@pytest.mark.parametrize("port", ["taken", "70000"])
def test_a_port_that_cannot_be_had_is_one_clear_line(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = port.replace("taken", str(taken.getsockname()[1]))

        code = demo.main(["--port", number])

    assert code == 1
    why = "it is in use by another process" if port == "taken" else "a port is a number from 0 to 65535"
    assert capsys.readouterr().err == f"rollout: cannot listen on 127.0.0.1:{number}: {why}\n"


async def test_a_row_is_recognised_under_any_rollout_id(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(calculator.agent)
    row = load_rows()[45]
    trainer.on_chat(ScriptedModel(load_rows()).answer)

    response = await drive(server.session, make_request(messages=row.messages, metadata=row.metadata), trainer=trainer)

    assert response["reward"] == 1
    assert [message["role"] for message in response["final_messages"][2:]] == ["assistant", "tool"] * 2 + ["assistant"]
    ids = [call["id"] for message in response["final_messages"] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 2


# ---------------------------------------------------------------- totals


def test_totals_count_what_the_rows_say() -> None:
    reports = [
        RowReport(id=str(n), latency_ms=n, turns=2, tools=1, reward=1.0 if n > 5 else None, problem=None)
        for n in range(1, 21)
    ]

    totals = totals_of(reports, 4)

    assert (totals.rollouts, totals.rollouts_per_second, totals.mean_reward) == (20, 5, 0.75)
    assert (totals.llm_calls, totals.tool_calls) == (40, 20)
    assert (totals.p50_latency_ms, totals.p95_latency_ms) == (10, 19)


def test_totals_of_one_row_are_that_row() -> None:
    totals = totals_of([RowReport(id="a", latency_ms=7, problem="no")], 1)

    assert (totals.p50_latency_ms, totals.p95_latency_ms, totals.solved) == (7, 7, 0)


@pytest.mark.parametrize("option", [["--rows", "0"], ["--rows", "x"], ["--concurrency", "-1"]])
def test_options_that_mean_nothing_are_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["demo", *option])

    assert exited.value.code == 2
