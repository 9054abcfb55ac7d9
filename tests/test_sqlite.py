"""The state file: how it is made, refused, set aside and brought up to date, and what becomes of it under load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from disks import GENEROUS_SECONDS, copy_state, full_disk, wait_until
from stores import make_finished, make_record, make_result, make_sqlite
from support import PACKAGE_ROOT

from rollout.errors import StoreError
from rollout.schemas import Phase
from rollout.state import sqlite_schema
from rollout.state.sqlite import SqliteStore
from rollout.state.sqlite_writer import BATCH, Write, Writer
from rollout.state.store import Checkpointed, Delivered, GivenUp, Postponed, Restarted, Started
from rollout.testing import FakeClock

_HOLD = """
import sqlite3, sys
from pathlib import Path
from rollout.state.sqlite_file import open_file
connection = open_file(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@contextlib.asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[SqliteStore]:
    store = make_sqlite(path, **{"probe_seconds": 0.02, **options})
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def finish(store: SqliteStore, rollout_id: str, filling: int = 0) -> None:
    await store.create(make_record(rollout_id))
    assert await store.move(rollout_id, make_finished(rollout_id, filling)) is not None


async def deliver(store: SqliteStore, rollout_id: str, filling: int = 0, expires: float = 100.0) -> None:
    await finish(store, rollout_id, filling)
    assert await store.settle(rollout_id, Delivered(at=4.0, attempts=1, expires=expires)) is not None


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def names_beside(path: Path) -> list[str]:
    return sorted(part.name for part in path.parent.iterdir())


def modes_beside(path: Path) -> dict[str, int]:
    return {part.name: stat.S_IMODE(part.stat().st_mode) for part in path.parent.iterdir()}


def make_folder(path: Path) -> None:
    path.mkdir()


def take_away(path: Path) -> None:
    for part in path.parent.iterdir():
        part.unlink()


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the file."""
    command = [sys.executable, "-c", _HOLD, str(path)]
    with subprocess.Popen(command, cwd=PACKAGE_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def run_sql(path: Path, *statements: str) -> list[Any]:
    """What the last statement gives, of a file that nobody has open."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        return [connection.execute(statement).fetchall() for statement in statements][-1]
    finally:
        connection.close()


# ---------------------------------------------------------------- how it is made


async def test_a_new_file_is_readable_by_its_owner_only(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("a"))
        modes = modes_beside(path)

    assert modes == {"state.db": 0o600, "state.db-wal": 0o600}


async def test_a_new_file_says_whose_it_is_and_how_it_is_kept(path: Path) -> None:
    async with opened(path):
        pass

    assert run_sql(path, "PRAGMA application_id") == [(sqlite_schema.APPLICATION_ID,)]
    assert run_sql(path, "PRAGMA user_version") == [(sqlite_schema.VERSION,)]
    assert run_sql(path, "PRAGMA journal_mode") == [("wal",)]
    assert run_sql(path, "PRAGMA auto_vacuum") == [(2,)]


async def test_a_clean_end_leaves_one_file(path: Path) -> None:
    async with opened(path) as store:
        await deliver(store, "a")

    assert names_beside(path) == [path.name]


async def test_a_path_that_cannot_be_opened_is_refused_by_name(path: Path) -> None:
    for wrong, reason in ((path / "x" / "state.db", "No such file or directory"), (path.parent, "is not a file")):
        with pytest.raises(StoreError, match=reason) as caught:
            await make_sqlite(wrong).open()

        assert str(wrong) in str(caught.value)


async def test_a_log_that_cannot_be_opened_is_an_error_of_the_file(path: Path) -> None:
    async with opened(path):
        pass
    make_folder(path.with_name("state.db-wal"))

    with pytest.raises(StoreError, match=r"state\.db cannot be opened: "):
        await make_sqlite(path).open()


async def test_an_sqlite_that_is_too_old_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))

    with pytest.raises(StoreError, match=r"needs SQLite 3\.37 or newer"):
        await make_sqlite(path).open()


# ---------------------------------------------------------------- what is refused and left as it was


