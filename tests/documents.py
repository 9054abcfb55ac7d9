"""The project's documents, taken apart: code blocks with their markers, tables, links.

A comment right above a code block says what the tests do with it:

    <!-- test: run -->                              run it, in a folder that has the page's files
    <!-- test: run against my_agent:agent on URL --> the same, while that agent is served; URL becomes its address
    <!-- test: file my_agent.py -->                 save it in that folder
    <!-- test: tests -->                            run the tests that it defines, with their fixtures
    <!-- test: none, because ... -->                nothing
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"```(\w*)")
_MARKER = re.compile(r"<!-- test: (.*) -->")
_HEADING = re.compile(r"(#+) (.*)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CELLS = re.compile(r"(?<!\\)\|")
_CODE = re.compile(r"`([^`]+)`")


class Block(NamedTuple):
    """One fenced code block."""

    page: Path
    line: int
    language: str
    marker: str
    text: str

    @property
    def id(self) -> str:
        """The page and the line, for the name of a test."""
        return f"{self.page.name}:{self.line}"


def text_of(page: Path) -> str:
    """The page as text."""
    return page.read_text(encoding="utf-8")


def blocks_of(page: Path) -> list[Block]:
    """The page's code blocks, in their order."""
    blocks: list[Block] = []
    above, start, language, body = "", 0, "", list[str]()
    for number, line in enumerate(text_of(page).splitlines(), 1):
        fence = _FENCE.fullmatch(line)
        if start and line == "```":
            marker = _MARKER.fullmatch(above)
            blocks.append(Block(page, start, language, marker[1] if marker else "", "\n".join(body) + "\n"))
            above, start = "", 0
        elif start:
            body.append(line)
        elif fence:
            start, language, body = number, fence[1], []
        else:
            above = line
    assert not start, f"{page.name}: the code block of line {start} is not closed"
    return blocks


def all_blocks() -> list[Block]:
    """The code blocks of all pages."""
    return [block for page in PAGES for block in blocks_of(page)]


def prose_of(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> list[str]:
    """Where the page's links lead."""
    return _LINK.findall(prose_of(page))


def anchors_of(page: Path) -> set[str]:
    """What a link may name behind `#`: the headings, as they are turned into anchors on the web."""
    headings = (_HEADING.fullmatch(line) for line in prose_of(page).splitlines())
    return {re.sub(r"[^\w\- ]", "", found[2].lower()).replace(" ", "-") for found in headings if found}


def section_of(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    lines, level, taken = prose_of(page).splitlines(), 0, list[str]()
    for line in lines:
        found = _HEADING.fullmatch(line)
        if found and level and len(found[1]) <= level:
            break
        if level:
            taken.append(line)
        elif found and found[2] == heading:
            level = len(found[1])
    assert level, f"{page.name} has no heading {heading!r}"
    return "\n".join(taken)


def rows_of(text: str) -> list[list[str]]:
    """The rows of all tables in the text, without headings."""
    rows: list[list[str]] = []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        is_heading = index + 1 < len(lines) and lines[index + 1].startswith("| ---")
        if line.startswith("|") and not line.startswith("| ---") and not is_heading:
            rows.append([cell.strip().replace("\\|", "|") for cell in _CELLS.split(line)[1:-1]])
    return rows


def code_in(text: str) -> list[str]:
    """What stands in backticks."""
    return _CODE.findall(text)
