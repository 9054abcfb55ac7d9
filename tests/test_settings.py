"""Settings: defaults, bounds, the environment, the `.env` file, and what is shown of them."""

from __future__ import annotations

import logging
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rollout.errors import SettingsError
from rollout.schemas import DEFAULT_MAX_METADATA_SIZE_BYTES, set_max_metadata_size_bytes
from rollout.setting_spec import PREFIX, SettingSpec
from rollout.settings import (
    SPECS,
    LoadedSettings,
    RolloutClientSettings,
    RolloutServerSettings,
    RolloutSettings,
    describe,
    load_settings,
)

NUMBERS = [spec for spec in SPECS if spec.kind in ("count", "seconds")]

PROTOCOL = {
    "MAX_METADATA_SIZE_BYTES": ("1048576", "1024..104857600"),
    "SERVER_MAX_CONCURRENT_ROLLOUTS": ("100", "1..100000"),
    "SERVER_MAX_QUEUED_ROLLOUTS": ("10000", "0..1000000"),
    "SERVER_RECORD_TTL_SECONDS": ("3600", "60..86400"),
    "SERVER_CLEANUP_INTERVAL_SECONDS": ("60", "0.1..3600"),
    "SERVER_ROLLOUT_TIMEOUT_SECONDS": ("3600", "0..86400"),
    "SERVER_CANCEL_GRACE_SECONDS": ("5", "0..300"),
    "SERVER_SHUTDOWN_GRACE_SECONDS": ("30", "0..3600"),
    "SERVER_MAX_BODY_BYTES": ("33554432", "1024..1073741824"),
    "SERVER_READ_TIMEOUT_SECONDS": ("20", "1..3600"),
    "SERVER_RESULT_CACHE_BYTES": ("268435456", "1048576..1099511627776"),
    "SERVER_DELIVERY_HORIZON_SECONDS": ("3600", "0..604800"),
    "SERVER_PORT": ("9000", "0..65535"),
    "CLIENT_TIMEOUT_SECONDS": ("300", "1..3600"),
    "CLIENT_MAX_RETRIES": ("3", "0..10"),
    "CLIENT_COMPLETE_ROLLOUT_RETRIES": ("2", "0..10"),
    "CLIENT_RETRY_BASE_DELAY": ("1", "0.01..60"),
    "CLIENT_RETRY_MAX_DELAY": ("30", "0.01..300"),
    "CLIENT_MAX_CONNECTIONS": ("0", "0..100000"),
}


def load(**variables: str) -> LoadedSettings:
    """Settings from these variables alone, named without the prefix."""
    return load_settings({PREFIX + name: value for name, value in variables.items()}, dotenv=None)


def mistakes(**variables: str) -> list[str]:
    """The lines of the error that these variables cause."""
    with pytest.raises(SettingsError) as caught:
        load(**variables)
    return str(caught.value).splitlines()


def value_of(settings: RolloutSettings, spec: SettingSpec) -> Any:
    return getattr(getattr(settings, spec.section) if spec.section else settings, spec.name)


def by_id(spec: SettingSpec) -> str:
    return spec.field


@pytest.fixture
def dotenv(tmp_path: Path) -> Path:
    return tmp_path / ".env"


# ---------------------------------------------------------------- the table


def test_numbers_have_the_defaults_and_bounds_of_the_protocol() -> None:
    assert {spec.suffix: (spec.default_text, spec.bounds) for spec in NUMBERS} == PROTOCOL


def test_an_empty_environment_gives_the_defaults() -> None:
    loaded = load()

    assert loaded.settings == RolloutSettings()
    assert (loaded.sources, loaded.unknown) == ({}, ())
    assert loaded.settings.server.host == "127.0.0.1"
    assert loaded.settings.server.api_key is None
    assert loaded.settings.server.state_url == "memory:"
    assert loaded.settings.server.debug_dir is None
    assert loaded.settings.client.strict_history is False
    assert loaded.settings.client.allowed_hosts == "*"


def test_every_setting_says_what_it_means_and_may_be() -> None:
    assert all(spec.rule.doc.endswith(".") and spec.bounds for spec in SPECS)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("spec", NUMBERS, ids=by_id)
def test_both_bounds_belong_to_the_range(spec: SettingSpec) -> None:
    for bound in (spec.rule.low, spec.rule.high):
        assert value_of(load(**{spec.suffix: str(bound)}).settings, spec) == bound


