"""The contract, section 7, as the real process has it: what it reads, what it refuses, what it prints."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from support import Process, environment, process_of, run_command

from rollout.server.serving import AddressInUse, bind
from rollout.setting_spec import PREFIX

Serving = Callable[..., AbstractAsyncContextManager[Process]]


@asynccontextmanager
async def serving(cwd: Path, *arguments: str, **settings: object) -> AsyncIterator[Process]:
    """A process that serves on a free port, in this folder, with these settings."""
    async with process_of(["serve", *arguments], cwd, environment(**{"SERVER_PORT": 0, **settings})) as running:
        await running.wait_ready()
        yield running


async def get(url: str, **options: Any) -> tuple[int, Any]:
    """Status and JSON body of a GET."""
    async with ClientSession() as session, session.get(url, **options) as response:
        return response.status, await response.json()


async def test_a_free_port_is_printed_and_serves(tmp_path: Path) -> None:
    async with serving(tmp_path) as process:
        assert process.port > 0
        assert (await _health(process))["active_rollouts"] == 0
        assert "calculator" in process.stdout
        assert "osm_rollout_" not in process.stdout, "on loopback no key is needed"


async def _health(process: Process) -> Any:
    status, body = await get(process.url + "/health")
    assert status == 200
    assert (body["status"], body["agent_loop"]) == ("healthy", "calculator")
    return body


async def test_the_environment_wins_over_the_file_and_an_empty_value_over_nothing(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(
        f"{PREFIX}SERVER_MAX_CONCURRENT_ROLLOUTS=7\n"
        f"{PREFIX}SERVER_MAX_QUEUED_ROLLOUTS=8\n"
        f"{PREFIX}SERVER_RECORD_TTL_SECONDS=61\n"
        f"{PREFIX}SERVER_MAX_BODY_BYTES=\n"
    )
    settings = {
        "SERVER_MAX_CONCURRENT_ROLLOUTS": 3,
        "SERVER_RECORD_TTL_SECONDS": "",
        "SERVER_ROLLOUT_TIMEOUT_SECONDS": 0,
    }
    async with serving(tmp_path, **settings) as process:
        _, body = await get(process.url + "/status")
    limits = body["limits"]
    assert limits["max_concurrent_rollouts"] == 3, "both: the environment"
    assert limits["max_queued_rollouts"] == 8, "only the file"
    assert limits["record_ttl_seconds"] == 61, "an empty value counts as unset"
    assert limits["max_body_bytes"] == 33554432, "nobody: the default"
    assert limits["rollout_timeout_seconds"] == 0, "an explicit zero is a value"


WRONG = {
    "MAX_METADATA_SIZE_BYTES": ("1023", "1024..104857600"),
    "SERVER_AGENT": ("nocolon", "module:attribute"),
    "SERVER_PORT": ("65536", "0..65535"),
    "SERVER_MAX_CONCURRENT_ROLLOUTS": ("0", "1..100000"),
    "SERVER_MAX_QUEUED_ROLLOUTS": ("-1", "0..1000000"),
    "SERVER_RECORD_TTL_SECONDS": ("59.9", "60..86400"),
    "SERVER_CLEANUP_INTERVAL_SECONDS": ("nan", "0.1..3600"),
    "SERVER_ROLLOUT_TIMEOUT_SECONDS": ("86401", "0..86400"),
    "SERVER_CANCEL_GRACE_SECONDS": ("inf", "0..300"),
    "SERVER_SHUTDOWN_GRACE_SECONDS": ("1h", "0..3600"),
    "SERVER_MAX_BODY_BYTES": ("1e6", "1024..1073741824"),
    "SERVER_READ_TIMEOUT_SECONDS": ("0.5", "1..3600"),
    "SERVER_RESULT_CACHE_BYTES": ("1048575", "1048576..1099511627776"),
    "SERVER_DELIVERY_HORIZON_SECONDS": ("604801", "0..604800"),
    "SERVER_STATE_URL": ("mysql://x", "sqlite:///"),
    "CLIENT_TIMEOUT_SECONDS": ("0", "1..3600"),
    "CLIENT_MAX_RETRIES": ("11", "0..10"),
    "CLIENT_COMPLETE_ROLLOUT_RETRIES": ("two", "0..10"),
    "CLIENT_RETRY_BASE_DELAY": ("0", "0.01..60"),
    "CLIENT_RETRY_MAX_DELAY": ("301", "0.01..300"),
    "CLIENT_MAX_CONNECTIONS": ("100001", "0..100000"),
    "CLIENT_STRICT_HISTORY": ("perhaps", "true or false"),
    "CLIENT_ALLOWED_HOSTS": ("http://host/path", "host"),
}


async def test_all_mistakes_are_reported_together_with_exit_code_2(tmp_path: Path) -> None:
    values = {name: value for name, (value, _) in WRONG.items()}
    code, stdout, stderr = await run_command(["serve"], tmp_path, **values)
    assert code == 2
    assert stdout == ""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    for name, (value, bounds) in WRONG.items():
        [line] = [line for line in lines if line.partition(":")[0] == PREFIX + name]
        assert value in line, line
        assert bounds in line, line


async def test_a_mistake_in_the_file_counts_as_one_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"{PREFIX}SERVER_PORT=http\nthis is no assignment\n")
    code, _, stderr = await run_command(["serve"], tmp_path, CLIENT_MAX_RETRIES=99)
    assert code == 2
    assert f"{PREFIX}SERVER_PORT" in stderr
    assert f"{PREFIX}CLIENT_MAX_RETRIES" in stderr
    assert "line 2" in stderr


async def test_a_wrong_value_never_shows_the_key(tmp_path: Path) -> None:
    code, stdout, stderr = await run_command(["serve"], tmp_path, SERVER_API_KEY="secret\x01key", SERVER_PORT=-1)
    assert code == 2
    assert "secret" not in stdout + stderr


async def test_a_debug_dir_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, stdout, stderr = await run_command(["serve", "--port", "0"], tmp_path, SERVER_DEBUG_DIR="file/traces")
    assert (code, stdout) == (2, "")
    assert "OSMOSIS_ROLLOUT_SERVER_DEBUG_DIR: 'file/traces' cannot be made: Not a directory" in stderr
    assert "Traceback" not in stderr


async def test_a_state_file_that_cannot_be_had_is_told_once(tmp_path: Path) -> None:
    code, stdout, stderr = await run_command(["serve", "--port", "0"], tmp_path, SERVER_STATE_URL="sqlite:///no/a.db")
    assert (code, stdout) == (1, "")
    assert stderr == "rollout: no/a.db cannot be made: No such file or directory\n"


async def test_an_unknown_variable_is_a_warning_with_the_nearest_name(tmp_path: Path) -> None:
    async with serving(tmp_path, SERVER_MAX_CONCURENT_ROLLOUTS=5) as process:
        process.signal(signal.SIGTERM)
        assert await process.end() == 0
    [line] = [line for line in process.stderr.splitlines() if "CONCURENT" in line]
    assert "WARNING" in line
    assert f"{PREFIX}SERVER_MAX_CONCURRENT_ROLLOUTS" in line


async def test_off_loopback_a_key_is_made_and_printed_once(tmp_path: Path) -> None:
    async with serving(tmp_path, SERVER_HOST="0.0.0.0") as process:
        [key] = re.findall(r"osm_rollout_\S{20,}", process.stdout)
        assert (await get(process.url + "/health"))[0] == 200
        assert (await get(process.url + "/status"))[0] == 401
        assert (await get(process.url + "/status", headers={"Authorization": f"Bearer {key}"}))[0] == 200
        process.signal(signal.SIGTERM)
        await process.end()
    assert (process.stdout + process.stderr).count("osm_rollout_") == 1


async def test_a_key_that_was_given_is_used_and_never_printed(tmp_path: Path) -> None:
    async with serving(tmp_path, SERVER_HOST="0.0.0.0", SERVER_API_KEY="my-own-key") as process:
        assert (await get(process.url + "/status"))[0] == 401
        assert (await get(process.url + "/status", headers={"Authorization": "bearer my-own-key"}))[0] == 200
        process.signal(signal.SIGTERM)
        await process.end()
    assert "my-own-key" not in process.stdout + process.stderr
    assert "osm_rollout_" not in process.stdout + process.stderr


async def test_a_port_that_another_process_has_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stdout, stderr = await run_command(["serve"], tmp_path, SERVER_PORT=port)
    assert (code, stdout) == (1, "")
    assert f"127.0.0.1:{port}" in stderr
    assert "in use" in stderr
    assert "Traceback" not in stderr


def test_a_service_does_not_share_its_port() -> None:
    [first] = bind("127.0.0.1", 0)
    with first, pytest.raises(AddressInUse, match=r"in use"):
        bind("127.0.0.1", first.getsockname()[1])


async def test_options_win_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollout import RolloutAgentLoop\n"
        "class Mine(RolloutAgentLoop):\n"
        "    name = 'mine'\n"
        "    async def run(self, ctx):\n"
        "        return ctx.complete([])\n"
        "agent = Mine()\n"
    )
    async with serving(tmp_path, "mine:agent", "--port", "0", SERVER_PORT=1, SERVER_AGENT="nothing:there") as process:
        assert (await get(process.url + "/health"))[1]["agent_loop"] == "mine"


async def test_the_base_delay_may_be_above_the_maximum(tmp_path: Path) -> None:
    code, _, _ = await run_command(["settings"], tmp_path, CLIENT_RETRY_BASE_DELAY=60, CLIENT_RETRY_MAX_DELAY=0.01)
    assert code == 0


async def test_an_agent_that_cannot_be_loaded_is_named_without_a_traceback(tmp_path: Path) -> None:
    code, _, stderr = await run_command(["serve"], tmp_path, SERVER_AGENT="no.such.module:agent")
    assert code == 2
    assert "no.such.module" in stderr
    assert "Traceback" not in stderr
