"""Log lines: one line for one thing, cheap, and silent about peers that speak no HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollout.logs import (
    BufferedHandler,
    JSONFormatter,
    MalformedRequestFilter,
    TextFormatter,
    configure_logging,
    quiet_malformed_requests,
)


def make_record(message: str = "rollout %s started", *args: object, **fields: Any) -> logging.LogRecord:
    """A record of one second and a half after the epoch."""
    base = {"name": "rollout.server", "levelno": 20, "levelname": "INFO", "msg": message, "args": args, "created": 1.5}
    return logging.makeLogRecord(base | fields)


def raised() -> Any:
    """What `exc_info` holds for an error whose text tries to forge a line."""
    try:
        raise ValueError("bad\n2026-01-01 INFO forged\x1b[31m")
    except ValueError:
        return sys.exc_info()


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Puts back what `configure_logging()` changes in the process."""
    switches = ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks", "_srcfile")
    before = {name: getattr(logging, name) for name in switches if hasattr(logging, name)}
    root, access, server = logging.getLogger(), logging.getLogger("aiohttp.access"), logging.getLogger("aiohttp.server")
    handlers, levels, filters = root.handlers[:], (root.level, access.level, server.level), server.filters[:]
    yield
    root.handlers[:], server.filters[:] = handlers, filters
    for logger, level in zip((root, access, server), levels, strict=True):
        logger.setLevel(level)
    for name, value in before.items():
        setattr(logging, name, value)


# ---------------------------------------------------------------- formats


def test_json_line_holds_time_level_logger_and_message() -> None:
    line = json.loads(JSONFormatter().format(make_record("rollout %s started", "r1")))
    assert line == {
        "at": "1970-01-01T00:00:01.500Z",
        "level": "INFO",
        "logger": "rollout.server",
        "message": "rollout r1 started",
    }


def test_text_line_reads_from_left_to_right() -> None:
    formatter = TextFormatter()
    assert formatter.format(make_record("a")) == "1970-01-01T00:00:01.500Z INFO rollout.server: a"
    assert formatter.format(make_record("b", created=61.0625)) == "1970-01-01T00:01:01.062Z INFO rollout.server: b"


@given(st.text(st.characters(exclude_categories=())))
def test_no_id_can_start_a_line_or_reach_the_terminal(rollout_id: str) -> None:
    record = make_record("rollout %s started", rollout_id)
    text, line = TextFormatter().format(record), JSONFormatter().format(record)
    assert text.isprintable()
    assert not any(ord(c) < 0x20 for c in line)
    assert isinstance(json.loads(line)["message"], str)
    line.encode()


def test_lone_surrogate_costs_no_line_of_json() -> None:
    assert json.loads(JSONFormatter().format(make_record("id %s", "a\ud800b")))["message"] == "id a\ufffdb"


def test_time_moves_on_within_and_beyond_the_second() -> None:
    formatter = JSONFormatter()
    times = [json.loads(formatter.format(make_record(created=created)))["at"] for created in (1.5, 1.75, 2.0)]
    assert times == ["1970-01-01T00:00:01.500Z", "1970-01-01T00:00:01.750Z", "1970-01-01T00:00:02.000Z"]


def test_printable_text_of_any_script_stays_readable() -> None:
    assert TextFormatter().format(make_record("数学 ü 🙂")).endswith("数学 ü 🙂")
    assert TextFormatter().format(make_record("a\r\nb\x1b\u2028\ud800")).endswith(r"a\r\nb\x1b\u2028\ud800")


def test_text_traceback_keeps_its_lines_but_none_starts_at_the_margin() -> None:
    first, *rest = TextFormatter().format(make_record("failed", exc_info=raised())).split("\n")
    assert first.endswith("failed")
    assert len(rest) >= 4
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert rest[-1] == "    2026-01-01 INFO forged\\x1b[31m"


def test_json_traceback_is_one_field() -> None:
    text = JSONFormatter().format(make_record("failed", exc_info=raised(), stack_info="Stack:\n  here"))
    assert "\n" not in text
    line = json.loads(text)
    assert "ValueError: bad" in line["exception"]
    assert line["stack"] == "Stack:\n  here"


def test_traceback_text_made_by_another_handler_is_used() -> None:
    record = make_record("failed", exc_text="Traceback: made before")
    assert TextFormatter().format(record).endswith("\n    Traceback: made before")


def test_extra_fields_stand_beside_ours_and_never_replace_them() -> None:
    record = make_record("x", rollout_id="r1", level="forged", tags={"a"}, odd=float("nan"))
    line = json.loads(JSONFormatter().format(record))
    assert (line["rollout_id"], line["level"], line["tags"], line["odd"]) == ("r1", "INFO", ["a"], None)


def test_formatters_can_be_named_in_a_dict_config() -> None:
    assert JSONFormatter("%(message)s", datefmt=None, style="%").format(make_record("x")).startswith("{")


