"""What every store promises (`rollout.state.store.Store`), asked of each in the list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from stores import FACTORIES, IDS, MakeStore, make_finished, make_record, make_result

from rollout.schemas import Phase, RolloutStatus
from rollout.state.store import Delivered, GivenUp, Postponed, Record, Started, Store
from rollout.wire import decode

CACHE_BYTES = 1000


@pytest.fixture(params=FACTORIES, ids=IDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    make_store: MakeStore = request.param
    store = make_store(CACHE_BYTES, tmp_path)
    await store.open()
    yield store
    await store.close()


async def must_get(store: Store, rollout_id: str) -> Record:
    record = await store.get(rollout_id)
    assert record is not None
    return record


async def end(store: Store, rollout_id: str, filling: int = 0) -> None:
    await store.create(make_record(rollout_id))
    assert await store.move(rollout_id, make_finished(rollout_id, filling)) is not None


async def deliver(store: Store, rollout_id: str, expires: float = 100.0, filling: int = 0) -> None:
    await end(store, rollout_id, filling)
    assert await store.settle(rollout_id, Delivered(at=4.0, attempts=1, expires=expires)) is not None


# ---------------------------------------------------------------- create, get


async def test_a_new_record_is_found_under_its_id_and_its_key(store: Store) -> None:
    created = await store.create(make_record("a", "key", b'[{"type":"function"}]'))

    for found in (created, await store.get("a"), await store.get("none", "key")):
        assert found is not None
        assert (found.rollout_id, found.key, found.phase, found.status) == ("a", "key", Phase.QUEUED, "STARTED")
        assert found.tools == b'[{"type":"function"}]'
        assert found.request is not None
        assert found.request.view().rollout_id == "a"
        assert found.is_live


async def test_what_is_not_there_is_none(store: Store) -> None:
    assert await store.get("a") is None
    assert await store.get("a", "a") is None
    assert await store.move("a", Started(at=1.0)) is None
    assert await store.settle("a", Delivered(at=1.0, attempts=1, expires=1.0)) is None
    assert list(store.scan()) == []
    assert store.tally().records == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a", None), ("a", None)),
        (("a", "k"), ("a", "k")),
        (("a", "k"), ("a", "other")),
        (("a", "k"), ("b", "k")),
        (("a", None), ("b", "a")),
        (("a", "k"), ("k", None)),
        (("a", "k"), ("k", "k")),
    ],
    ids=str,
)
async def test_an_id_and_a_key_are_given_once(
    store: Store, first: tuple[str, str | None], second: tuple[str, str | None]
) -> None:
    await store.create(make_record(*first, tools=b"[1]"))

    held = await store.create(make_record(*second, tools=b"[2]"))

    assert (held.rollout_id, held.tools) == (first[0], b"[1]")
    assert store.tally().records == 1


@pytest.mark.parametrize(
    ("first", "second"), [(("a", "k"), ("b", "j")), (("a", "k"), ("b", "a")), (("a", "k"), ("b", None))]
)
async def test_other_ids_and_keys_do_not_meet(
    store: Store, first: tuple[str, str | None], second: tuple[str, str | None]
) -> None:
    await store.create(make_record(*first))

    created = await store.create(make_record(*second))

    assert created.rollout_id == second[0]
    assert store.tally().records == 2


async def test_of_many_that_create_at_once_one_wins(store: Store) -> None:
    held = await asyncio.gather(*(store.create(make_record("a", tools=b"[%d]" % i)) for i in range(20)))

    assert len({record.tools for record in held}) == 1
    assert store.tally().records == 1


@pytest.mark.parametrize("rollout_id", ["ü😀", "a'b\"c", "%_*?[", "../../x", "x" * 256, "line\nbreak", "\x00", "Ａ"])
async def test_an_id_is_any_text(store: Store, rollout_id: str) -> None:
    await store.create(make_record(rollout_id))

    assert (await must_get(store, rollout_id)).rollout_id == rollout_id
    assert await store.get(rollout_id + "x") is None
    assert [record.rollout_id for record in store.scan(rollout_id[:3])] == [rollout_id]


# ---------------------------------------------------------------- move


async def test_a_rollout_starts_once(store: Store) -> None:
    await store.create(make_record("a"))

    started = await store.move("a", Started(at=2.0))

    assert started is not None
    assert (started.phase, started.status, started.started_at) == (Phase.RUNNING, "STARTED", 2.0)
    assert await store.move("a", Started(at=9.0)) is None
    assert (await must_get(store, "a")).started_at == 2.0


@pytest.mark.parametrize("starts", [False, True])
async def test_the_first_end_wins(store: Store, starts: bool) -> None:
    await store.create(make_record("a"))
    if starts:
        await store.move("a", Started(at=2.0))

    first = await store.move("a", make_finished("a", 5, RolloutStatus.ERROR))
    second = await store.move("a", make_finished("a", 50))

    assert first is not None
    assert second is None
    record = await must_get(store, "a")
    assert (record.phase, record.status, record.turn, record.finished_at) == (Phase.DELIVERING, "ERROR", 2, 3.0)
    assert record.result == make_result("a", 5)
    assert not record.is_live
    assert await store.move("a", Started(at=9.0)) is None


async def test_of_many_that_finish_at_once_one_wins(store: Store) -> None:
    await store.create(make_record("a"))

    moved = await asyncio.gather(*(store.move("a", make_finished("a", i)) for i in range(20)))

    assert sum(record is not None for record in moved) == 1


async def test_the_end_keeps_what_the_delivery_needs_and_drops_the_request(store: Store) -> None:
    await end(store, "a")

    record = await must_get(store, "a")

    assert record.request is None
    assert record.canonical == make_finished("a").canonical
    assert record.callback is not None
    assert (record.callback.url, record.callback.api_key) == ("http://trainer/v1/rollout/completed", "key")
    assert (record.give_up, record.attempts, record.expires) == (500.0, 0, None)


# ---------------------------------------------------------------- claim, settle


async def test_a_finished_record_is_claimed_by_who_finished_it(store: Store) -> None:
    await end(store, "a")

    due = await store.claim(float("inf"), 10)

    assert (due.records, due.next_due) == ([], None)


async def test_what_is_postponed_is_claimed_when_it_is_due_and_once(store: Store) -> None:
    await end(store, "a")
    settled = await store.settle("a", Postponed(attempts=1, error="refused", due=50.0))

    early, at_time, again = [await store.claim(now, 10) for now in (49.9, 50.0, 60.0)]

    assert settled is not None
    assert (settled.attempts, settled.last_error, settled.phase) == (1, "refused", Phase.DELIVERING)
    assert (early.records, early.next_due) == ([], 50.0)
    assert [(r.rollout_id, r.attempts, r.result) for r in at_time.records] == [("a", 1, make_result("a"))]
    assert at_time.next_due is None
    assert (again.records, again.next_due) == ([], None)


async def test_claims_come_earliest_first_and_not_more_than_asked_for(store: Store) -> None:
    for name, due in (("c", 30.0), ("a", 10.0), ("d", 40.0), ("b", 20.0)):
        await end(store, name)
        await store.settle(name, Postponed(attempts=1, error="", due=due))

    first = await store.claim(35.0, 2)
    second = await store.claim(35.0, 2)

    assert [record.rollout_id for record in first.records] == ["a", "b"]
    assert first.next_due == 30.0
    assert [record.rollout_id for record in second.records] == ["c"]
    assert second.next_due == 40.0


async def test_two_that_claim_at_once_share(store: Store) -> None:
    for i in range(10):
        await end(store, f"r{i}")
        await store.settle(f"r{i}", Postponed(attempts=1, error="", due=1.0))

    claims = await asyncio.gather(*(store.claim(1.0, 3) for _ in range(5)))

    claimed = [record.rollout_id for due in claims for record in due.records]
    assert sorted(claimed) == sorted(f"r{i}" for i in range(10))


async def test_a_delivered_record_says_so_and_keeps_its_result(store: Store) -> None:
    await deliver(store, "a")

    record = await must_get(store, "a")

    assert (record.phase, record.delivered_at, record.attempts, record.expires) == (Phase.DELIVERED, 4.0, 1, 100.0)
    assert (record.result, record.result_held, record.last_error) == (make_result("a"), True, None)
    assert record.callback is None


async def test_a_given_up_record_says_why_and_keeps_its_result(store: Store) -> None:
    await end(store, "a")

    await store.settle("a", GivenUp(attempts=3, error="404", expires=100.0))

    record = await must_get(store, "a")
    assert (record.phase, record.delivered_at, record.attempts, record.last_error) == (
        Phase.UNDELIVERED,
        None,
        3,
        "404",
    )
    assert (record.result, record.expires) == (make_result("a"), 100.0)
    assert record.callback == make_finished("a").callback


@pytest.mark.parametrize(
    "settlement",
    [
        Delivered(at=9.0, attempts=9, expires=9.0),
        GivenUp(attempts=9, error="x", expires=9.0),
        Postponed(attempts=9, error="x", due=1.0),
    ],
    ids=lambda settlement: type(settlement).__name__,
)
async def test_only_what_is_being_delivered_is_settled(store: Store, settlement: Any) -> None:
    await store.create(make_record("live"))
    await deliver(store, "done")

    assert await store.settle("live", settlement) is None
    assert await store.settle("done", settlement) is None

    assert (await must_get(store, "live")).attempts == 0
    assert (await must_get(store, "done")).attempts == 1
    assert (await store.claim(float("inf"), 10)).records == []


# ---------------------------------------------------------------- the result cache


async def test_delivered_results_are_dropped_oldest_first(store: Store) -> None:
    for name in ("a", "b", "c"):
        await deliver(store, name, filling=300)

    records = [await must_get(store, name) for name in ("a", "b", "c")]

    assert [record.result_held for record in records] == [False, True, True]
    assert records[1].result == make_result("b", 300)
    assert store.tally().held_bytes == 2 * len(make_result("b", 300)) <= CACHE_BYTES


async def test_of_a_dropped_result_the_outcome_stays(store: Store) -> None:
    await deliver(store, "a", filling=CACHE_BYTES)

    record = await must_get(store, "a")

    assert record.result is not None
    fields = decode(record.result)
    assert (fields["status"], fields["reward"], fields["rollout_id"]) == ("COMPLETED", 0.5, "a")
    assert (fields["final_messages"], fields["extra_fields"]) == (None, None)
    assert (record.result_held, store.tally().held_bytes) == (False, 0)


async def test_results_that_were_never_delivered_are_not_dropped(store: Store) -> None:
    await end(store, "a", filling=CACHE_BYTES)
    await store.settle("a", GivenUp(attempts=1, error="", expires=100.0))
    await end(store, "b", filling=CACHE_BYTES)

    assert (await must_get(store, "a")).result_held
    assert (await must_get(store, "b")).result_held
    assert store.tally().owed_bytes == len(make_result("a", CACHE_BYTES)) + len(make_result("b", CACHE_BYTES))


# ---------------------------------------------------------------- expire


async def test_what_has_expired_is_forgotten_earliest_first_and_not_more_than_asked_for(store: Store) -> None:
    for i in range(5):
        await deliver(store, f"r{i}", expires=100.0 + i)

    gone = [await store.expire(now, limit) for now, limit in ((99.9, 10), (104.0, 2), (103.0, 10), (104.0, 10))]

    assert gone == [0, 2, 2, 1]
    assert store.tally().records == 0


async def test_what_has_not_settled_never_expires(store: Store) -> None:
    await store.create(make_record("queued"))
    await store.create(make_record("running"))
    await store.move("running", Started(at=1.0))
    await end(store, "delivering")
    await end(store, "postponed")
    await store.settle("postponed", Postponed(attempts=1, error="", due=1.0))

    assert await store.expire(float("inf"), 10) == 0
    assert store.tally().records == 4


async def test_a_forgotten_id_and_key_can_be_given_again(store: Store) -> None:
    await store.create(make_record("a", "k"))
    await store.move("a", make_finished("a"))
    await store.settle("a", Delivered(at=1.0, attempts=1, expires=10.0))

    assert await store.expire(10.0, 10) == 1

    assert await store.get("a", "k") is None
    assert (await store.create(make_record("b", "k"))).rollout_id == "b"
    assert (await store.create(make_record("a"))).phase is Phase.QUEUED


async def test_a_due_time_of_a_forgotten_record_means_nothing_to_its_successor(store: Store) -> None:
    await end(store, "a")
    await store.settle("a", Postponed(attempts=1, error="", due=50.0))
    await store.settle("a", Delivered(at=1.0, attempts=2, expires=10.0))
    await store.expire(10.0, 10)
    await end(store, "a")

    assert (await store.claim(60.0, 10)).records == []


# ---------------------------------------------------------------- scan, tally


async def test_a_scan_finds_what_is_not_settled_by_the_start_of_the_id_and_by_being_live(store: Store) -> None:
    await deliver(store, "abd")
    for name in ("ab", "abc", "b", "a%", "aXc"):
        await store.create(make_record(name))
    await store.move("abc", make_finished("abc"))

    assert sorted(record.rollout_id for record in store.scan("ab")) == ["ab", "abc"]
    assert sorted(record.rollout_id for record in store.scan("ab", live=True)) == ["ab"]
    assert sorted(record.rollout_id for record in store.scan("a%")) == ["a%"]
    assert len(list(store.scan())) == 5
    assert len(list(store.scan(live=True))) == 4


async def test_a_scan_is_not_disturbed_by_what_changes_meanwhile(store: Store) -> None:
    for i in range(5):
        await store.create(make_record(f"r{i}"))

    seen = []
    for record in store.scan("r", live=True):
        seen.append(record.rollout_id)
        await store.move(record.rollout_id, make_finished(record.rollout_id))
        await store.create(make_record(f"s{record.rollout_id}"))

    assert sorted(seen) == [f"r{i}" for i in range(5)]


async def test_the_tally_is_one_object_that_is_always_true(store: Store) -> None:
    tally = store.tally()
    await store.create(make_record("a"))
    await store.create(make_record("b"))
    assert (tally.live, tally.by_phase[Phase.QUEUED], tally.by_status[RolloutStatus.STARTED]) == (2, 2, 2)

    await store.move("a", Started(at=1.0))
    assert (tally.live, tally.by_phase[Phase.QUEUED], tally.by_phase[Phase.RUNNING]) == (2, 1, 1)

    await store.move("a", make_finished("a"))
    size = len(make_result("a"))
    assert (tally.live, tally.by_phase[Phase.DELIVERING], tally.owed_bytes, tally.held_bytes) == (1, 1, size, 0)

    await store.settle("a", Delivered(at=1.0, attempts=1, expires=10.0))
    assert (tally.by_phase[Phase.DELIVERED], tally.owed_bytes, tally.held_bytes) == (1, 0, size)

    await store.expire(10.0, 10)
    assert (tally.records, tally.live, tally.held_bytes) == (1, 1, 0)
    assert store.tally() is tally


async def test_a_given_up_result_is_owed_until_it_is_forgotten(store: Store) -> None:
    await end(store, "a")
    await store.settle("a", GivenUp(attempts=1, error="", expires=10.0))
    assert store.tally().owed_bytes == len(make_result("a"))

    await store.expire(10.0, 10)

    assert store.tally().owed_bytes == 0