@pytest.mark.parametrize("spec", NUMBERS, ids=by_id)
def test_a_number_beyond_its_bounds_is_named_with_them(spec: SettingSpec) -> None:
    step = 1 if spec.kind == "count" else 0.001
    for text in (str(spec.rule.low - step), str(spec.rule.high + step)):
        [line] = mistakes(**{spec.suffix: text})
        assert line.startswith(f"{spec.variable}: '{text}' is not a")
        assert line.endswith(spec.bounds)


@pytest.mark.parametrize("spec", NUMBERS, ids=by_id)
@pytest.mark.parametrize(
    "text", ["abc", "1_000", "٣", "nan", "inf", "-inf", "1e999", "0x10", "1,5", "9" * 5000, "true"]
)
def test_a_text_that_is_no_number_is_refused(spec: SettingSpec, text: str) -> None:
    [line] = mistakes(**{spec.suffix: text})

    assert line.startswith(f"{spec.variable}: ")
    assert len(line) < 400


@pytest.mark.parametrize("text", ["5.0", "1e1", "5.5"])
def test_a_count_is_a_whole_number(text: str) -> None:
    assert mistakes(CLIENT_MAX_RETRIES=text) == [f"{PREFIX}CLIENT_MAX_RETRIES: '{text}' is not a whole number in 0..10"]


@pytest.mark.parametrize(("text", "value"), [(" 8 ", 8.0), ("2.5", 2.5), ("1e1", 10.0), (".5", 0.5), ("+3.", 3.0)])
def test_seconds_are_floats(text: str, value: float) -> None:
    seconds = load(SERVER_CANCEL_GRACE_SECONDS=text).settings.server.cancel_grace_seconds

    assert seconds == value
    assert isinstance(seconds, float)


def test_an_explicit_zero_is_never_the_default() -> None:
    zero = [spec for spec in NUMBERS if spec.rule.low == 0]
    settings = load(**{spec.suffix: "0" for spec in zero}).settings

    assert len(zero) >= 9
    assert {value_of(settings, spec) for spec in zero} == {0}


def test_a_base_delay_above_the_maximum_is_allowed() -> None:
    assert load(CLIENT_RETRY_BASE_DELAY="60", CLIENT_RETRY_MAX_DELAY="1").settings.client.retry_base_delay == 60


@pytest.mark.parametrize(
    ("text", "flag"),
    [("true", True), ("1", True), ("YES", True), ("on", True), ("False", False), ("0", False), ("off", False)],
)
def test_a_flag_is_read_from_the_usual_words(text: str, flag: bool) -> None:
    assert load(CLIENT_STRICT_HISTORY=text).settings.client.strict_history is flag


def test_another_word_is_no_flag() -> None:
    assert mistakes(CLIENT_STRICT_HISTORY="maybe") == [f"{PREFIX}CLIENT_STRICT_HISTORY: 'maybe' is not true or false"]


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("url", ["memory:", "sqlite:///state.db", "sqlite:///a/b.db", "sqlite:////var/lib/x.db"])
def test_a_supported_state_url_is_taken(url: str) -> None:
    assert load(SERVER_STATE_URL=url).settings.server.state_url == url


@pytest.mark.parametrize(
    "url",
    [
        "memory",
        "sqlite://x.db",
        "sqlite:///",
        "sqlite:////",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=ro",
        "sqlite:///x/",
        "x",
    ],
)
def test_another_state_url_is_refused_with_those_that_are_supported(url: str) -> None:
    [line] = mistakes(SERVER_STATE_URL=url)

    assert repr(url) in line
    assert "use memory:, sqlite:///relative.db or sqlite:////absolute.db" in line


def test_the_password_of_a_refused_state_url_is_not_shown() -> None:
    [line] = mistakes(SERVER_STATE_URL="redis://me:p/SECRET@cache:6379/0")

    assert "'redis://***@cache:6379/0'" in line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SERVER_HOST", "http://0.0.0.0"),
        ("SERVER_HOST", "[::1]"),
        ("SERVER_HOST", "a b"),
        ("SERVER_AGENT", "my_agent"),
        ("SERVER_AGENT", ":agent"),
        ("SERVER_AGENT", "my_agent:"),
        ("SERVER_DEBUG_DIR", "a\nb"),
        ("SERVER_DEBUG_DIR", "\udcff"),
        ("CLIENT_ALLOWED_HOSTS", "trainer:0"),
    ],
)
def test_a_text_of_the_wrong_form_is_refused(name: str, text: str) -> None:
    [line] = mistakes(**{name: text})

    assert line.startswith(f"{PREFIX}{name}: {text!r} ")