async def test_a_newer_file_is_refused_and_left_as_it_was(path: Path) -> None:
    async with opened(path) as store:
        await deliver(store, "a")
    run_sql(path, f"PRAGMA user_version = {sqlite_schema.VERSION + 1}")
    before = read(path)

    with pytest.raises(StoreError, match="of version 2, this program knows versions up to 1: upgrade it"):
        await make_sqlite(path).open()

    assert read(path) == before


async def test_a_database_of_another_program_is_refused_and_left_as_it_was(path: Path) -> None:
    run_sql(path, "CREATE TABLE records (number INTEGER)", "INSERT INTO records VALUES (1)")
    before = read(path)

    with pytest.raises(StoreError, match="database of another program"):
        await make_sqlite(path).open()

    assert read(path) == before
    assert names_beside(path) == [path.name]


async def test_tables_that_this_version_did_not_make_are_refused(path: Path) -> None:
    async with opened(path):
        pass
    run_sql(path, "ALTER TABLE records ADD COLUMN colour TEXT")

    with pytest.raises(StoreError, match="not those that this version makes"):
        await make_sqlite(path).open()


async def test_a_record_that_cannot_be_read_is_named(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("odd one"))
    run_sql(path, "UPDATE records SET request = X'7B'")

    with pytest.raises(StoreError, match="the record of 'odd one' cannot be read"):
        await make_sqlite(path).open()


async def test_a_file_that_another_process_has_is_refused_until_that_ends(
    path: Path, holder: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(StoreError, match="in use by another process: one file, one service"):
        await make_sqlite(path).open()

    holder.kill()
    holder.wait()
    async with opened(path) as store:
        await store.create(make_record("a"))


async def test_a_second_store_on_the_file_takes_nothing_from_the_first(path: Path) -> None:
    async with opened(path) as first:
        second = make_sqlite(path)
        with pytest.raises(StoreError, match="in use"):
            await second.open()

        await first.create(make_record("a"))

    async with opened(path) as third:
        assert await third.get("a") is not None


# ---------------------------------------------------------------- versions


def _add_run(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE records ADD COLUMN run INTEGER NOT NULL DEFAULT 1")


def _fail_halfway(connection: sqlite3.Connection) -> None:
    _add_run(connection)
    raise StoreError("the migration met something that it does not know")


async def _file_of_version_0(path: Path) -> None:
    async with opened(path) as store:
        await deliver(store, "a")
        await store.create(make_record("b", "key"))
    run_sql(path, "ALTER TABLE records DROP COLUMN run", "PRAGMA user_version = 0")


async def test_an_older_file_is_brought_up_to_date_and_keeps_its_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sqlite_schema.MIGRATIONS, 0, _add_run)
    await _file_of_version_0(path)

    async with opened(path) as store:
        delivered, queued = await store.get("a"), await store.get("none", "key")

    assert delivered is not None
    assert queued is not None
    assert (delivered.run, delivered.result, queued.rollout_id) == (1, make_result("a"), "b")
    assert run_sql(path, "PRAGMA user_version") == [(1,)]


async def test_a_migration_that_fails_leaves_the_older_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sqlite_schema.MIGRATIONS, 0, _fail_halfway)
    await _file_of_version_0(path)

    with pytest.raises(StoreError, match="met something"):
        await make_sqlite(path).open()

    assert run_sql(path, "PRAGMA user_version") == [(0,)]
    assert "run" not in {column[1] for column in run_sql(path, "PRAGMA table_info(records)")}


# ---------------------------------------------------------------- damage


