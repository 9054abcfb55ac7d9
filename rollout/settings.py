"""What can be set, from the environment or in code: read once, checked as a whole, handed down frozen.

The fields of the three Structs are the one table of settings: type, default, bounds and meaning stand in their
annotations, and `SPECS` lists them for whoever reads the environment, prints a table or checks a file in `conf/`.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Struct

from rollout.envfile import EnvFile, read_env_file
from rollout.errors import SettingsError
from rollout.schemas import DEFAULT_MAX_METADATA_SIZE_BYTES, get_max_metadata_size_bytes
from rollout.setting_spec import (
    PREFIX,
    Rule,
    SettingSpec,
    Value,
    check_agent,
    check_host,
    check_hosts,
    check_state_url,
    specs_of,
)

if TYPE_CHECKING:
    from environs import Env

logger = logging.getLogger(__name__)

DOTENV = Path(".env")
_ALIKE = 0.6
"""How like an unknown name a known one must be to be worth naming: 1 is the same."""
DEFAULT_AGENT = "rollout.examples.calculator:agent"

# ---------------------------------------------------------------- the settings


class _Section(Struct, frozen=True, kw_only=True):
    """Checks itself when made, by whom ever; `SettingsError` has one line for each mistake."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        problems = []
        for spec in _specs_of(type(self)):
            value = getattr(self, spec.name)
            if problem := spec.problem(value):
                problems.append(f"{spec.field}: {spec.quoted(value)} {problem}")
            elif spec.kind == "seconds":
                msgspec.structs.force_setattr(self, spec.name, float(value))
        if problems:
            raise SettingsError("\n".join(problems))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The fields for whatever prints the settings; the key is hidden."""
        hidden = {
            spec.name for spec in _specs_of(type(self)) if spec.rule.secret and getattr(self, spec.name) is not None
        }
        return [(name, "***" if name in hidden else getattr(self, name)) for name in self.__struct_fields__]


@functools.cache
def _specs_of(section: type[_Section]) -> tuple[SettingSpec, ...]:
    return specs_of(section.section, section)


class RolloutServerSettings(_Section, frozen=True, kw_only=True):
    """The service. Seconds take whole numbers too and are kept as floats."""

    section: ClassVar[str] = "server"

    agent: Annotated[
        str,
        Rule(
            "The agent loop to serve; the default is the built-in calculator.",
            form="module:attribute",
            check=check_agent,
        ),
    ] = DEFAULT_AGENT
    host: Annotated[
        str,
        Rule(
            "Where to listen; anything but loopback needs SERVER_API_KEY.",
            form="host name or address",
            check=check_host,
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Rule("Port to listen on; 0 takes a free one and prints it.", 0, 65535)] = 9000
    api_key: Annotated[
        str | None, Rule("Key that callers must send as a bearer token.", form="any text", secret=True)
    ] = None
    max_concurrent_rollouts: Annotated[int, Rule("Rollouts that run at once.", 1, 100_000)] = 100
    max_queued_rollouts: Annotated[
        int, Rule("Accepted rollouts that may wait for a slot; beyond that 503.", 0, 1_000_000)
    ] = 10_000
    record_ttl_seconds: Annotated[float, Rule("How long an ended, delivered rollout is remembered.", 60, 86_400)] = (
        3600.0
    )
    cleanup_interval_seconds: Annotated[float, Rule("Pause between two sweeps of old records.", 0.1, 3600)] = 60.0
    rollout_timeout_seconds: Annotated[
        float, Rule("Deadline of a rollout, from acceptance, unless its request names one; 0 is none.", 0, 86_400)
    ] = 3600.0
    cancel_grace_seconds: Annotated[float, Rule("How long a cancelled agent may take to stop.", 0, 300)] = 5.0
    shutdown_grace_seconds: Annotated[float, Rule("How long running rollouts get after SIGTERM.", 0, 3600)] = 30.0
    max_body_bytes: Annotated[int, Rule("Largest request body, after decompression.", 1024, 1_073_741_824)] = 33_554_432
    read_timeout_seconds: Annotated[float, Rule("Longest pause while headers or a body arrive.", 1, 3600)] = 20.0
    result_cache_bytes: Annotated[
        int,
        Rule(
            "Memory for results: delivered ones go oldest first, undelivered ones close admission.",
            1_048_576,
            1_099_511_627_776,
        ),
    ] = 268_435_456
    delivery_horizon_seconds: Annotated[float, Rule("How long the delivery of a result is tried.", 0, 604_800)] = 3600.0
    state_url: Annotated[
        str,
        Rule(
            "Where rollouts are remembered.",
            form="memory:, sqlite:///relative.db, sqlite:////absolute.db",
            check=check_state_url,
        ),
    ] = "memory:"
    checkpoint_turns: Annotated[
        bool, Rule("Whether the messages are put in safety after each turn, if state is durable.")
    ] = False
    resume_rollouts: Annotated[
        bool, Rule("Whether a restart runs interrupted rollouts again instead of reporting them.")
    ] = False
    debug_dir: Annotated[
        str | None, Rule("Folder for one JSONL trace a rollout; they hold message content.", form="path")
    ] = None


class RolloutClientSettings(_Section, frozen=True, kw_only=True):
    """How trainers are called. Seconds take whole numbers too and are kept as floats."""

    section: ClassVar[str] = "client"

    timeout_seconds: Annotated[float, Rule("Longest time for one call to the trainer.", 1, 3600)] = 300.0
    max_retries: Annotated[int, Rule("Retries of an LLM call.", 0, 10)] = 3
    complete_rollout_retries: Annotated[
        int, Rule("Retries of a delivery before it goes on in the background.", 0, 10)
    ] = 2
    retry_base_delay: Annotated[float, Rule("First pause before a retry, in seconds.", 0.01, 60)] = 1.0
    retry_max_delay: Annotated[float, Rule("Longest pause before a retry, in seconds.", 0.01, 300)] = 30.0
    max_connections: Annotated[int, Rule("Connections to trainers at once; 0 is no cap.", 0, 100_000)] = 0
    strict_history: Annotated[
        bool, Rule("Whether messages that do not continue those sent before end the rollout.")
    ] = False
    allowed_hosts: Annotated[
        str,
        Rule(
            "Hosts that a request's URLs may name.",
            form="*, or a comma list of name, *.domain, address, [v6], each with optional :port, and CIDR blocks",
            check=check_hosts,
        ),
    ] = "*"


class RolloutSettings(_Section, frozen=True, kw_only=True):
    """All settings. Made in code or by `from_env()`; wrong ones cannot be made."""

    max_metadata_size_bytes: Annotated[
        int | None,
        Rule(
            "Largest metadata of a request, as JSON text.",
            1024,
            104_857_600,
            shown_default=DEFAULT_MAX_METADATA_SIZE_BYTES,
        ),
    ] = None
    """None is the limit of the process, `schemas.get_max_metadata_size_bytes()`."""
    server: RolloutServerSettings = msgspec.field(default_factory=RolloutServerSettings)
    client: RolloutClientSettings = msgspec.field(default_factory=RolloutClientSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("server", RolloutServerSettings), ("client", RolloutClientSettings)):
            if not isinstance(getattr(self, name), kind):
                raise SettingsError(f"{name}: is not a {kind.__name__} but {type(getattr(self, name)).__name__}")

    @property
    def metadata_limit_bytes(self) -> int:
        """The limit of metadata that holds now."""
        limit = self.max_metadata_size_bytes
        return get_max_metadata_size_bytes() if limit is None else limit

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, dotenv: Path | None = DOTENV) -> RolloutSettings:
        """The settings of the environment and the `.env` file; see `load_settings()`."""
        return load_settings(environ, dotenv).settings


SPECS: tuple[SettingSpec, ...] = (
    *_specs_of(RolloutSettings),
    *_specs_of(RolloutServerSettings),
    *_specs_of(RolloutClientSettings),
)
"""Every setting, in the order of the protocol."""

_VARIABLES = frozenset(spec.variable for spec in SPECS)


# ---------------------------------------------------------------- reading the environment


class UnknownVariable(Struct, frozen=True):
    """A variable with our prefix that no setting reads, and the known one that is most like it, if any is."""

    name: str
    nearest: str | None

    def __str__(self) -> str:
        near = f"; the nearest known name is {self.nearest}" if self.nearest else ""
        return f"{self.name} is not a setting and is ignored{near}"


class LoadedSettings(Struct, frozen=True, kw_only=True):
    """Settings, and where each that is not a default came from."""

    settings: RolloutSettings
    sources: dict[str, str]
    """"environment" or ".env" by variable; a variable that is not here has its default."""
    unknown: tuple[UnknownVariable, ...]


def load_settings(environ: Mapping[str, str] | None = None, dotenv: Path | None = DOTENV) -> LoadedSettings:
    """The settings in `environ` (`os.environ` if None) and in the file `dotenv` (none is read if None).

    A value of the environment wins over the file; a blank one counts as unset in either. Raises one `SettingsError`
    for all mistakes together, those of the file's lines included. A missing file is no mistake. Variables with our
    prefix that nobody reads are logged as warnings. Changes nothing, `os.environ` least of all.
    """
    file = EnvFile({}, []) if dotenv is None else read_env_file(dotenv)
    stored, real = _not_blank(file.values), _not_blank(os.environ if environ is None else environ)
    values = stored | real
    unknown = tuple(UnknownVariable(name, _nearest(name)) for name in sorted(values.keys() - _VARIABLES))
    for variable in unknown:
        logger.warning("%s", variable)
    parsed, problems = _parse(values)
    if problems := file.problems + problems:
        raise SettingsError("\n".join(problems))
    return LoadedSettings(
        settings=RolloutSettings(
            **parsed[""],
            server=RolloutServerSettings(**parsed["server"]),
            client=RolloutClientSettings(**parsed["client"]),
        ),
        sources={name: "environment" if name in real else ".env" for name in values if name in _VARIABLES},
        unknown=unknown,
    )


def _not_blank(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name.upper().startswith(PREFIX) and value.strip()}


def variables_in(environ: Mapping[str, str]) -> list[str]:
    """The names with our prefix that are set, sorted; a blank value counts as unset."""
    return sorted(_not_blank(environ))


def _nearest(name: str) -> str | None:
    suffix = name.upper().removeprefix(PREFIX)
    suffixes = [spec.suffix for spec in SPECS]
    ends_alike = [known for known in suffixes if known.endswith(f"_{suffix}")]
    near = ends_alike or difflib.get_close_matches(suffix, suffixes, n=1, cutoff=_ALIKE)
    return PREFIX + near[0] if near else None


def _parse(values: dict[str, str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The values by section and field, and a line for each that is wrong."""
    from environs import EnvValidationError

    env = _env_over(values)
    env.add_parser("setting", _parse_value)
    parsed: dict[str, dict[str, Any]] = {"": {}, "server": {}, "client": {}}
    for spec in SPECS:
        if spec.variable in values:
            parsed[spec.section][spec.name] = env.setting(spec.suffix, spec=spec)
    try:
        env.seal()
    except EnvValidationError as exc:
        messages = cast("Mapping[str, list[str]]", exc.error_messages)
        return parsed, [f"{name}: {text}" for name, texts in messages.items() for text in texts]
    return parsed, []


