"""The bundled dataset of word problems, a reader of JSONL, and the script by which a mock model plays a row.

A row is a JSON object on a line of its own: `id`, `messages`, `metadata`, and for the scripted model a `plan` and a
`reply`. A plan is a list of turns, a turn a list of tool calls. `{1}` stands for what the first call of the row gave
back, so that the model works with the real results of real tools::

    {"id": "calc-001", "messages": [...], "metadata": {"answer": 16},
     "plan": [[{"name": "add", "arguments": {"a": 3, "b": 5}}],
              [{"name": "multiply", "arguments": {"a": "{1}", "b": 2}}]],
     "reply": "She has {2} apples."}
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rollout.agent.messages import get_message_content, is_assistant_message, is_tool_message
from rollout.errors import InvalidJSON, RolloutError
from rollout.schemas import MessageDict
from rollout.wire import check_body

BUNDLED = Path(__file__).with_name("calculator.jsonl")
"""The 50 word problems for the calculator."""

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_GZIP = b"\x1f\x8b"
_REFERENCE = re.compile(r"\{(\d{1,3})\}")
_DECIMALS = 6


class DatasetError(RolloutError):
    """A dataset cannot be read; the text names the file, the line if there is one, and what is wrong."""


class PlannedCall(Struct, frozen=True, kw_only=True):
    """A tool call of the scripted model; `arguments` that are text go out as they are, which lets them be malformed."""

    name: str
    arguments: dict[str, Any] | str


class Move(Struct, frozen=True, kw_only=True):
    """What the scripted model does next: call tools, or say something and stop."""

    calls: list[PlannedCall] = []
    text: str = ""


class Row(Struct, frozen=True, kw_only=True):
    """One task. Without a plan the scripted model only says the reply."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    messages: Annotated[list[MessageDict], Meta(min_length=1)]
    metadata: dict[str, Any] = {}
    plan: list[list[PlannedCall]] = []
    reply: str = ""

    def next_move(self, messages: Sequence[MessageDict]) -> Move:
        """What comes after this history: it tells the turn, and the results of the calls made so far. Never raises."""
        said = messages[len(self.messages) :]
        turn = sum(map(is_assistant_message, said))
        results = [get_message_content(message) for message in said if is_tool_message(message)]
        if turn >= len(self.plan):
            return Move(text=_REFERENCE.sub(lambda found: _readable(_result_of(found, results)), self.reply))
        return Move(calls=[_filled_in(call, results) for call in self.plan[turn]])


def _filled_in(call: PlannedCall, results: Sequence[str]) -> PlannedCall:
    if isinstance(call.arguments, str):
        return call
    arguments = {name: _resolved(value, results) for name, value in call.arguments.items()}
    return PlannedCall(name=call.name, arguments=arguments)


def _resolved(value: Any, results: Sequence[str]) -> Any:
    """The value, or the result it stands for: a number where the tool gave one, else the text."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    text = _result_of(found, results)
    try:
        return float(text)
    except ValueError:
        return text


def _result_of(reference: re.Match[str], results: Sequence[str]) -> str:
    number = int(reference[1])
    return results[number - 1] if 1 <= number <= len(results) else reference[0]


def _readable(result: str) -> str:
    """A tool's number as a person would write it: 0.30000000000000004 is 0.3, and 7.0 is 7."""
    try:
        return f"{float(result):.{_DECIMALS}f}".rstrip("0").rstrip(".")
    except ValueError:
        return result


# ---------------------------------------------------------------- reading a file


_decode_row = msgspec.json.Decoder(Row).decode


def load_rows(path: Path | str = BUNDLED) -> list[Row]:
    """The rows of a JSONL file in UTF-8, with or without a BOM; lines end at a line feed and nowhere else.

    Blank lines are skipped. Raises one `DatasetError` for the first thing that is wrong: a file that cannot be read, is
    in another encoding or holds no row; a line that is not a row; an id that was there before.
    """
    rows: list[Row] = []
    line_of: dict[str, int] = {}
    try:
        with open(path, "rb") as file:  # binary: text mode would also break lines at a lone carriage return
            for number, line in enumerate(file, 1):
                if number == 1:
                    _check_encoding(path, line)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                row = _read_row(path, number, line)
                if row.id in line_of:
                    raise DatasetError(f"{path}, line {number}: the id {row.id!r} is that of line {line_of[row.id]}")
                line_of[row.id] = number
                rows.append(row)
    except OSError as exc:
        raise DatasetError(f"{path} cannot be read: {exc.strerror}") from exc
    if not rows:
        raise DatasetError(f"{path} holds no rows")
    return rows


def _check_encoding(path: Path | str, start: bytes) -> None:
    if start.startswith(_GZIP):
        raise DatasetError(f"{path} is compressed with gzip; unpack it first")
    if start.startswith(_UTF16) or b"\0" in start:
        raise DatasetError(f"{path} is not UTF-8 but looks like UTF-16 or UTF-32; save it as UTF-8")


def _read_row(path: Path | str, number: int, line: bytes) -> Row:
    try:
        check_body(line)
        return _decode_row(line)
    except (InvalidJSON, msgspec.DecodeError, RecursionError) as exc:
        raise DatasetError(f"{path}, line {number}: {_explain(line, exc)}") from None


def _explain(line: bytes, exc: Exception) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is not UTF-8; save the file as UTF-8"
    return str(exc)
