"""The process: commands, signals, and what an agent can do to it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession
from support import Process, environment, process_of, run_command

from rollout import __version__
from rollout.cli import main
from rollout.errors import AgentLoadError, MissingExtra
from rollout.examples.calculator import CalculatorAgent
from rollout.process import loop_factory, serve_agent_loop
from rollout.settings import RolloutSettings
from rollout.testing import MockTrainer, hold, make_request
from rollout.wire import encode_strict

AGENT = """
import asyncio
from rollout import RolloutAgentLoop


class Agent(RolloutAgentLoop):
    name = "process"

    async def run(self, ctx):
        what = ctx.request.metadata.get("do", "chat")
        if what == "exit in a task":
            asyncio.get_running_loop().create_task(self._exit())
            await asyncio.sleep(0.01)
        if what == "interrupt in a task":
            asyncio.get_running_loop().create_task(self._interrupt())
            await asyncio.sleep(0.01)
        if what == "exit":
            raise SystemExit(3)
        if what == "exit in a callback":
            asyncio.get_running_loop().call_soon(self._exit_now)
            await asyncio.sleep(0.01)
        if what == "swallow":
            for _ in range(2):
                try:
                    await ctx.chat(ctx.request.messages)
                except asyncio.CancelledError:
                    pass
        await ctx.chat(ctx.request.messages)
        return ctx.complete(ctx.request.messages)

    async def _exit(self):
        raise SystemExit(3)

    async def _interrupt(self):
        raise KeyboardInterrupt

    def _exit_now(self):
        raise SystemExit(3)


class Blocking(Agent):
    def run(self, ctx):
        return None


def look_up(text: str) -> str:
    return text


class Untagged(Agent):
    tools = [look_up]


class Odd(Agent):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "x": {"type": "float"}}}}}]


class Choosy(Agent):
    def get_tools(self, request):
        return [{"type": "function", "function": {"name": request.metadata["tool"]}}]


agent = Agent()
blocking, untagged, odd, choosy = Blocking(), Untagged(), Odd(), Choosy()
not_valid = type("Broken", (Agent,), {"get_tools": lambda self, request: [{"type": "function"}], "name": "broken"})()
"""

QUICK = {
    "SERVER_PORT": 0,
    "SERVER_CANCEL_GRACE_SECONDS": 0.05,
    "SERVER_SHUTDOWN_GRACE_SECONDS": 5,
    "CLIENT_RETRY_BASE_DELAY": 0.01,
    "CLIENT_RETRY_MAX_DELAY": 0.01,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with an agent in it."""
    (tmp_path / "process_agent.py").write_text(AGENT)
    return tmp_path


@asynccontextmanager
async def serving(folder: Path, **settings: object) -> AsyncIterator[Process]:
    """A process that serves the agent of the folder."""
    env = environment(**{**QUICK, **settings})
    async with process_of(["serve", "process_agent:agent"], folder, env) as process:
        await process.wait_ready()
        yield process


async def health_of(process: Process) -> tuple[int, str]:
    """Status code and status of `/health`."""
    async with ClientSession() as session, session.get(process.url + "/health") as response:
        return response.status, (await response.json())["status"]


async def until_draining(process: Process) -> None:
    """Return once the signal has arrived."""
    async with asyncio.timeout(5):
        while (await health_of(process))[1] != "draining":
            pass  # asking takes a turn of the loop or two


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_a_signal_lets_running_rollouts_end_and_then_exits_with_0(
    folder: Path, trainer: MockTrainer, number: signal.Signals
) -> None:
    answer = hold()
    trainer.on_chat(answer)
    async with serving(folder) as process:
        for name in ("a", "b"):
            assert (await process.init(trainer, rollout_id=name)).status == 202
        await trainer.wait_chats(2)
        process.signal(number)
        await until_draining(process)
        assert await health_of(process) == (503, "draining")
        refused = await process.init(trainer, rollout_id="late")
        assert (refused.status, refused.json["code"]) == (503, "draining")
        assert "Retry-After" in refused.headers
        answer.release()
        assert await process.end() == 0
    assert sorted(r.rollout_id or "" for r in trainer.completions()) == ["a", "b"]
    assert {r.json["status"] for r in trainer.completions()} == {"COMPLETED"}
    assert "Traceback" not in process.stderr