def _env_over(values: Mapping[str, str]) -> Env:
    """An Env that looks variables up in `values` only: its own order would let a blank variable hide the file's."""
    from environs import Env  # 150 ms: only whoever reads the environment pays

    class Lookup(Env):
        def _get_value(self, env_key: str, default: object) -> object:
            return values.get(env_key, default)

    return Lookup(eager=False, prefix=PREFIX)


_WHOLE = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.ASCII | re.IGNORECASE)
_FLAGS: dict[str, bool] = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def _parse_value(raw: str, spec: SettingSpec) -> Value:
    from environs import ValidationError

    text = raw.strip()
    value: Value = text
    if spec.kind == "count" and _WHOLE.fullmatch(text):
        value = int(text)
    elif spec.kind == "seconds" and _NUMBER.fullmatch(text):
        value = float(text)
    elif spec.kind == "flag":
        value = _FLAGS.get(text.lower(), text)
    if problem := spec.problem(value):
        raise ValidationError(f"{spec.quoted(text)} {problem}")
    return value


# ---------------------------------------------------------------- showing them


class SettingRow(Struct, frozen=True, kw_only=True):
    """A line of the table that `rollout settings` prints; safe to show to anybody."""

    variable: str
    value: str
    default: str
    bounds: str
    source: str
    doc: str


def describe(settings: RolloutSettings, sources: Mapping[str, str] | None = None) -> list[SettingRow]:
    """Every setting with the value that holds, secrets hidden.

    `sources` are those of `LoadedSettings`; a value that is neither the default nor in there was set in code.
    """
    return [_row(spec, settings, sources or {}) for spec in SPECS]


def _row(spec: SettingSpec, settings: RolloutSettings, sources: Mapping[str, str]) -> SettingRow:
    value = getattr(getattr(settings, spec.section) if spec.section else settings, spec.name)
    origin = "default" if value == spec.default else "code"
    if spec.name == "max_metadata_size_bytes":
        value = settings.metadata_limit_bytes
    return SettingRow(
        variable=spec.variable,
        value=spec.shown(value) or "not set",
        default=spec.default_text or "none",
        bounds=spec.bounds,
        source=sources.get(spec.variable, origin),
        doc=spec.rule.doc,
    )
