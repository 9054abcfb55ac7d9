"""`python -m rollout state PATH`: what it shows of a state file, what it hides, and what it changes."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Serve
from disks import full_disk, wait_until
from served import Instant
from stores import make_finished, make_init, make_record, make_result
from support import run_command

from rollout.cli import main
from rollout.state.sqlite import SqliteStore
from rollout.state.store import Checkpointed, Delivered, GivenUp, Record, Restarted
from rollout.testing import MockTrainer, status


class Printed(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Printed]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("list", "--json")`: the command on the file of this test, in a folder without settings."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> Printed:
        code = main(["state", "state.db", *arguments])
        return Printed(code, *capsys.readouterr())

    return command


async def _fill(path: Path) -> None:
    store = SqliteStore(path, 1 << 20)
    await store.open()
    await store.create(_queued())
    await store.move("queued", Checkpointed(messages=b'[{"role":"user"}]'))
    await store.move("queued", Restarted(run=2))
    for name in ("delivered", "owed", "given\x1b[31m up"):
        await store.create(make_record(name))
        await store.move(name, make_finished(name))
    await store.settle("delivered", Delivered(at=4.0, attempts=1, expires=1e9))
    await store.settle("given\x1b[31m up", GivenUp(attempts=3, error="refused: 404", expires=1e9))
    await store.close()


def _queued() -> Record:
    record = make_record("queued", "key")
    record.request = make_init(rollout_id="queued", api_key="SECRET-1", llm_api_key="SECRET-2")
    return record


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    """A queued rollout in its second run, a delivered one, one that is owed, and one that was given up."""
    path = tmp_path / "state.db"
    asyncio.run(_fill(path))
    return path


GIVEN_UP = "given\x1b[31m up"

# ---------------------------------------------------------------- looking


def test_the_summary_counts_and_names_the_oldest_that_is_owed(state_file: Path, run: Run) -> None:
    printed = run()

    lines = [line.split() for line in printed.out.splitlines()]
    assert printed.code == 0
    assert lines[0][:2] == ["4", "records,"]
    assert ["unfinished", "(queued", "or", "running)", "1"] in lines
    assert ["owed", "(delivery", "goes", "on)", "1"] in lines
    assert ["given", "up", "1"] in lines
    assert "oldest owed: owed, ended 1970-01-01T00:00:03.000Z, 0 attempts" in printed.out


def test_the_summary_as_json(state_file: Path, run: Run) -> None:
    found = run("--json").json

    assert (found["records"], found["by_status"]) == (4, {"STARTED": 1, "COMPLETED": 3})
    assert found["by_phase"]["undelivered"] == 1
    assert found["oldest_undelivered"]["rollout_id"] == "owed"
    assert found["size_bytes"] >= state_file.stat().st_size


def test_a_file_without_records_has_no_oldest(run: Run, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db", 1)
    asyncio.run(_open_and_close(store))

    assert run("--json").json["oldest_undelivered"] is None
    assert "oldest" not in run().out
    assert run("list").out.split() == [
        "id",
        "phase",
        "status",
        "finish_reason",
        "run",
        "delivery_attempts",
        "created",
        "finished",
    ]


async def _open_and_close(store: SqliteStore) -> None:
    await store.open()
    await store.close()


def test_the_oldest_says_why_it_was_not_delivered(run: Run, state_file: Path) -> None:
    with sqlite3.connect(state_file) as connection:
        connection.execute("DELETE FROM records WHERE id = 'owed'")
    connection.close()

    last = run().out.splitlines()[-1]
    assert last.startswith("oldest given up: given")
    assert last.endswith("3 attempts, last: refused: 404")


def test_the_list_is_a_table_in_the_order_of_acceptance(state_file: Path, run: Run) -> None:
    heading, *lines = run("list").out.splitlines()

    assert heading.split()[:3] == ["id", "phase", "status"]
    assert [line.split()[0] for line in lines] == ["queued", "delivered", "owed", "given\\x1b[31m"]
    assert lines[0].split()[1:5] == ["unfinished", "STARTED", "-", "2"]  # a file does not know what has started
    assert "\x1b" not in "".join(lines)


def test_the_list_can_be_of_what_is_owed_only(state_file: Path, run: Run) -> None:
    found = run("list", "--undelivered", "--json").json

    assert [(state["rollout_id"], state["phase"]) for state in found] == [
        ("owed", "delivering"),
        (GIVEN_UP, "undelivered"),
    ]


def test_the_list_can_be_of_what_is_still_tried_only(state_file: Path, run: Run) -> None:
    assert [state["rollout_id"] for state in run("list", "--owed", "--json").json] == ["owed"]
    assert [line.split()[:2] for line in run("list", "--owed").out.splitlines()[1:]] == [["owed", "owed"]]


@pytest.mark.parametrize(("limit", "count", "hint"), [("2", 2, True), ("0", 4, False), ("100", 4, False)])
def test_a_list_is_cut_off_loudly(state_file: Path, run: Run, limit: str, count: int, hint: bool) -> None:
    printed = run("list", "--limit", limit)

    assert len(printed.out.splitlines()) == count + 1
    assert ("more with --limit" in printed.err) is hint


def test_one_record_is_shown_whole_without_keys(state_file: Path, run: Run) -> None:
    found, table = run("show", "queued", "--json"), run("show", "queued")

    shown = found.json
    assert (shown["run"], shown["idempotency_key"], shown["checkpoint"]) == (2, "key", [{"role": "user"}])
    assert (shown["request"]["api_key"], shown["request"]["llm_api_key"]) == ("***", "***")
    assert shown["request"]["messages"]
    assert "SECRET" not in found.out + table.out
    assert ["run", "2"] in [line.split() for line in table.out.splitlines()]
    assert ["phase", "unfinished"] in [line.split() for line in table.out.splitlines()]
    assert "result_held" not in table.out, "there is no result that could be held"


def test_the_shown_result_is_the_one_that_is_owed(state_file: Path, run: Run) -> None:
    shown = run("show", "owed", "--json").json

    assert shown["result"] == json.loads(make_result("owed"))
    assert shown["result_held"] is True
    assert shown["callback_url"] == "http://trainer/v1/rollout/completed"


def test_an_id_that_is_not_there_is_an_error(state_file: Path, run: Run) -> None:
    printed = run("show", "nobody")

    assert (printed.code, printed.out) == (1, "")
    assert "knows no rollout 'nobody'" in printed.err


def test_results_are_exported_as_they_were_sent(state_file: Path, run: Run) -> None:
    everything, owed = run("export").out.splitlines(), run("export", "--undelivered").out.splitlines()

    assert [line.encode() for line in everything] == [make_result(name) for name in ("delivered", "owed", GIVEN_UP)]
    assert [json.loads(line)["rollout_id"] for line in owed] == ["owed", GIVEN_UP]


def test_looking_changes_nothing(state_file: Path, run: Run) -> None:
    before = {part.name: part.read_bytes() for part in state_file.parent.iterdir()}

    for arguments in ((), ("list",), ("show", "owed"), ("export",)):
        run(*arguments)

    assert {part.name: part.read_bytes() for part in state_file.parent.iterdir()} == before


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("arguments", [(), ("list",), ("export",), ("redeliver", "--all")], ids=str)
def test_a_file_that_is_not_there_is_not_made(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    printed = run(*arguments)

    assert (printed.code, "state.db is not there" in printed.err) == (1, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [(), ("redeliver", "--all")], ids=str)
def test_what_is_no_state_file_is_named_and_left_where_it_is(
    run: Run, state_file: Path, arguments: tuple[str, ...]
) -> None:
    state_file.write_bytes(b"no database" * 100)

    printed = run(*arguments)

    assert (printed.code, "state.db is not a state file" in printed.err) == (1, True)
    assert [part.name for part in state_file.parent.iterdir()] == ["state.db"]


@pytest.mark.parametrize("actions", [[], ["list"], ["redeliver", "--all"]], ids=" ".join)
@pytest.mark.parametrize("path", [".", "/", "sqlite:///."])
def test_a_folder_is_no_state_file(path: str, actions: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", path, *actions]) == 1
    assert capsys.readouterr().err.endswith(" is not a file\n")


def test_the_file_may_be_named_as_the_setting_names_it(state_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", f"sqlite:///{state_file}", "list"]) == 0
    assert "owed" in capsys.readouterr().out


def test_damage_inside_is_an_error_of_the_file(run: Run, state_file: Path) -> None:
    whole = state_file.read_bytes()
    state_file.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))

    printed = run("list")

    assert (printed.code, "state.db is damaged" in printed.err) == (1, True)


def test_a_file_of_another_version_or_program_is_refused(run: Run, state_file: Path) -> None:
    for pragma, reason in (("user_version = 0", "older version"), ("application_id = 7", "another program")):
        connection = sqlite3.connect(state_file)
        connection.execute(f"PRAGMA {pragma}")
        connection.close()

        assert reason in run().err


def test_a_disk_that_takes_nothing_is_an_error(run: Run, state_file: Path) -> None:
    with full_disk():
        printed = run("redeliver", "--all")

    assert (printed.code, "state.db cannot be changed: disk I/O error" in printed.err) == (1, True)
    assert run("--json").json["by_phase"]["undelivered"] == 1


def test_a_reader_that_has_seen_enough_is_no_error(run: Run, state_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)

        assert main(["state", "state.db", "export"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--limit", "x"),
        ("--wait", "-1"),
        ("--wait", "soon"),
        ("show",),
        ("redeliver",),
        ("redeliver", "a", "--all"),
        ("list", "--owed", "--undelivered"),
        ("forget",),
    ],
    ids=str,
)
def test_a_wrong_command_is_told_so(run: Run, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)

    assert caught.value.code == 2


async def test_a_file_that_a_service_has_is_refused_until_it_ends(serve: Serve, tmp_path: Path, run: Run) -> None:
    server = await serve(Instant(), state_url=f"sqlite:///{tmp_path}/state.db")
    await server.post_init(rollout_id="a")
    await server.wait_phase("a")

    refused = await asyncio.to_thread(run, "list")
    waiting = asyncio.create_task(asyncio.to_thread(run, "--wait", "30", "list", "--json"))
    await server.service.stop()
    found = await waiting

    assert (refused.code, "in use by another process" in refused.err) == (1, True)
    assert [state["rollout_id"] for state in found.json] == ["a"]


# ---------------------------------------------------------------- redeliver


def test_a_result_that_was_given_up_is_due_again(state_file: Path, run: Run) -> None:
    printed = run("redeliver", GIVEN_UP, "--json")

    assert (printed.code, printed.json) == (0, {"due": [GIVEN_UP], "not_given_up": []})
    state = run("show", GIVEN_UP, "--json").json
    assert (state["phase"], state["delivery_attempts"], state["last_delivery_error"]) == (
        "delivering",
        0,
        "refused: 404",
    )
    assert run("--json").json["by_phase"]["undelivered"] == 0


def test_all_that_were_given_up_are_due_again(state_file: Path, run: Run) -> None:
    first, second = run("redeliver", "--all"), run("redeliver", "--all")

    assert (first.code, first.out.split()[:5]) == (0, ["1", "result", "is", "due", "again:"])
    assert second.out == "nothing was given up; 2 are still being delivered\n"


def test_what_was_not_given_up_is_named(state_file: Path, run: Run) -> None:
    printed = run("redeliver", "owed", "nobody", GIVEN_UP)

    assert printed.code == 1
    assert printed.out.startswith("1 result is")
    assert [line.split()[-1] for line in printed.err.splitlines()] == ["owed", "nobody"]


async def test_the_next_service_delivers_what_is_due_again(
    serve: Serve, trainer: MockTrainer, tmp_path: Path, run: Run
) -> None:
    trainer.on_completed(status(404), times=1)
    url = f"sqlite:///{tmp_path}/state.db"
    first = await serve(Instant(), state_url=url)
    await first.post_init(rollout_id="a", api_key="secret")
    await first.wait_phase("a", "undelivered")
    await first.service.stop()

    await asyncio.to_thread(run, "redeliver", "a")
    second = await serve(Instant(), state_url=url)
    await second.wait_phase("a")

    refused, delivered = trainer.completions("a")
    assert refused.body == delivered.body
    assert refused.headers["Idempotency-Key"] == delivered.headers["Idempotency-Key"]
    assert (refused.bearer, delivered.bearer) == ("secret", "secret")
    assert second.service.registry.store.tally().owed_bytes == 0
    await wait_until(lambda: second.service.health()["undelivered_rollouts"] == 0)


async def test_the_command_runs_as_a_process(state_file: Path) -> None:
    code, out, err = await run_command(["state", str(state_file), "list", "--undelivered"], state_file.parent)

    assert (code, err) == (0, "")
    assert "owed" in out