def damage(path: Path, where: str) -> bytes:
    """Let something happen to the file; the bytes that it has then."""
    whole = path.read_bytes()
    middle = len(whole) // 2 // 4096 * 4096
    damaged = {
        "at the start": b"x" * 100 + whole[100:],
        "in the middle": whole[:middle] + b"\xa5" * 8192 + whole[middle + 8192 :],
        "at the end": whole[: len(whole) - 4096],
        "all of it": b"this was never a database\n" * 200,
    }[where]
    path.write_bytes(damaged)
    return damaged


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("where", ["at the start", "in the middle", "at the end", "all of it"])
async def test_a_damaged_file_is_set_aside_loudly(path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(path) as store:
        await asyncio.gather(*(deliver(store, f"r{i}", filling=500) for i in range(100)))
    damaged = damage(path, where)

    async with opened(path) as store:
        assert store.tally().records == 0

    [aside] = path.parent.glob("state.db.damaged-*")
    assert aside.read_bytes() == damaged
    [error] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"{path} is damaged" in error
    assert f"it is now {aside}, and a NEW, EMPTY state file is begun" in error


async def test_what_was_set_aside_is_never_overwritten(path: Path) -> None:
    for number in range(3):
        write(path, b"no database %d" % number * 50)
        async with opened(path):
            pass

    assert len({aside.read_bytes() for aside in path.parent.glob("state.db.damaged-*")}) == 3


async def test_damage_that_is_met_later_is_an_error_for_who_meets_it(path: Path) -> None:
    large = 1_000_000
    async with opened(path, result_cache_bytes=100 * large) as store:
        for i in range(12):  # more than the cache of the connection holds
            await deliver(store, f"r{i}", filling=large)
    async with opened(path, result_cache_bytes=100 * large) as store:
        overwrite(path, 3 * large, bytes(4 * large))
        outcomes = await asyncio.gather(*(store.get(f"r{i}") for i in range(12)), return_exceptions=True)
        created = await store.create(make_record("new"))

    assert {type(outcome).__name__ for outcome in outcomes} == {"Record", "StoreError"}
    assert created.phase is Phase.QUEUED


# ---------------------------------------------------------------- commits


@contextlib.asynccontextmanager
async def busy_writer(path: Path) -> AsyncIterator[tuple[Writer, threading.Event]]:
    """A writer that is held up by a slow disk until the event is set."""
    writer, begun, goes_on = Writer(path, wait_seconds=0), threading.Event(), threading.Event()
    await writer.start()
    writer.run(lambda connection: (begun.set(), goes_on.wait(GENEROUS_SECONDS)))
    await wait_until(begun.is_set)
    try:
        yield writer, goes_on
    finally:
        await writer.stop()


@pytest.mark.parametrize(
    ("size", "count", "commits"),
    [(1, BATCH, 1), (1, BATCH + 1, 2), (10, 101, 2)],
    ids=["all in one", "bounded in number", "bounded in bytes"],
)
async def test_writes_that_wait_together_share_a_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch, size: int, count: int, commits: int
) -> None:
    monkeypatch.setattr("rollout.state.sqlite_writer.BATCH_BYTES", 1000)
    body = bytes(size)
    async with busy_writer(path) as (writer, goes_on):
        before = writer.commits + 1
        waiting = [asyncio.create_task(writer.write(Write(results=((number, body),)))) for number in range(count)]
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(*waiting)

        assert writer.commits - before == commits
    assert run_sql(path, "SELECT count(*) FROM results") == [(count,)]


async def test_many_that_come_at_once_wait_for_few_commits(path: Path) -> None:
    async with opened(path) as store:
        before = store.commits
        await asyncio.gather(*(store.create(make_record(f"r{i}")) for i in range(200)))

        assert store.commits - before < 50


async def test_what_was_acknowledged_is_in_the_file_at_once(path: Path, tmp_path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("queued", "key", b"[1]"))
        await store.create(make_record("running"))
        await store.move("running", Started(at=2.0))
        await store.move("running", Checkpointed(messages=b"[2]"))
        await finish(store, "owed")
        await deliver(store, "delivered")
        left_behind = copy_state(path, tmp_path / "copy" / "state.db")

    async with opened(left_behind) as restarted:
        queued, running, owed, delivered = [
            await restarted.get(name) for name in ("queued", "running", "owed", "delivered")
        ]
        due = (await restarted.claim(0.0, 10)).records

    assert queued is not None
    assert (queued.key, queued.tools, queued.phase) == ("key", b"[1]", Phase.QUEUED)
    assert msgspec.structs.asdict(queued.request or make_record("x")) == msgspec.structs.asdict(  # type: ignore[type-var]
        make_record("queued", "key").request or make_record("x")
    )
    assert running is not None
    assert (running.phase, running.checkpoint, running.is_live) == (Phase.QUEUED, b"[2]", True)
    assert owed is not None
    assert (owed.result, owed.callback, owed.give_up) == (make_result("owed"), make_finished("owed").callback, 500.0)
    assert delivered is not None
    assert (delivered.phase, delivered.result, delivered.expires) == (Phase.DELIVERED, make_result("delivered"), 100.0)
    assert [record.rollout_id for record in due] == ["owed"]