def test_every_wrong_host_of_the_list_is_named() -> None:
    [line] = mistakes(CLIENT_ALLOWED_HOSTS="trainer:0,10.0.0.1/8")

    assert "'trainer:0'" in line
    assert "'10.0.0.1/8'" in line


def test_texts_lose_the_blanks_around_them() -> None:
    settings = load(SERVER_API_KEY=" k e y\n", SERVER_DEBUG_DIR="\ttraces ", SERVER_AGENT=" a.b:c.d ").settings

    assert settings.server.api_key == "k e y"
    assert settings.server.debug_dir == "traces"
    assert settings.server.agent == "a.b:c.d"


# ---------------------------------------------------------------- the environment


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
@pytest.mark.parametrize("spec", SPECS, ids=by_id)
def test_a_blank_value_counts_as_unset(spec: SettingSpec, blank: str) -> None:
    loaded = load(**{spec.suffix: blank})

    assert loaded.settings == RolloutSettings()
    assert loaded.sources == {}


def test_all_mistakes_are_reported_together_each_with_variable_value_and_bounds(dotenv: Path) -> None:
    dotenv.write_text(f'{PREFIX}SERVER_HOST="x\n{PREFIX}CLIENT_MAX_RETRIES=11\n')
    environ = {
        f"{PREFIX}SERVER_PORT": "70000",
        f"{PREFIX}MAX_METADATA_SIZE_BYTES": "1",
        f"{PREFIX}SERVER_API_KEY": "SECRET\x00",
    }

    with pytest.raises(SettingsError) as caught:
        load_settings(environ, dotenv)

    assert str(caught.value).splitlines() == [
        f"{dotenv}, line 1: a quote is not closed, or text stands behind the closing one",
        f"{PREFIX}MAX_METADATA_SIZE_BYTES: '1' is not a whole number in 1024..104857600",
        f"{PREFIX}SERVER_PORT: '70000' is not a whole number in 0..65535",
        f"{PREFIX}SERVER_API_KEY: *** holds control characters or bytes that are not UTF-8",
        f"{PREFIX}CLIENT_MAX_RETRIES: '11' is not a whole number in 0..10",
    ]


def test_the_process_environment_and_the_file_beside_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"{PREFIX}SERVER_PORT", "9100")
    (tmp_path / ".env").write_text(f"{PREFIX}SERVER_PORT=9200\n{PREFIX}SERVER_HOST=::1\nOTHER=1\n")
    before = dict(os.environ)

    settings = RolloutSettings.from_env()

    assert (settings.server.port, settings.server.host) == (9100, "::1")
    assert dict(os.environ) == before


def test_a_given_environment_replaces_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}SERVER_PORT", "9100")

    assert RolloutSettings.from_env({}, dotenv=None).server.port == 9000


