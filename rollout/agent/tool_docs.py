"""What a docstring says: the summary that becomes a tool's description, and a line on each parameter.

Google (`Args:`), NumPy (`Parameters` underlined) and Sphinx (`:param x:`) are read, by plain line work: a docstring in
none of these styles is all description.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_SECTIONS = (
    r"args|arguments|parameters|params|other parameters|keyword args|keyword arguments|returns?|yields?|raises?|"
    r"examples?|notes?|warnings?|warns|see also|references|attributes|todo"
)
_PARAMETER_SECTIONS = {
    "args",
    "arguments",
    "parameters",
    "params",
    "other parameters",
    "keyword args",
    "keyword arguments",
}
_GOOGLE_HEADING = re.compile(rf"({_SECTIONS}):\s*\Z", re.IGNORECASE)
_NUMPY_HEADING = re.compile(rf"({_SECTIONS})\s*\Z", re.IGNORECASE)
_UNDERLINE = re.compile(r"-{3,}\s*\Z")
_GOOGLE_ITEM = re.compile(r"(\s+)\*{0,2}(\w+)\s*(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?\s*:\s*(.*)")
_NUMPY_ITEM = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?\Z")
_SPHINX_FIELD = re.compile(r":(\w+)(?:\s+([^:]*))?:\s*(.*)")
_SPHINX_PARAMETERS = {"param", "parameter", "arg", "argument", "key", "keyword"}


@dataclass(frozen=True)
class Docs:
    """A docstring, read."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docs:
    """The description (everything before the first section) and what is said of each parameter. Never raises."""
    if not text:
        return Docs()
    lines = inspect.cleandoc(text).splitlines()
    reader = _Reader()
    for index, line in enumerate(lines):
        reader.read(line, lines[index + 1] if index + 1 < len(lines) else "")
    described = {name: " ".join(" ".join(words).split()) for name, words in reader.parameters.items()}
    return Docs("\n".join(reader.description).strip(), {name: words for name, words in described.items() if words})


class _Reader:
    """Goes through a docstring line by line; `_style` is that of the section it is in, None before the first one."""

    def __init__(self) -> None:
        self.description: list[str] = []
        self.parameters: dict[str, list[str]] = {}
        self._style: str | None = None
        self._names: list[str] = []
        self._item_indent: int | None = None

    def read(self, line: str, following: str) -> None:
        """Take one line; `following` is the next one, which may underline it."""
        if self._starts_section(line, following) or self._reads_sphinx_field(line):
            return
        if self._style is None:
            self.description.append(line)
        elif self._style == "google":
            self._read_google(line)
        elif self._style == "numpy":
            self._read_numpy(line)
        elif self._style == "sphinx":
            self._continue(line)

    def _starts_section(self, line: str, following: str) -> bool:
        numpy = _NUMPY_HEADING.match(line) if _UNDERLINE.match(following) else None
        heading = numpy or _GOOGLE_HEADING.match(line)
        if heading is None:
            return False
        style = "numpy" if numpy else "google"
        self._style = style if heading[1].lower() in _PARAMETER_SECTIONS else "other"
        self._names, self._item_indent = [], None
        return True

    def _reads_sphinx_field(self, line: str) -> bool:
        found = _SPHINX_FIELD.match(line)
        if found is None:
            return False
        self._style, self._names = "sphinx", []
        words = (found[2] or "").split()
        if found[1].lower() in _SPHINX_PARAMETERS and words:
            self._begin([words[-1]], found[3])
        return True

    def _read_google(self, line: str) -> None:
        item = _GOOGLE_ITEM.match(line)
        if item is not None and (self._item_indent is None or len(item[1]) <= self._item_indent):
            self._item_indent = len(item[1])
            self._begin([item[2]], item[3])
        elif line.strip() and not line[0].isspace():
            self._style = "other"  # text after the section, at the margin
        else:
            self._continue(line)

    def _read_numpy(self, line: str) -> None:
        if _UNDERLINE.match(line):
            return
        item = _NUMPY_ITEM.match(line)
        if item is not None:
            self._begin([name.strip().lstrip("*") for name in item[1].split(",")], "")
        else:
            self._continue(line)

    def _begin(self, names: list[str], words: str) -> None:
        self._names = [name.lstrip("*") for name in names]
        for name in self._names:
            self.parameters[name] = [words]

    def _continue(self, line: str) -> None:
        for name in self._names:
            self.parameters[name].append(line)