async def test_a_run_that_begins_anew_is_counted_in_the_file(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("a"))
        await store.move("a", Started(at=2.0))
        again = await store.move("a", Restarted(run=2))

        assert again is not None
        assert (again.run, again.phase, again.started_at) == (2, Phase.QUEUED, None)
    async with opened(path) as store:
        [record] = store.scan()

    assert record.run == 2


async def test_a_checkpoint_replaces_the_one_before_and_goes_with_the_end(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("a"))
        for text in (b"[1]", b"[2]"):
            await store.move("a", Checkpointed(messages=text))
    stored = run_sql(path, "SELECT messages FROM checkpoints")
    async with opened(path) as store:
        await store.move("a", make_finished("a"))

    assert stored == [(b"[2]",)]
    assert run_sql(path, "SELECT count(*) FROM checkpoints") == [(0,)]


async def test_an_error_text_that_utf8_cannot_carry_is_stored(path: Path) -> None:
    async with opened(path) as store:
        await finish(store, "a")
        await store.settle("a", GivenUp(attempts=1, error="\ud800!", expires=10.0))

        record = await store.get("a")

    assert record is not None
    assert record.last_error == "?!"


async def test_one_write_that_cannot_be_made_fails_alone(path: Path) -> None:
    async with opened(path) as store:
        names = ["a", "b", "c"]
        await asyncio.gather(*(store.create(make_record(name)) for name in names))
        moves = [make_finished(name) for name in names]
        moves[1] = msgspec.structs.replace(moves[1], turn=2**70)

        outcomes = await asyncio.gather(*map(store.move, names, moves), return_exceptions=True)

        assert [type(outcome).__name__ for outcome in outcomes] == ["Record", "StoreError", "Record"]
        assert await store.move("b", make_finished("b")) is not None
        assert store.failure is None


# ---------------------------------------------------------------- callers that go away


async def test_a_create_whose_caller_goes_away_is_carried_to_its_end(path: Path) -> None:
    async with opened(path) as store:
        gone = asyncio.create_task(store.create(make_record("a", tools=b"[1]")))
        await asyncio.sleep(0)
        gone.cancel()

        held = await store.create(make_record("a", tools=b"[2]"))

        assert held.tools == b"[1]"
        assert store.tally().records == 1


async def test_an_end_whose_caller_goes_away_is_the_only_one(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("a"))
        gone = asyncio.create_task(store.move("a", make_finished("a", 1)))
        await asyncio.sleep(0)
        gone.cancel()

        second = await store.move("a", make_finished("a", 2))
        await store.create(make_record("b"))  # comes after it in the file
        record = await store.get("a")

    assert second is None
    assert record is not None
    assert record.result == make_result("a", 1)


async def test_a_closed_store_refuses_and_keeps_nobody_waiting(path: Path) -> None:
    async with opened(path) as store:
        await deliver(store, "a")

    for verb in (store.get("a"), store.create(make_record("b")), store.expire(0.0, 1)):
        with pytest.raises(StoreError, match="the store is closed"):
            await verb


# ---------------------------------------------------------------- a disk that fails


