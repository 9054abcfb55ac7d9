"""Whatever was acknowledged survives the death of the process: SIGKILL under load, and what a power failure leaves.

`ROLLOUT_CRASH_SEED` and `ROLLOUT_CRASH_KILLS` choose the run; `tests/crash_run.py` does the same by hand, for longer.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from cases import needs
from crash_load import Ledger
from crash_run import CrashRun
from crash_snapshot import Acknowledged, Snapshot, copy_files, missing_from
from crash_stage import Life, build_shim
from stores import make_finished, make_record

from rollout.state.sqlite import SqliteStore
from rollout.testing import MockTrainer, ReadResponse, hold, make_request, post_init

SEED = int(os.environ.get("ROLLOUT_CRASH_SEED", "1"))
KILLS = int(os.environ.get("ROLLOUT_CRASH_KILLS", "30"))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A library to preload that makes fsyncs slow, and counts them."""
    return build_shim(tmp_path_factory.mktemp("shim"))


# ---------------------------------------------------------------- kill -9


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, True], ids=["interrupted", "resumed"])
async def test_nothing_acknowledged_is_lost_or_contradicted_by_kills_under_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shim: Path | None, resumes: bool
) -> None:
    report = await CrashRun(tmp_path, SEED, kills=KILLS, resumes=resumes, shim=shim).run()

    with capsys.disabled():
        print(f"\n{report.table()}")
    assert not report.problems
    assert report.accepted > report.kills == KILLS
    assert min(report.completed, report.interrupted, report.repeats, report.asked_again) > 0  # it did hurt
    assert (report.run_again > 0) is resumes


# ---------------------------------------------------------------- power loss


@pytest.mark.slow
async def test_every_202_comes_after_an_fsync_of_its_own(tmp_path: Path, shim: Path | None) -> None:
    if shim is None:
        pytest.skip(needs("gcc"))
    log = tmp_path / "fsyncs"
    extra = {"LD_PRELOAD": str(shim), "FSYNC_LOG": str(log)}
    async with MockTrainer() as trainer:
        trainer.on_chat(hold())  # so that nothing but the inits is written
        life = await Life.begin(tmp_path / "state.db", tmp_path / "service.log", {}, extra)
        try:
            url = await life.wait_ready()
            counts = [log.stat().st_size]
            for _ in range(20):
                request = make_request(server_url=trainer.url, metadata={"turns": 1, "refuse": False})
                assert (await post_init(url, request)).status == 202
                counts.append(log.stat().st_size)
        finally:
            await life.kill()

    assert counts == sorted(set(counts))


async def snapshot_of_three(folder: Path) -> Snapshot:
    """Files in which `a`, `b` with its result, and last of all `c` were written, one transaction each."""
    database = folder / "state.db"
    store = SqliteStore(database, 1 << 20)
    await store.open()
    try:
        for name in ("a", "b"):
            await store.create(make_record(name))
        finished = make_finished("b")
        await store.move("b", finished)
        await store.create(make_record("c"))
        copy_files(database, folder / "copy")
    finally:
        await store.close()
    early = Acknowledged(frozenset("ab"), {"b": finished.result})
    return Snapshot(folder / "copy", early, early._replace(accepted=frozenset("abc")))


@pytest.mark.parametrize("seed", range(5))
async def test_a_power_failure_takes_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    snapshot = await snapshot_of_three(tmp_path)

    assert await missing_from(snapshot, "state.db", random.Random(seed)) == []


async def test_the_proof_sees_what_a_power_failure_has_taken(tmp_path: Path) -> None:
    snapshot = await snapshot_of_three(tmp_path)
    too_much = Acknowledged(frozenset("abcd"), {"b": b"another", "c": b"never"})

    missing = await missing_from(snapshot._replace(early=snapshot.late, late=too_much), "state.db", random.Random(1))

    for case in ("as the system has it", "tail cut", "tail torn"):
        said = {problem.partition(": ")[2] for problem in missing if problem.startswith(f"{case}:")}
        assert said == {"d was accepted", "the result of b was delivered", "the result of c was delivered"}
    assert {problem for problem in missing if problem.startswith("last")} == {
        "last transaction cut: c was accepted",
        "last transaction torn: c was accepted",
    }


async def test_the_ledger_notes_a_repeated_init_that_is_answered_differently() -> None:
    ledger = Ledger()
    answer = ReadResponse(202, {}, b"first")

    for given in (answer, answer, answer._replace(body=b"second"), answer._replace(status=409)):
        ledger.note("a", given)

    assert ledger.accepted == {"a": b"first"}
    assert ledger.differing == ["a: 202 b'second'", "a: 409 b'first'"]
