"""The files in `conf/` agree with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.server.service import FLUSH_SECONDS
from rollout.setting_spec import PREFIX
from rollout.settings import SPECS, RolloutSettings, load_settings

CONF = Path(__file__).resolve().parents[1] / "conf"
ENTRY = re.compile(
    rf"^# (?P<doc>.+)\n# Default: (?P<default>.+)\n# Allowed: (?P<bounds>.+)\n(?:# .+\n)*#?(?P<name>{PREFIX}\w+)=",
    re.MULTILINE,
)
ENV_FILES = ["dev.env", "prod.env"]


@pytest.mark.parametrize("name", ENV_FILES)
def test_an_env_file_explains_every_setting_as_the_code_does(name: str) -> None:
    entries = [match.groupdict() for match in ENTRY.finditer((CONF / name).read_text())]

    assert [(entry["name"], entry["doc"], entry["default"], entry["bounds"]) for entry in entries] == [
        (spec.variable, spec.rule.doc, spec.default_text or "none", spec.bounds) for spec in SPECS
    ]


@pytest.mark.parametrize("name", ENV_FILES)
def test_an_env_file_can_be_used_as_it_is(name: str) -> None:
    loaded = load_settings({}, CONF / name)

    assert loaded.unknown == ()
    assert loaded.sources


@pytest.mark.parametrize("name", ENV_FILES)
def test_what_an_env_file_has_switched_off_is_valid_too(name: str, tmp_path: Path) -> None:
    switched_on = re.sub(rf"^#({PREFIX}\w+=)", r"\1", (CONF / name).read_text(), flags=re.MULTILINE)
    (tmp_path / name).write_text(switched_on)

    loaded = load_settings({}, tmp_path / name)

    assert loaded.unknown == ()
    assert len(loaded.sources) >= len(SPECS) - 2


def test_the_env_file_for_production_holds_no_key_and_listens_everywhere() -> None:
    settings = RolloutSettings.from_env({}, CONF / "prod.env")

    assert settings.server.api_key is None
    assert settings.server.host == "0.0.0.0"


def test_systemd_waits_longer_than_the_service_may_need_to_stop() -> None:
    unit = (CONF / "rollout.service").read_text()
    settings = RolloutSettings.from_env({}, CONF / "prod.env")
    graces = settings.server.shutdown_grace_seconds + settings.server.cancel_grace_seconds
    longest = graces + 2 * FLUSH_SECONDS  # the first for the store's last writes, the second for the last deliveries

    [limit] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(limit) > longest


@pytest.mark.parametrize(
    "line",
    [
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        "DynamicUser=yes",
        "ProtectSystem=strict",
        "NoNewPrivileges=yes",
        "StateDirectory=rollout",
    ],
)
def test_the_systemd_unit_is_hardened(line: str) -> None:
    assert line in (CONF / "rollout.service").read_text().splitlines()


def test_prometheus_scrapes_the_port_of_the_env_file_for_production() -> None:
    port = RolloutSettings.from_env({}, CONF / "prod.env").server.port
    text = (CONF / "prometheus.yml").read_text()

    assert "metrics_path: /metrics" in text
    assert f'targets: ["localhost:{port}"]' in text


def test_the_logging_file_is_a_complete_configuration() -> None:
    config = json.loads((CONF / "logging.json").read_text())

    handlers = config["handlers"]
    assert config["version"] == 1
    assert set(config["root"]["handlers"]) <= set(handlers)
    assert {handler["formatter"] for handler in handlers.values()} == set(config["formatters"])


def test_the_logging_file_makes_json_lines() -> None:
    code = (
        "import json, logging.config, sys; logging.config.dictConfig(json.load(open(sys.argv[1])));"
        "logging.getLogger('rollout.conf').info('rollout %s started', 'r-1')"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, CONF / "logging.json"], capture_output=True, text=True, check=True
    )

    [line] = done.stderr.splitlines()
    assert "rollout r-1 started" in json.loads(line).values()
