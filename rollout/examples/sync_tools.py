"""A model that writes SQL: tools that block. Each call runs in a thread of its own, so nobody else has to wait.

::

    python -m rollout validate rollout.examples.sync_tools:agent
    python -m rollout serve rollout.examples.sync_tools:agent

A plain `def` is all it takes. A thread cannot be cancelled, however, so a blocking tool should bound itself: `query`
gives up after half a second, and what the model wrote may read, nothing else.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import Any

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.messages import get_message_content
from rollout.agent.tools import tool
from rollout.errors import ToolExecutionError
from rollout.schemas import MessageDict

TABLES = """\
CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT, year INTEGER, pages INTEGER);
CREATE TABLE loan (book_id INTEGER REFERENCES book (id), reader TEXT, days INTEGER);"""

ROWS = """\
INSERT INTO book VALUES (1, 'The Lighthouse', 1927, 310), (2, 'Salt', 2002, 484), (3, 'Wind and Sand', 1939, 196);
INSERT INTO loan VALUES (1, 'Ada', 14), (1, 'Ben', 30), (2, 'Ada', 7), (3, 'Cleo', 21), (3, 'Ben', 3);"""

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_MOST_SECONDS = 0.5
_MOST_ROWS = 50
_MOST_BYTES = 100_000
_STEPS_BETWEEN_CHECKS = 10_000


@tool
def tables() -> str:
    """The tables, as the statements that made them."""
    return TABLES


@tool
def query(sql: str) -> list[dict[str, Any]]:
    """Run one SELECT on the library's SQLite database; at most 50 rows come back.

    Args:
        sql: the statement
    """
    with contextlib.closing(_library()) as connection:
        try:
            return [dict(row) for row in connection.execute(sql).fetchmany(_MOST_ROWS)]
        except sqlite3.Error as exc:
            raise ToolExecutionError(f"SQLite says: {exc}") from exc


def _library() -> sqlite3.Connection:
    """A database of its own for each call, as SQLite connections do not like to change threads. Can only be read."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(TABLES + ROWS)
    connection.row_factory = sqlite3.Row
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
    connection.set_authorizer(_authorize)
    gives_up_at = time.monotonic() + _MOST_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > gives_up_at, _STEPS_BETWEEN_CHECKS)
    return connection


def _authorize(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


class Librarian(RolloutAgentLoop):
    """Lets the model query until it answers; the reward is 1 if the answer contains `metadata["answer"]`."""

    name = "librarian"
    tools = (tables, query)

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages: list[MessageDict] = list(ctx.request.messages)
        while True:
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
            if not result.has_tool_calls:
                break
            messages.extend(await ctx.call_tools(result.tool_calls))
        expected = ctx.request.metadata.get("answer")
        said = get_message_content(messages[-1])
        return ctx.complete(messages, reward=None if expected is None else float(str(expected) in said))


agent = Librarian()