def test_the_environment_wins_over_the_file_unless_it_is_blank(dotenv: Path) -> None:
    dotenv.write_text(f"{PREFIX}SERVER_PORT=1\n{PREFIX}CLIENT_MAX_RETRIES=1\n")

    loaded = load_settings({f"{PREFIX}SERVER_PORT": "2", f"{PREFIX}CLIENT_MAX_RETRIES": " "}, dotenv)

    assert (loaded.settings.server.port, loaded.settings.client.max_retries) == (2, 1)
    assert loaded.sources == {f"{PREFIX}SERVER_PORT": "environment", f"{PREFIX}CLIENT_MAX_RETRIES": ".env"}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SERVER_PROT", "SERVER_PORT"),
        ("PORT", "SERVER_PORT"),
        ("SERVER_MAX_CONCURRENT", "SERVER_MAX_CONCURRENT_ROLLOUTS"),
        ("CLIENT_STRICT_HISTROY", "CLIENT_STRICT_HISTORY"),
        ("server_port", "SERVER_PORT"),
    ],
)
def test_an_unknown_variable_is_a_warning_with_the_nearest_name(
    name: str, nearest: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rollout.settings"):
        loaded = load(**{name: "1"})

    [unknown] = loaded.unknown
    assert (unknown.name, unknown.nearest) == (PREFIX + name, PREFIX + nearest)
    assert caplog.messages == [str(unknown)]
    assert loaded.settings == RolloutSettings()


def test_a_variable_that_is_like_no_other_is_a_warning_without_a_guess() -> None:
    [unknown] = load(ENABLE_WEBHOOKS="1").unknown

    assert unknown.nearest is None
    assert str(unknown) == f"{PREFIX}ENABLE_WEBHOOKS is not a setting and is ignored"


def test_an_unknown_variable_is_found_in_the_file_and_in_another_case(dotenv: Path) -> None:
    dotenv.write_text(f"osmosis_rollout_server_port=1\n{PREFIX}=x\n")

    unknown = load_settings({"PATH": "/bin"}, dotenv).unknown

    assert [variable.name for variable in unknown] == [PREFIX, "osmosis_rollout_server_port"]
    assert unknown[1].nearest == f"{PREFIX}SERVER_PORT"


@hypothesis_settings(max_examples=60)
@given(st.dictionaries(st.sampled_from([spec.suffix for spec in SPECS]), st.text(max_size=12), max_size=4))
def test_any_environment_gives_settings_or_one_line_for_each_mistake(variables: dict[str, str]) -> None:
    given_values = {PREFIX + name for name, value in variables.items() if value.strip()}

    try:
        named = set(load(**variables).sources)
    except SettingsError as exc:
        named = {line.split(": ")[0] for line in str(exc).split("\n")}

    assert named <= given_values
    assert bool(named) == bool(given_values)


# ---------------------------------------------------------------- the .env file


def test_a_missing_file_or_a_folder_of_that_name_is_no_mistake(dotenv: Path) -> None:
    assert load_settings({}, dotenv).settings == RolloutSettings()
    dotenv.mkdir()
    assert load_settings({}, dotenv).settings == RolloutSettings()


@pytest.mark.parametrize(
    ("body", "line", "problem"),
    [
        (b'%sSERVER_PORT="30\n', 1, "a quote is not closed"),
        (b"A=1\n%sSERVER_PORT = 'x\n", 2, "a quote is not closed"),
        (b'export %sSERVER_HOST="a" b\n', 1, "a quote is not closed"),
        (b"# note\n\n\n%sSERVER_PORT: 80\n", 4, "is not NAME=value"),
        (b"A=1\r\n\r\n%sSERVER_PORT\r\nB=2\r\n", 3, "is not NAME=value"),
        (b"=%s\n", 1, "is not NAME=value"),
        (b"A=1\n\n# caf\xe9 %s\n", 3, "0xe9 is not UTF-8"),
    ],
)
def test_a_line_that_assigns_nothing_is_named_by_file_and_number(
    dotenv: Path, body: bytes, line: int, problem: str
) -> None:
    dotenv.write_bytes(body % PREFIX.encode())

    with pytest.raises(SettingsError) as caught:
        load_settings({}, dotenv)

    [text] = str(caught.value).splitlines()
    assert text.startswith(f"{dotenv}, line {line}")
    assert problem in text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_a_file_in_another_encoding_is_a_clear_mistake(dotenv: Path, encoding: str) -> None:
    dotenv.write_text(f"{PREFIX}SERVER_PORT=1\n", encoding=encoding)

    with pytest.raises(SettingsError, match="UTF-16 or binary; save it as UTF-8"):
        load_settings({}, dotenv)


def test_a_file_that_cannot_be_read_is_a_mistake(dotenv: Path) -> None:
    dotenv.symlink_to(dotenv)

    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({}, dotenv)


def test_a_byte_order_mark_does_not_hide_the_first_variable(dotenv: Path) -> None:
    dotenv.write_text(f"{PREFIX}SERVER_PORT=7\n", encoding="utf-8-sig")

    assert load_settings({}, dotenv).settings.server.port == 7


def test_quotes_comments_exports_and_references_are_understood(dotenv: Path) -> None:
    dotenv.write_text(
        f"# note\nexport {PREFIX}SERVER_PORT = 7 # seven\n"
        f"ROOT=/data\n{PREFIX}SERVER_DEBUG_DIR=\"${{ROOT}}/a b\"\n{PREFIX}SERVER_API_KEY='a#b'\n{PREFIX}SERVER_HOST=\n"
    )

    server = load_settings({}, dotenv).settings.server

    assert (server.port, server.debug_dir, server.api_key, server.host) == (7, "/data/a b", "a#b", "127.0.0.1")


# ---------------------------------------------------------------- in code


@pytest.mark.parametrize("value", [True, math.nan, math.inf, -1, 10**400, "5", 5.0, None])
def test_a_count_in_code_is_a_whole_number_within_its_bounds(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"^client\.max_retries: .* is not a whole number in 0\.\.10$"):
        RolloutClientSettings(max_retries=value)


@pytest.mark.parametrize("value", [False, math.nan, math.inf, -0.1, 10**400, "5", None])
def test_seconds_in_code_are_a_number_within_their_bounds(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"^server\.cancel_grace_seconds: .* is not a number in 0\.\.300$"):
        RolloutServerSettings(cancel_grace_seconds=value)


def test_whole_seconds_in_code_become_floats() -> None:
    assert isinstance(RolloutServerSettings(cancel_grace_seconds=3).cancel_grace_seconds, float)


@pytest.mark.parametrize("value", ["", " ", " key", 5, b"key"])
def test_a_key_in_code_is_a_text_that_is_not_blank_and_is_never_shown(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"^server\.api_key: \*\*\* is "):
        RolloutServerSettings(api_key=value)


def test_mistakes_in_code_are_reported_together() -> None:
    with pytest.raises(SettingsError) as caught:
        RolloutServerSettings(port=70000, debug_dir=Path("x"), state_url="x")  # type: ignore[arg-type]

    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "server.port",
        "server.state_url",
        "server.debug_dir",
    ]


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(SettingsError, match=r"server\.port"):
        msgspec.structs.replace(RolloutServerSettings(), port=-1)


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        RolloutSettings().server.port = 1  # type: ignore[misc]


