"""The registry: who leads an admission, who waits for it, and who waits for an end."""

from __future__ import annotations

import asyncio

import pytest
from stores import make_init, make_result

from rollout.errors import Conflict, GetToolsFailed, RequestError, RequestRejected, ServiceUnavailable
from rollout.requests import InitRequest
from rollout.schemas import Phase, RolloutStatus
from rollout.state.memory import MemoryStore
from rollout.state.registry import Admission, Registry, init_answer
from rollout.state.store import Callback, Delivered, GivenUp
from rollout.testing import FakeClock
from rollout.tracing import TraceContext
from rollout.wire import decode, digest


def make_registry() -> Registry:
    return Registry(
        MemoryStore(10_000),
        capacity=3,
        owed_limit_bytes=1000,
        ttl_seconds=60.0,
        horizon_seconds=30.0,
        clock=FakeClock(),
        wall_clock=lambda: 7.0,
    )


@pytest.fixture
def registry() -> Registry:
    return make_registry()


async def accept(registry: Registry, request: InitRequest) -> None:
    admission, leads = registry.enter(request)
    assert leads
    await registry.admit(admission, b"[]")
    registry.leave(admission)


async def finish(registry: Registry, rollout_id: str, filling: int = 0) -> None:
    done = await registry.finish(rollout_id, RolloutStatus.COMPLETED, make_result(rollout_id, filling))
    assert done is not None


# ---------------------------------------------------------------- admissions in progress


async def test_whoever_comes_first_leads_and_all_get_its_answer(registry: Registry) -> None:
    request = make_init(rollout_id="a")
    leader, leads = registry.enter(request)
    followers = [registry.enter(request) for _ in range(3)]
    waiting = [asyncio.create_task(admission.wait()) for admission, _ in followers]
    await asyncio.sleep(0)

    leader.resolve(b"answer")
    registry.leave(leader)

    assert leads
    assert followers == [(leader, False)] * 3
    assert [await task for task in waiting] == [b"answer"] * 3
    assert await leader.wait() == b"answer"
    assert registry.enter(request)[1]


async def test_a_follower_that_is_cancelled_disturbs_nobody(registry: Registry) -> None:
    admission, _ = registry.enter(make_init(rollout_id="a"))
    one, other = asyncio.create_task(admission.wait()), asyncio.create_task(admission.wait())
    await asyncio.sleep(0)

    one.cancel()
    await asyncio.wait([one])
    admission.resolve(b"answer")

    assert one.cancelled()
    assert await other == b"answer"