async def test_what_is_left_after_the_grace_ends_as_shutdown_each_exactly_once(
    folder: Path, trainer: MockTrainer
) -> None:
    trainer.on_chat(hold())
    settings = {"SERVER_SHUTDOWN_GRACE_SECONDS": 0.1, "SERVER_MAX_CONCURRENT_ROLLOUTS": 2}
    async with serving(folder, **settings) as process:
        for name, do in {"running": "chat", "swallowing": "swallow", "queued": "chat"}.items():
            await process.init(trainer, rollout_id=name, metadata={"do": do})
        await trainer.wait_chats(2)
        process.signal(signal.SIGTERM)
        assert await process.end() == 0
    results = [request.json for request in trainer.completions()]
    assert sorted(result["rollout_id"] for result in results) == ["queued", "running", "swallowing"]
    for result in results:
        assert (result["status"], result["finish_reason"]) == ("ERROR", "shutdown")
        assert (result["error_category"], result["retryable"]) == ("interrupted", True)


async def test_an_idle_process_ends_at_once_with_0_and_without_noise(folder: Path) -> None:
    async with (
        serving(folder, SERVER_SHUTDOWN_GRACE_SECONDS=3600) as process,
        ClientSession() as session,
        session.get(process.url + "/health"),
    ):
        process.signal(signal.SIGTERM)  # a connection that is kept alive holds nobody up
        assert await process.end() == 0
    assert "Traceback" not in process.stderr
    assert "Error" not in process.stderr


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGTERM, signal.SIGINT, 130),
    ],
    ids=["term", "int"],
)
async def test_a_second_signal_exits_at_once_with_its_number(
    folder: Path, trainer: MockTrainer, first: signal.Signals, second: signal.Signals, code: int
) -> None:
    trainer.on_chat(hold())
    async with serving(folder, SERVER_SHUTDOWN_GRACE_SECONDS=3600) as process:
        await process.init(trainer, rollout_id="a")
        await trainer.wait_chats(1)
        process.signal(first)
        await until_draining(process)
        process.signal(second)
        assert await process.end() == code
    assert trainer.completions() == []


async def test_results_that_were_refused_for_now_are_tried_again_before_the_exit(
    folder: Path, trainer: MockTrainer
) -> None:
    trainer.on_completed(503, times=1)
    async with serving(folder, CLIENT_RETRY_BASE_DELAY=60, CLIENT_RETRY_MAX_DELAY=300) as process:
        await process.init(trainer, rollout_id="a")
        await trainer.wait_completed("a")
        process.signal(signal.SIGTERM)
        assert await process.end() == 0
    assert [r.status for r in trainer.completions()] == [503, 200]
    assert len({r.body for r in trainer.completions()}) == 1


@pytest.mark.parametrize(
    ("store", "fate"),
    [("memory:", "lost: the state is in memory"), ("sqlite:///state.db", "kept in state.db")],
    ids=["memory", "sqlite"],
)
async def test_the_last_line_says_what_becomes_of_results_that_were_not_delivered(
    folder: Path, trainer: MockTrainer, store: str, fate: str
) -> None:
    trainer.on_completed(404, times=1)
    async with serving(folder, SERVER_STATE_URL=store) as process:
        for name in ("refused", "taken"):
            await process.init(trainer, rollout_id=name)
            await trainer.wait_completed(name)
        process.signal(signal.SIGTERM)
        assert await process.end() == 0
    assert process.stderr.splitlines()[-1].endswith(f"stopped: 1 result was not delivered, and {fate}")


async def test_the_last_line_says_that_all_is_well(folder: Path, trainer: MockTrainer) -> None:
    async with serving(folder) as process:
        await process.init(trainer, rollout_id="a")
        await trainer.wait_completed("a")
        process.signal(signal.SIGTERM)
        assert await process.end() == 0
    assert process.stderr.splitlines()[-1].endswith("stopped: every result was delivered")


# ---------------------------------------------------------------- what an agent can do to it