def test_a_section_must_be_of_its_kind() -> None:
    with pytest.raises(SettingsError, match=r"^client: is not a RolloutClientSettings but dict$"):
        RolloutSettings(client={"max_retries": 1})  # type: ignore[arg-type]


def test_settings_survive_pickling() -> None:
    settings = RolloutSettings(server=RolloutServerSettings(api_key="k"))

    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_metadata_limit_is_that_of_the_process_unless_set() -> None:
    try:
        set_max_metadata_size_bytes(2048)
        assert RolloutSettings().metadata_limit_bytes == 2048
        assert RolloutSettings(max_metadata_size_bytes=4096).metadata_limit_bytes == 4096
    finally:
        set_max_metadata_size_bytes(DEFAULT_MAX_METADATA_SIZE_BYTES)


# ---------------------------------------------------------------- what is shown


def test_no_repr_shows_the_key() -> None:
    settings = RolloutSettings(server=RolloutServerSettings(api_key="SECRET"))

    for shown in (repr(settings), str(settings.server), f"{settings}", str(settings.server.__rich_repr__())):
        assert "SECRET" not in shown
        assert "api_key" in shown
    assert "api_key=None" in repr(RolloutSettings())


def test_describe_tells_value_default_bounds_and_source_of_every_setting(dotenv: Path) -> None:
    dotenv.write_text(f"{PREFIX}CLIENT_STRICT_HISTORY=yes\n")
    loaded = load_settings({f"{PREFIX}SERVER_API_KEY": "SECRET"}, dotenv)
    settings = msgspec.structs.replace(loaded.settings, max_metadata_size_bytes=2048)

    rows = {row.variable.removeprefix(PREFIX): row for row in describe(settings, loaded.sources)}

    def shown(name: str) -> tuple[str, str, str, str]:
        return rows[name].value, rows[name].default, rows[name].bounds, rows[name].source

    assert list(rows) == [spec.suffix for spec in SPECS]
    assert shown("SERVER_API_KEY") == ("***", "none", "any text", "environment")
    assert shown("CLIENT_STRICT_HISTORY") == ("true", "false", "true or false", ".env")
    assert shown("MAX_METADATA_SIZE_BYTES") == ("2048", "1048576", "1024..104857600", "code")
    assert shown("SERVER_CLEANUP_INTERVAL_SECONDS") == ("60", "60", "0.1..3600", "default")
    assert shown("SERVER_DEBUG_DIR") == ("not set", "none", "path", "default")


def test_describe_shows_that_no_key_is_set() -> None:
    assert [row.value for row in describe(RolloutSettings()) if row.variable.endswith("API_KEY")] == ["not set"]


def test_importing_the_settings_does_not_import_environs() -> None:
    code = (
        "import sys, rollout.settings; sys.exit(any(m in sys.modules for m in ('environs', 'marshmallow', 'dotenv')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