# ---------------------------------------------------------------- the process


@pytest.mark.parametrize(("form", "start"), [("json", '{"at":"'), ("text", "20")])
def test_configured_process_logs_one_line_to_stderr(
    form: Any, start: str, logging_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("text", "debug")
    configure_logging(form, "info")
    logging.getLogger("rollout.x").debug("not this")
    logging.getLogger("aiohttp.access").info("nor this")
    logging.getLogger("rollout.x").info("rollout %s\nstarted", "r1")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().startswith(start)
    assert r"rollout r1\nstarted" in stream.getvalue()


@pytest.mark.parametrize(("form", "level"), [("xml", "info"), ("text", "loud")])
def test_unknown_format_or_level_is_refused(form: Any, level: str, logging_restored: None) -> None:
    with pytest.raises(ValueError, match=r"xml|LOUD"):
        configure_logging(form, level)


def test_filter_is_put_on_once(logging_restored: None) -> None:
    quiet_malformed_requests()
    quiet_malformed_requests()
    filters = logging.getLogger("aiohttp.server").filters
    assert sum(isinstance(f, MalformedRequestFilter) for f in filters) == 1


async def send_to_server(*, handler: Any, request: bytes) -> bytes:
    """What a real server answers to these bytes."""
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer
    finally:
        await runner.cleanup()


async def fail(request: web.Request) -> web.Response:
    """A handler with a bug."""
    raise RuntimeError("a bug")


MALFORMED = {
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "bad header": b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization\x00: Bearer sk-secret\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_request_is_one_debug_line_that_quotes_nothing(
    request_bytes: bytes, logging_restored: None, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_malformed_requests()
    with caplog.at_level(logging.DEBUG, "aiohttp.server"):
        answer = await send_to_server(handler=fail, request=request_bytes)
    assert b" 400 " in answer
    assert [(r.levelname, r.exc_info) for r in caplog.records] == [("DEBUG", None)]
    assert caplog.records[0].getMessage().startswith("malformed request refused: ")
    assert "secret" not in caplog.text


async def test_malformed_request_is_not_logged_above_debug(
    logging_restored: None, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_malformed_requests()
    with caplog.at_level(logging.INFO, "aiohttp.server"):
        await send_to_server(handler=fail, request=MALFORMED["bad header"])
    assert not caplog.records


async def test_bug_in_a_handler_keeps_its_traceback(logging_restored: None, caplog: pytest.LogCaptureFixture) -> None:
    quiet_malformed_requests()
    await send_to_server(handler=fail, request=b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "RuntimeError: a bug" in caplog.text


# ---------------------------------------------------------------- lines that are held back


class Stream(io.StringIO):
    """Says when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.was_written = asyncio.Event()

    def write(self, text: str) -> int:
        self.was_written.set()
        return super().write(text)


class Log:
    """A logger of its own that writes through a `BufferedHandler` into a text."""

    def __init__(self) -> None:
        self.stream = Stream()
        self._handler = BufferedHandler(self.stream)

    def line(self, message: str, levelno: int = logging.INFO) -> None:
        """Log a line."""
        self._handler.handle(make_record(message, levelno=levelno))

    @property
    def written(self) -> list[str]:
        """What has reached the stream."""
        return self.stream.getvalue().split()


async def log_line(log: Log, message: str) -> None:
    """Log a line on whatever loop this runs."""
    log.line(message)


async def test_lines_of_one_moment_are_written_together_a_moment_later() -> None:
    log = Log()
    log.line("a")
    log.line("b")
    assert log.written == []
    await asyncio.wait_for(log.stream.was_written.wait(), 5)
    assert log.written == ["a", "b"]


async def test_a_warning_is_written_at_once_with_what_came_before() -> None:
    log = Log()
    log.line("a")
    log.line("b", logging.WARNING)
    assert log.written == ["a", "b"]


async def test_a_line_of_another_threads_loop_is_written_at_once_and_holds_back_none() -> None:
    log = Log()
    await asyncio.to_thread(lambda: asyncio.run(log_line(log, "a")))
    assert log.written == ["a"]
    log.stream.was_written.clear()
    log.line("b")
    assert log.written == ["a"]
    await asyncio.wait_for(log.stream.was_written.wait(), 5)
    assert log.written == ["a", "b"]


def test_a_loop_that_has_ended_holds_back_nothing() -> None:
    log = Log()
    asyncio.run(log_line(log, "a"))
    log.line("b")
    assert log.written == ["a", "b"]
    asyncio.run(log_line(log, "c"))
    asyncio.run(log_line(log, "d"))
    assert log.written == ["a", "b", "c", "d"]


async def test_a_loop_that_hangs_holds_nothing_back_beyond_its_time() -> None:
    log = Log()
    log.line("a")
    time.sleep(0.06)  # the very thing that is tested: a blocked loop  # noqa: ASYNC251
    log.line("b")
    assert log.written == ["a", "b"]