async def test_a_full_disk_refuses_writes_and_goes_on_reading(path: Path) -> None:
    async with opened(path) as store:
        await deliver(store, "known")
        await store.create(make_record("running"))
        with full_disk():
            with pytest.raises(StoreError, match="disk I/O error"):
                await store.create(make_record("new"))
            read = await store.get("known")
            started = await store.move("running", Started(at=1.0))
            failure = store.failure

        assert failure is not None
        assert "disk I/O error" in failure
        assert read is not None
        assert read.result == make_result("known")
        assert started is not None
        assert await store.get("new") is None
        assert store.tally().records == 2


async def test_the_store_recovers_by_itself_and_forgets_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(path) as store:
        await finish(store, "owed")
        with full_disk():
            for _ in range(3):
                with pytest.raises(StoreError):
                    await store.settle("owed", Delivered(at=1.0, attempts=1, expires=1.0))
        await wait_until(lambda: store.failure is None)

        settled = await store.settle("owed", Delivered(at=1.0, attempts=1, expires=1.0))

        assert settled is not None
        assert (await store.create(make_record("new"))).phase is Phase.QUEUED
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"the store cannot write {path}" in errors[0]
    assert "can write" in caplog.text


async def test_reads_beside_a_write_that_fails_are_answered(path: Path) -> None:
    async with opened(path) as store:
        for name in ("a", "b"):
            await deliver(store, name)
        with full_disk():
            verbs = (store.get("a"), store.create(make_record("new")), store.get("b"), store.expire(0.0, 10))
            outcomes = await asyncio.gather(*verbs, return_exceptions=True)

    assert [type(outcome).__name__ for outcome in outcomes] == ["Record", "StoreError", "Record", "int"]


async def test_a_postponed_delivery_stays_due_though_the_disk_is_full(path: Path) -> None:
    async with opened(path) as store:
        await finish(store, "a")
        with full_disk():
            await store.settle("a", Postponed(attempts=1, error="503", due=5.0))

        assert [record.attempts for record in (await store.claim(5.0, 1)).records] == [1]


async def test_a_connection_that_is_lost_is_opened_anew(path: Path) -> None:
    writer = Writer(path, wait_seconds=0, probe_seconds=0.01)
    await writer.start()

    with pytest.raises(StoreError, match="closed database"):
        await writer.read(lambda connection: connection.close())

    assert await writer.read(lambda connection: connection.execute("SELECT 1").fetchone()) == (1,)
    await writer.stop()


async def test_a_file_that_was_taken_away_is_not_made_anew_behind_the_back(path: Path) -> None:
    writer = Writer(path, wait_seconds=0, probe_seconds=0.01)
    await writer.start()
    take_away(path)
    with pytest.raises(StoreError, match="closed database"):
        await writer.read(lambda connection: connection.close())

    reads = (writer.read(lambda connection: None) for _ in range(3))
    outcomes = await asyncio.gather(*reads, return_exceptions=True)

    assert ["is not there" in str(outcome) for outcome in outcomes] == [True, True, True]
    assert writer.failure is not None
    assert names_beside(path) == []
    await writer.stop()


# ---------------------------------------------------------------- what stays and what goes


async def test_the_file_stays_bounded_under_constant_load(path: Path) -> None:
    sizes = []
    async with opened(path, result_cache_bytes=1 << 30) as store:
        for now in range(20):
            names = [f"{now}-{i}" for i in range(30)]
            await asyncio.gather(*(deliver(store, name, filling=5000, expires=now + 3.0) for name in names))
            await store.expire(float(now), 1000)
            sizes.append(store.size_bytes)

    assert sizes[-1] <= 1.3 * max(sizes[:10])


async def test_space_is_given_back_after_a_flood(path: Path) -> None:
    async with opened(path, result_cache_bytes=1 << 30) as store:
        await asyncio.gather(*(deliver(store, f"r{i}", filling=20_000, expires=10.0) for i in range(200)))
        await store.expire(10.0, 1000)
    size_bytes = len(read(path))

    assert size_bytes < 2 * 1024 * 1024 < 200 * 20_000


