"""How log lines look: one line for one thing, whatever a rollout id or an error text contains.

Keys are never logged, so nothing here looks for them. `configure_logging()` is for the command line, which owns its
process; a service that is embedded leaves logging to its host, and may use the formatters.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import sys
import threading
import time
from typing import Any, Literal, TextIO

from msgspec import Struct

from rollout.wire import encode, encode_strict

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; whatever else it has was given as `extra`."""

codecs.lookup("unicode_escape")  # loaded from a file, which a process out of descriptors could not open

_INDENT = "    "
_FLUSH_SECONDS = 0.05
_MOST_LINES = 1000


def counted(count: int, noun: str) -> str:
    """The number with its noun: "1 rollout", "2 rollouts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Line(Struct, omit_defaults=True):
    """A JSON line without `extra`."""

    at: str
    level: str
    logger: str
    message: str
    exception: str | None = None
    stack: str | None = None


class _Formatter(logging.Formatter):
    """What both formats share: the time in UTC with milliseconds. Its seconds are formatted once a second."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes and ignores what `dictConfig` may pass: the format is fixed."""
        super().__init__()
        self._second: tuple[int, str] = (0, "1970-01-01T00:00:00")

    def _time(self, created: float) -> str:
        whole = int(created)
        second, text = self._second
        if second != whole:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
            self._second = (whole, text)
        return f"{text}.{int((created - whole) * 1000):03d}Z"

    def _traceback(self, record: logging.LogRecord) -> str | None:
        if record.exc_text:
            return record.exc_text
        return self.formatException(record.exc_info) if record.exc_info else None


class JSONFormatter(_Formatter):
    """One JSON object a line: `at`, `level`, `logger`, `message`, `exception` and `stack` if any, the `extra` given.

    Control characters are JSON escapes, so no text can start a line of its own or reach a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        line = _Line(
            self._time(record.created),
            record.levelname,
            record.name,
            record.getMessage(),
            self._traceback(record),
            record.stack_info,
        )
        fields = record.__dict__
        if not fields.keys() <= _STANDARD:
            extra = {name: value for name, value in fields.items() if name not in _STANDARD}
            ours = {name: getattr(line, name) for name in line.__struct_fields__ if getattr(line, name) is not None}
            return encode(ours | extra | ours)[0].decode()
        try:
            return encode_strict(line).decode()
        except UnicodeEncodeError:
            return encode(line)[0].decode()


class TextFormatter(_Formatter):
    """`TIME LEVEL logger: message` for people; what is not printable is escaped, tracebacks are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, followed by its traceback if it has one."""
        text = f"{self._time(record.created)} {record.levelname} {record.name}: {_escape(record.getMessage())}"
        for block in (self._traceback(record), record.stack_info):
            if block:
                text += "".join(f"\n{_INDENT}{_escape(line)}" for line in block.splitlines())
        return text


def _escape(text: str) -> str:
    """The text with control characters, line separators, direction marks and lone surrogates as backslash escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class MalformedRequestFilter(logging.Filter):
    """Turns the traceback that aiohttp logs for a peer that speaks no HTTP into one DEBUG line.

    Such requests say nothing about this service, and anybody can send any number of them. The line names the type of
    the error only: its text quotes what was sent, an Authorization header too.
    """

    def __init__(self) -> None:
        from aiohttp.http_exceptions import HttpProcessingError

        super().__init__()
        self._malformed = HttpProcessingError

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; one about a malformed request is changed in place."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, self._malformed):
            return True
        record.msg, record.args = "malformed request refused: %s", (type(error).__name__,)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


def quiet_malformed_requests() -> None:
    """Put the `MalformedRequestFilter` on aiohttp's server logger, once."""
    server = logging.getLogger("aiohttp.server")
    if not any(isinstance(f, MalformedRequestFilter) for f in server.filters):
        server.addFilter(MalformedRequestFilter())


class BufferedHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic for the checker only
    """Writes what has gathered in a twentieth of a second in one go; from WARNING on at once, with what came before.

    A write for every line would cost more than making it. Outside the main thread's event loop nothing is held back:
    other loops may end at any moment. What is held at the end is written by `logging.shutdown()`, which runs when the
    interpreter exits.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line; called under the handler's lock."""
        try:
            self._lines.append(self.format(record))
        except Exception:
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING or len(self._lines) > _MOST_LINES or not self._flush_later():
            self.flush()

    def _flush_later(self) -> bool:
        """Whether somebody will flush in time: a timer of the main thread's loop, unless that has stopped or hangs."""
        if self._loop is not None:
            return self._loop.is_running() and time.monotonic() < self._due
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        loop.call_later(_FLUSH_SECONDS, self.flush)
        self._loop, self._due = loop, time.monotonic() + _FLUSH_SECONDS
        return True

    def flush(self) -> None:
        """Write what is held."""
        self.acquire()
        try:
            lines, self._lines, self._loop = self._lines, [], None
            if lines:
                self.stream.write("\n".join(lines) + "\n")
            super().flush()
        except (OSError, ValueError):
            pass  # nobody reads any more; the service goes on without its log
        finally:
            self.release()


def configure_logging(format: Literal["text", "json"] = "text", level: str = "info") -> None:
    """Log to stderr in the format, from the level on; `ValueError` if unknown.

    For a process that the command line owns: it replaces the root handlers, and leaves out what no line shows and each
    would pay for, which is thread, process and task names and the search for the calling line.
    """
    formatters: dict[str, type[_Formatter]] = {"text": TextFormatter, "json": JSONFormatter}
    if format not in formatters:
        raise ValueError(f"the log format must be text or json, got {format!r}")
    handler = BufferedHandler(sys.stderr)
    handler.setFormatter(formatters[format]())
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    quiet_malformed_requests()
    for switch in ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks"):
        setattr(logging, switch, False)
    logging._srcfile = None  # the way to skip findCaller() that the logging HOWTO documents