async def test_an_agent_that_ends_the_process_ends_only_itself(folder: Path, trainer: MockTrainer) -> None:
    answer = hold()
    trainer.on_chat(answer, rollout_id="bystander")
    ways = {
        "exit": "ERROR",
        "exit in a task": "COMPLETED",
        "exit in a callback": "COMPLETED",
        "interrupt in a task": "COMPLETED",
    }
    async with serving(folder) as process:
        await process.init(trainer, rollout_id="bystander")
        await trainer.wait_chats(1, "bystander")
        for do, status in ways.items():
            assert (await process.init(trainer, rollout_id=do, metadata={"do": do})).status == 202
            assert (await trainer.wait_completed(do)).json["status"] == status
            assert await health_of(process) == (200, "healthy")
        answer.release()
        assert (await trainer.wait_completed("bystander")).json["status"] == "COMPLETED"
        process.signal(signal.SIGTERM)
        assert await process.end() == 0


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["serve", "--help"], ["validate", "--help"]], ids=str)
def test_help_is_printed_with_0(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


async def test_the_module_can_be_run(tmp_path: Path) -> None:
    code, stdout, stderr = await run_command(["--version"], tmp_path)
    assert (code, stdout.strip(), stderr) == (0, f"rollout {__version__}", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["serve", "--nonsense"],
        ["serve", "--port", "http"],
        ["serve", "--port", "65536"],
        ["serve", "--port", "-1"],
        ["serve", "a:b", "c:d"],
        ["validate"],
        ["demo", "--rows", "0"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_2_with_a_word_about_it(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--help" in said.err


@pytest.mark.parametrize(
    "arguments", [["serve", "nocolon"], ["serve", "--host", "a/b"], ["validate", "no_such_module:agent"]], ids=" ".join
)
async def test_wrong_values_of_arguments_are_2_without_a_traceback(tmp_path: Path, arguments: list[str]) -> None:
    code, stdout, stderr = await run_command(arguments, tmp_path)
    assert (code, stdout) == (2, "")
    assert arguments[-1].partition(":")[0] in stderr
    assert "Traceback" not in stderr


async def test_validate_shows_the_tools_of_a_good_agent(tmp_path: Path) -> None:
    code, stdout, _ = await run_command(["validate", "rollout.examples.calculator:agent"], tmp_path)
    assert code == 0
    assert '"name": "add"' in stdout


async def test_validate_ends_with_1_for_an_agent_with_faults(folder: Path) -> None:
    code, stdout, stderr = await run_command(["validate", "process_agent:not_valid", "--json"], folder)
    assert code == 1, stderr
    assert json.loads(stdout)["valid"] is False


async def test_validate_shows_what_a_tool_that_is_none_looks_like(folder: Path) -> None:
    code, stdout, stderr = await run_command(["validate", "process_agent:untagged"], folder)
    assert (code, stderr) == (1, "")
    assert "NOT_A_TOOL" in stdout
    assert "put @tool above it" in stdout


async def test_validate_asks_with_a_request_from_a_file(folder: Path) -> None:
    (folder / "request.json").write_bytes(encode_strict(make_request(metadata={"tool": "look_up"})))
    with_it = await run_command(["validate", "process_agent:choosy", "--request", "request.json"], folder)
    without = await run_command(["validate", "process_agent:choosy"], folder)
    assert with_it[0] == 0
    assert '"name": "look_up"' in with_it[1]
    assert without[0] == 1
    assert "GET_TOOLS_FAILED" in without[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "request.json cannot be read: No such file"),
        ("{", "request.json holds no RolloutRequest"),
        ('{"rollout_id": 1}', "request.json holds no RolloutRequest"),
    ],
    ids=["missing", "json", "schema"],
)
def test_a_file_without_a_request_is_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    says: str,
) -> None:
    monkeypatch.chdir(folder)
    if text is not None:
        (folder / "request.json").write_text(text)
    assert main(["validate", "rollout.examples.calculator:agent", "--request", "request.json"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["blocking", "untagged"])
async def test_an_agent_that_no_request_can_help_is_not_served(folder: Path, name: str) -> None:
    code, stdout, stderr = await run_command(["serve", f"process_agent:{name}", "--port", "0"], folder)
    assert (code, stdout) == (2, "")
    assert {"blocking": "RUN_NOT_ASYNC", "untagged": "NOT_A_TOOL"}[name] in stderr
    assert "Traceback" not in stderr


async def test_an_agent_with_odd_tools_is_served_with_a_warning(folder: Path) -> None:
    env = environment(**QUICK)
    async with process_of(["serve", "process_agent:odd"], folder, env) as process:
        await process.wait_ready()
        process.signal(signal.SIGTERM)
        assert await process.end() == 0
    [line] = [line for line in process.stderr.splitlines() if "UNKNOWN_TYPE" in line]
    assert "WARNING" in line


async def test_a_program_serves_as_the_command_line_does(folder: Path) -> None:
    program = "import process_agent, rollout; rollout.serve_agent_loop(process_agent.agent, port=0)"
    async with process_of([], folder, environment(), program) as process:
        await process.wait_ready()
        assert await health_of(process) == (200, "healthy")
        process.signal(signal.SIGTERM)
        assert await process.end() == 0
    assert "stopped: every result was delivered" in process.stderr


class Signalling(io.StringIO):
    """A standard output that ends the service once it has said where it listens."""

    def write(self, text: str) -> int:
        if text.startswith("serving agent"):
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("127.0.0.1", r"serving agent 'calculator' on http://127\.0\.0\.1:\d+ .*\n"),
        ("localhost", r"serving agent 'calculator' on http://localhost:\d+ .*\n"),
        ("0.0.0.0", r"API key \(made now, shown once\): osm_rollout_\S{32}\nserving agent .*\n"),
    ],
)
def test_a_program_gets_the_prompt_and_a_key_off_loopback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, says: str
) -> None:
    monkeypatch.setattr(sys, "stdout", out := Signalling())
    with caplog.at_level(logging.INFO):
        serve_agent_loop(CalculatorAgent(), RolloutSettings(), host=host, port=0, gc="python")
    assert re.fullmatch(says, out.getvalue())
    assert caplog.messages[-1] == "stopped: every result was delivered"


