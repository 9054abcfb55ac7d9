"""What one setting is: its rule, written beside the field, and the spec that is read from there.

A spec judges a value in words that a person can act on, whoever brought it: the environment, a file or code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Struct

from rollout.errors import SettingsError
from rollout.hosts import AllowedHosts

PREFIX = "OSMOSIS_ROLLOUT_"

Value: TypeAlias = int | float | bool | str | None
Kind: TypeAlias = Literal["count", "seconds", "flag", "text"]

_LONGEST_QUOTE = 200
_KINDS: dict[object, Kind] = {int: "count", float: "seconds", bool: "flag", str: "text"}
_STATE_URL_FORMS = "use memory:, sqlite:///relative.db or sqlite:////absolute.db"
_STATE_URL = re.compile(r"memory:|sqlite:///[^:?#][^?#]*(?<!/)")


class Rule(Struct, frozen=True):
    """What a setting means and may be. `check` says what is wrong with a text, or None."""

    doc: str
    low: float = 0
    high: float = 0
    form: str = ""
    """The bounds of a text, for people."""
    check: Callable[[str], str | None] | None = None
    secret: bool = False
    shown_default: Value = None
    """The default to show where None in code stands for it."""


class SettingSpec(Struct, frozen=True, kw_only=True):
    """One setting: a field of a section, a variable of the environment."""

    section: str
    """The part of `RolloutSettings` that has the field; empty for its own."""
    name: str
    kind: Kind
    default: Value
    optional: bool
    rule: Rule

    @property
    def suffix(self) -> str:
        """The variable without `PREFIX`."""
        return f"{self.section}_{self.name}".lstrip("_").upper()

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return PREFIX + self.suffix

    @property
    def field(self) -> str:
        """Where the setting stands in code, such as `server.port`."""
        return f"{self.section}.{self.name}".lstrip(".")

    @property
    def default_text(self) -> str:
        """The default as one would write it into a file; empty if there is none."""
        return _text(self.rule.shown_default if self.default is None else self.default)

    @property
    def bounds(self) -> str:
        """What is allowed, for people."""
        if self.kind == "text":
            return self.rule.form
        return "true or false" if self.kind == "flag" else f"{_text(self.rule.low)}..{_text(self.rule.high)}"

    def shown(self, value: object) -> str:
        """The value as it may be shown to anybody: a secret is hidden, a URL loses its password."""
        if self.rule.secret:
            return "***" if value is not None else "not set"
        text = _text(value)
        return re.sub(r"//.*@", "//***@", text, flags=re.DOTALL) if self.name == "state_url" else text

    def quoted(self, value: object) -> str:
        """The value for a message about it: shown, in quotes, and not at any length."""
        if self.rule.secret:
            return "***"
        text = repr(self.shown(value) if isinstance(value, str) else value)
        return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, in words that follow it, or None."""
        if value is None and self.optional:
            return None
        if self.kind == "text":
            return self._text_problem(value)
        if self.kind == "flag":
            return None if isinstance(value, bool) else "is not true or false"
        number = int if self.kind == "count" else (int, float)
        if isinstance(value, bool) or not isinstance(value, number) or not self.rule.low <= value <= self.rule.high:
            return f"is not a {'whole ' if self.kind == 'count' else ''}number in {self.bounds}"
        return None

    def _text_problem(self, value: object) -> str | None:
        if not isinstance(value, str):
            return f"is not a text but {type(value).__name__}"
        if not value.isprintable():
            return "holds control characters or bytes that are not UTF-8"
        if not value or value != value.strip():
            return "is blank or has blanks around it"
        return self.rule.check(value) if self.rule.check else None


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def specs_of(section: str, struct: type[Struct]) -> tuple[SettingSpec, ...]:
    """The settings among the fields of a Struct: those whose annotation carries a `Rule`."""
    hints, specs = get_type_hints(struct, include_extras=True), []
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        rules = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Rule)]
        if not rules:
            continue
        types = get_args(hint.__origin__) or (hint.__origin__,)
        specs.append(
            SettingSpec(
                section=section,
                name=field.name,
                kind=_KINDS[types[0]],
                default=field.default,
                optional=type(None) in types,
                rule=rules[0],
            )
        )
    return tuple(specs)


# ---------------------------------------------------------------- what a text must look like


def check_agent(text: str) -> str | None:
    """Whether the text looks like an agent loop's place; what is wrong with it, or None."""
    module, _, attribute = text.partition(":")
    return None if module and attribute else "is not module:attribute, such as my_agent:agent"


def check_host(text: str) -> str | None:
    """Whether one can listen there; what is wrong, or None."""
    if any(c in text for c in "/[]@ "):
        return "is not a host name or address to listen on, such as 127.0.0.1, 0.0.0.0 or ::1"
    return None


def check_state_url(text: str) -> str | None:
    """Whether there is a store for the URL; what is wrong, or None."""
    if text.endswith(":memory:"):
        return f"is not supported: it would forget everything with the process; {_STATE_URL_FORMS}"
    if _STATE_URL.fullmatch(text):
        return None
    return f"is not supported; {_STATE_URL_FORMS}"


def check_hosts(text: str) -> str | None:
    """Whether the text is a list of allowed hosts; what is wrong with its entries, or None."""
    try:
        AllowedHosts.parse(text)
    except SettingsError as exc:
        return "is wrong: " + "; ".join(str(exc).splitlines())
    return None