class Oversized(RequestRejected):
    """An error that a user wrote, whose arguments are not those of its parent."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"{size} is more than {limit}")


@pytest.mark.parametrize(
    "error",
    [
        GetToolsFailed("raised"),
        Conflict("taken", "key_in_use"),
        ServiceUnavailable("full", "queue_full", 3),
        Oversized(2, 1),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_all_get_the_same_error(registry: Registry, error: RequestError) -> None:
    admission, _ = registry.enter(make_init(rollout_id="a"))
    waiting = [asyncio.create_task(admission.wait()) for _ in range(2)]
    await asyncio.sleep(0)

    admission.resolve(None, error)

    for task in waiting:
        with pytest.raises(type(error)) as raised:
            await task
        assert (raised.value.code, raised.value.detail) == (error.code, error.detail)
        assert raised.value.headers == error.headers


async def test_a_failure_that_nobody_waits_for_is_silent_and_the_first_word_counts() -> None:
    admission = Admission(make_init(), b"")

    admission.resolve(None, GetToolsFailed("first"))
    admission.resolve(b"second")

    with pytest.raises(GetToolsFailed, match="first"):
        await admission.wait()


async def test_a_cancel_reaches_an_admission_that_is_not_answered(registry: Registry) -> None:
    admission, _ = registry.enter(make_init(rollout_id="ab"))

    assert registry.admitting("a") == ["ab"]
    assert registry.admitting("b") == []
    assert registry.cancel_admission("ab")
    assert not registry.cancel_admission("other")
    assert admission.cancelled

    registry.leave(admission)
    assert not registry.cancel_admission("ab")


@pytest.mark.parametrize("known", ["admitting", "recorded", "settled"])
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"rollout_id": "b", "idempotency_key": "k"}, "key_in_use"),
        ({"rollout_id": "k"}, "key_in_use"),
        ({"rollout_id": "a"}, "id_in_use"),
        ({"rollout_id": "a", "idempotency_key": "other"}, "id_in_use"),
        ({"rollout_id": "a", "idempotency_key": "k", "messages": [{"n": True}]}, "body_differs"),
    ],
    ids=str,
)
async def test_an_id_or_key_that_is_in_use_is_refused(
    registry: Registry, known: str, fields: dict[str, str], code: str
) -> None:
    request = make_init(rollout_id="a", idempotency_key="k", messages=[{"n": 1}])
    first, _ = registry.enter(request)
    if known != "admitting":
        await registry.admit(first, b"[]")
        registry.leave(first)
    if known == "settled":
        await finish(registry, "a")
        await registry.store.settle("a", Delivered(at=1.0, attempts=1, expires=registry.expiry()))

    with pytest.raises(Conflict) as refused:
        await registry.known(registry.enter(make_init(**fields))[0])

    assert refused.value.code == code


@pytest.mark.parametrize("known", ["admitting", "recorded", "settled"])
async def test_the_same_messages_in_another_spelling_are_the_same_request(registry: Registry, known: str) -> None:
    first, _ = registry.enter(make_init(rollout_id="a", messages=[{"n": 1, "m": "é"}]))
    if known != "admitting":
        await registry.admit(first, b"[]")
        registry.leave(first)
    if known == "settled":
        await finish(registry, "a")

    again, leads = registry.enter(make_init(rollout_id="a", messages=[{"m": "é", "n": 1.0}], max_turns=3))

    assert leads is (known != "admitting")
    assert again is first or await registry.known(again) is not None


# ---------------------------------------------------------------- room


async def test_room_is_counted_while_records_are_created(registry: Registry) -> None:
    for name in ("a", "b", "c"):
        registry.check_room()
        await accept(registry, make_init(rollout_id=name))

    with pytest.raises(ServiceUnavailable) as full:
        registry.check_room()
    await finish(registry, "a")
    registry.check_room()

    assert (full.value.code, full.value.headers["Retry-After"]) == ("queue_full", "1")


async def test_an_admission_that_finds_no_room_leaves_no_trace(registry: Registry) -> None:
    for name in ("a", "b", "c"):
        await accept(registry, make_init(rollout_id=name))
    admission, _ = registry.enter(make_init(rollout_id="d"))

    with pytest.raises(ServiceUnavailable):
        await registry.admit(admission, b"[]")

    assert await registry.get("d") is None


async def test_results_that_nobody_took_close_the_door_until_they_are_delivered(registry: Registry) -> None:
    await accept(registry, make_init(rollout_id="a"))
    await finish(registry, "a", filling=1000)

    with pytest.raises(ServiceUnavailable) as full:
        registry.check_room()
    await registry.store.settle("a", Delivered(at=1.0, attempts=1, expires=registry.expiry()))
    registry.check_room()

    assert full.value.code == "results_full"


async def test_a_given_up_result_goes_on_to_close_the_door(registry: Registry) -> None:
    await accept(registry, make_init(rollout_id="a"))
    await finish(registry, "a", filling=1000)
    await registry.store.settle("a", GivenUp(attempts=1, error="", expires=registry.expiry()))

    with pytest.raises(ServiceUnavailable, match="bytes of results wait"):
        registry.check_room()


async def test_a_drain_refuses_what_is_new_only(registry: Registry) -> None:
    request = make_init(rollout_id="a")
    await accept(registry, request)
    assert not registry.draining

    registry.begin_drain()

    assert registry.draining
    assert await registry.known(registry.enter(request)[0]) is not None
    with pytest.raises(ServiceUnavailable) as refused:
        registry.check_room()
    assert refused.value.code == "draining"


# ---------------------------------------------------------------- records


async def test_a_record_knows_what_the_delivery_will_need(registry: Registry) -> None:
    trace = TraceContext(traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    await accept(registry, make_init(rollout_id="a", server_url="http://trainer:81/base", api_key="key"))

    record = await registry.finish("a", RolloutStatus.ERROR, b"{}", 4, trace)

    assert record is not None
    assert record.callback == Callback(url="http://trainer:81/base/v1/rollout/completed", api_key="key", trace=trace)
    assert (record.phase, record.status, record.turn, record.finished_at) == (Phase.DELIVERING, "ERROR", 4, 7.0)
    assert await registry.finish("a", RolloutStatus.COMPLETED, b"{}", 4) is None
    assert await registry.finish("nobody", RolloutStatus.COMPLETED, b"{}", 4) is None


async def test_no_key_is_shown_when_a_record_is_printed(registry: Registry) -> None:
    await accept(registry, make_init(rollout_id="a", api_key="s3cret"))
    await finish(registry, "a")
    record = await registry.get("a")

    assert record is not None
    assert "s3cret" not in repr(record) + repr(record.callback)
    assert repr(record) == "Record('a', delivering)"


async def test_the_answer_is_the_same_for_the_first_call_and_for_every_duplicate(registry: Registry) -> None:
    admission, _ = registry.enter(make_init(rollout_id='a"\\é'))
    record = await registry.admit(admission, b'[{"x":1.0}]')

    assert decode(init_answer(record)) == {"rollout_id": 'a"\\é', "tools": [{"x": 1.0}]}
    assert init_answer(record) == init_answer(await registry.admit(admission, b"[]"))
    assert record.digest == digest(bytes(admission.request.messages))


async def test_only_live_records_are_live(registry: Registry) -> None:
    for name in ("aa", "ab", "b"):
        await accept(registry, make_init(rollout_id=name))
    await registry.start("aa")
    await finish(registry, "ab")

    assert [record.rollout_id for record in registry.live("a")] == ["aa"]
    assert len(list(registry.live())) == 2


# ---------------------------------------------------------------- waiting for the end


async def test_the_end_wakes_all_that_wait_for_it_and_nobody_else(registry: Registry) -> None:
    for name in ("a", "b"):
        await accept(registry, make_init(rollout_id=name))
    waiting = [asyncio.create_task(registry.wait_end(name, 60)) for name in ("a", "a", "b")]
    await asyncio.sleep(0)

    await finish(registry, "a")
    await asyncio.wait(waiting[:2])

    assert [task.done() for task in waiting] == [True, True, False]
    registry.wake_all()
    await waiting[2]


async def test_a_wait_ends_when_its_time_is_up_and_others_go_on(registry: Registry) -> None:
    await accept(registry, make_init(rollout_id="a"))
    other = asyncio.create_task(registry.wait_end("a", 60))

    await registry.wait_end("a", 0.001)

    assert not other.done()
    await finish(registry, "a")
    await other


async def test_a_wait_that_is_cancelled_leaves_the_others_alone(registry: Registry) -> None:
    await accept(registry, make_init(rollout_id="a"))
    one, other = [asyncio.create_task(registry.wait_end("a", 60)) for _ in range(2)]
    await asyncio.sleep(0)

    one.cancel()
    await finish(registry, "a")
    await other

    assert one.cancelled()