def test_a_program_cannot_serve_what_no_request_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(CalculatorAgent):
        def run(self, ctx: object) -> None:  # type: ignore[override]
            """Would block every other rollout."""

    with pytest.raises(AgentLoadError, match="could not end one rollout well:\n  RUN_NOT_ASYNC at"):
        serve_agent_loop(Plain(), RolloutSettings(), port=0, gc="python")


def test_a_loop_that_is_not_installed_is_told_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(
        MissingExtra, match=r"pip install 'rollout\[speed\]' \(from a checkout: pip install '\.\[speed\]'\)"
    ):
        serve_agent_loop(CalculatorAgent(), loop="uvloop")
    assert loop_factory("auto") is None


def test_settings_show_all_there_is_to_know_what_is_asked_most_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["settings"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()[1:]
    assert heading.split() == ["variable", "value", "source", "default", "bounds"]
    assert max(row.index("default") for row in rows if row.count("default") == 1) <= 100


async def test_settings_are_listed_with_value_and_source_and_without_the_key(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OSMOSIS_ROLLOUT_SERVER_PORT=9001\n")
    settings = {"SERVER_API_KEY": "my-own-key", "CLIENT_MAX_RETRIES": 5}
    code, stdout, _ = await run_command(["settings", "--json"], tmp_path, **settings)
    assert code == 0
    assert "my-own-key" not in stdout
    rows = {row["variable"].removeprefix("OSMOSIS_ROLLOUT_"): row for row in json.loads(stdout)}
    assert (rows["SERVER_PORT"]["value"], rows["SERVER_PORT"]["source"]) == ("9001", ".env")
    assert (rows["CLIENT_MAX_RETRIES"]["value"], rows["CLIENT_MAX_RETRIES"]["source"]) == ("5", "environment")
    assert rows["SERVER_HOST"]["source"] == "default"


@pytest.mark.parametrize("command", [["validate", "rollout.examples.calculator:agent"], ["settings"]])
def test_a_reader_that_has_seen_enough_is_no_error(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rollout", *command], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)

    assert (done.returncode, done.stderr) == (0, b"")
