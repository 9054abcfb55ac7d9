"""The `.env` file: what it assigns, and which of its lines assign nothing.

python-dotenv skips a line that it cannot read, and the default would go into production. Here such a
line is named.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from dotenv.parser import Binding

_QUOTED_VALUE = re.compile(r"[^=#\n]+=[ \t]*['\"]")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class EnvFile(Struct, frozen=True):
    """A file that was read: `values` by name, and one line in `problems` for each mistake."""

    values: dict[str, str]
    problems: list[str]


def read_env_file(path: Path) -> EnvFile:
    """What the file says; one that is missing, or is a folder, says nothing. Never raises, `os.environ` is untouched.

    As python-dotenv has it: the last assignment of a name wins, `${NAME}` stands for another variable. Problems name
    the file and the line, never its text, which may be a secret.
    """
    try:
        body = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return EnvFile({}, [])
    except OSError as exc:
        return EnvFile({}, [f"{path}: cannot be read: {exc.strerror}"])
    if body.startswith(_UTF16_MARKS) or b"\0" in body:
        return EnvFile({}, [f"{path} is UTF-16 or binary; save it as UTF-8"])
    try:
        return _parse(body.decode("utf-8-sig"), path)
    except UnicodeDecodeError as exc:
        line = body.count(b"\n", 0, exc.start) + 1
        byte = f"{body[exc.start]:#04x}"
        return EnvFile({}, [f"{path}, line {line}: the byte {byte} is not UTF-8; save the file as UTF-8"])


def _parse(text: str, path: Path) -> EnvFile:
    from dotenv.main import resolve_variables  # only whoever has a file pays for the import
    from dotenv.parser import parse_stream

    assigned: list[tuple[str, str]] = []
    problems: list[str] = []
    for binding in parse_stream(io.StringIO(text)):
        if binding.key is not None and binding.value is not None:
            assigned.append((binding.key, binding.value))
        elif binding.key is not None or binding.error:
            problems.append(f"{path}, {_line_problem(binding)}")
    values = resolve_variables(assigned, override=True)
    return EnvFile({name: value or "" for name, value in values.items()}, problems)


def _line_problem(binding: Binding) -> str:
    text = binding.original.string.lstrip()
    line = binding.original.line + binding.original.string.removesuffix(text).count("\n")
    if _QUOTED_VALUE.match(text):
        return f"line {line}: a quote is not closed, or text stands behind the closing one"
    return f"line {line} is not NAME=value"