async def test_a_burst_of_results_is_trimmed_to_the_cache(path: Path) -> None:
    size = len(make_result("r100", 1000))
    async with opened(path, result_cache_bytes=5 * size) as store:
        await asyncio.gather(*(deliver(store, f"r{i:03}", filling=1000, expires=i) for i in range(200)))
        await wait_until(lambda: store.tally().held_bytes <= 5 * size)
        records = [await store.get(f"r{i:03}") for i in range(200)]

    held = [record.rollout_id for record in records if record is not None and record.result_held]
    assert len(held) == 5


async def test_a_smaller_cache_after_a_restart_trims_the_oldest(path: Path) -> None:
    async with opened(path) as store:
        for i in range(4):
            await deliver(store, f"r{i}", filling=1000, expires=50.0 + i)
    async with opened(path, result_cache_bytes=2 * len(make_result("r0", 1000))) as store:
        records = [await store.get(f"r{i}") for i in range(4)]

        assert store.tally().held_bytes == 2 * len(make_result("r0", 1000))
    assert [record.result_held for record in records if record is not None] == [False, False, True, True]


async def test_equal_lists_of_tools_are_stored_once_and_go_with_the_last_record(path: Path) -> None:
    async with opened(path) as store:
        for i in range(5):
            record = make_record(f"r{i}", tools=b"[1]" if i else b"[2]")
            await store.create(record)
            await store.move(record.rollout_id, make_finished(record.rollout_id))
            await store.settle(record.rollout_id, Delivered(at=1.0, attempts=1, expires=10.0 + i))
        await store.expire(10.0, 10)
        await store.get("r4")
    first = run_sql(path, "SELECT body FROM tools")
    async with opened(path) as store:
        await store.expire(20.0, 10)
        await store.create(make_record("again", tools=b"[1]"))
        again = await store.create(make_record("again"))

    assert first == [(b"[1]",)]
    assert again.tools == b"[1]"
    assert run_sql(path, "SELECT body FROM tools") == [(b"[1]",)]


async def test_a_list_of_tools_whose_first_record_failed_is_stored_with_the_next(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("first"))
        with full_disk(), pytest.raises(StoreError):
            await store.create(make_record("a", tools=b"[1]"))
        await wait_until(lambda: store.failure is None)
        await store.create(make_record("a", tools=b"[1]"))
    async with opened(path) as store:
        record = await store.get("a")

    assert record is not None
    assert record.tools == b"[1]"


async def test_a_name_that_two_records_have_is_known_while_one_of_them_is(path: Path) -> None:
    async with opened(path) as store:
        await store.create(make_record("a", "k"))
        await store.move("a", make_finished("a"))
        await store.settle("a", Delivered(at=1.0, attempts=1, expires=10.0))
        await store.create(make_record("b", "a"))
        await store.move("b", make_finished("b"))
        await store.settle("b", Delivered(at=1.0, attempts=1, expires=20.0))
        await store.expire(10.0, 10)

        by_key = await store.get("c", "a")
        held = await store.create(make_record("c", "a"))

    assert by_key is not None
    assert (by_key.rollout_id, held.rollout_id) == ("b", "b")


# ---------------------------------------------------------------- clocks


async def test_a_jump_of_the_wall_clock_changes_nothing_while_the_process_lives(path: Path) -> None:
    clock, wall = FakeClock(), FakeClock(1e9)
    async with opened(path, clock=clock, wall_clock=wall) as store:
        wall.advance(86400.0)
        await deliver(store, "a", expires=clock() + 100)

        early = await store.expire(clock() + 99, 10)
        in_time = await store.expire(clock() + 100, 10)

    assert (early, in_time) == (0, 1)


async def test_times_count_on_while_no_process_lives(path: Path) -> None:
    async with opened(path, clock=lambda: 5000.0, wall_clock=lambda: 1e9) as store:
        await deliver(store, "done", expires=5100.0)
        await finish(store, "owed")
    async with opened(path, clock=lambda: 7.0, wall_clock=lambda: 1e9 + 60) as store:
        done, owed = await store.get("done"), await store.get("owed")

    assert done is not None
    assert owed is not None
    assert done.expires == 7.0 + 40
    assert owed.give_up == 7.0 - 4500 - 60
