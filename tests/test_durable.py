"""A service over a state file: what is durable when, what a restart makes of it, and a disk that fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve
from disks import copy_state, full_disk, wait_until
from served import Held, Instant
from stores import make_init, make_record, make_sqlite
from support import Doing

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutResult
from rollout.schemas import RolloutRequest
from rollout.state.checkpoints import LARGEST_BYTES, PAUSE_SECONDS, StoredCheckpoints
from rollout.state.sqlite_reader import StateReader
from rollout.state.store import Record, Restarted
from rollout.testing import Answer, FakeClock, MockTrainer, Peer, RecordedRequest, Reply, delay, status, text

TURN = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "ok"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def left_behind(path: Path, number: int = 1) -> Path:
    """The state file as a kill at this moment leaves it, for the next service."""
    return copy_state(path, path.parent / str(number) / path.name)


def record_in(path: Path, rollout_id: str) -> Record:
    with StateReader(path) as reader:
        record = reader.get(rollout_id)
    assert record is not None
    return record


async def file_with(path: Path, *records: Record, run: int = 1) -> None:
    """A state file with these live records, in this run each."""
    store = make_sqlite(path)
    await store.open()
    for record in records:
        await store.create(record)
        await store.move(record.rollout_id, Restarted(run=run))
    await store.close()


def live_record(trainer: MockTrainer, rollout_id: str = "a", **fields: Any) -> Record:
    """A record as an admission makes it."""
    request = make_init(rollout_id=rollout_id, server_url=trainer.url, **fields)
    record = make_record(rollout_id)
    record.request, record.created_at = request, 4e9
    return record


class Resumable(Held):
    """Puts its messages in safety, then waits; a second run goes on from there at once."""

    resumable = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, Any]] = []

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        self.seen.append((ctx.run, ctx.checkpointed))
        messages = ctx.checkpointed or list(ctx.request.messages)
        messages.append((await ctx.chat(messages)).message)
        if ctx.run == 1:
            assert await ctx.checkpoint(messages)
            self.running.set()
            await self.release.wait()
        return ctx.complete(messages)


class ToolsFailLater(Instant):
    """`get_tools()` works for an init, never again."""

    resumable = True

    def get_tools(self, request: RolloutRequest) -> list[Any]:
        raise RuntimeError("the tool server is gone")


# ---------------------------------------------------------------- what is durable when


async def test_an_accepted_rollout_is_in_the_file_before_the_202_is_read(serve: Serve, path: Path) -> None:
    server = await serve(Held(), state_url=url_of(path))

    answer = await server.post_init(rollout_id="a", idempotency_key="k")

    record = record_in(left_behind(path), "a")
    assert answer.status == 202
    assert (record.key, record.is_live) == ("k", True)
    assert record.request is not None
    assert record.request.server_url == server.trainer.url


class Snapshot(Answer):
    """Copies the state file while the trainer has the callback in its hands, then acknowledges."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.copy = path

    async def play(self, peer: Peer, request: RecordedRequest, default: Reply) -> None:
        self.copy = left_behind(self._path)
        await default.play(peer, request, default)


async def test_a_result_and_its_delivery_are_in_the_file_before_the_first_attempt(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    snapshot = Snapshot(path)
    trainer.on_completed(snapshot)
    server = await serve(Instant(), state_url=url_of(path))

    await server.post_init(rollout_id="a")
    callback = await trainer.wait_completed("a")

    record = record_in(snapshot.copy, "a")
    assert (record.phase, record.result) == ("delivering", callback.body)
    assert record.callback is not None


async def test_a_delivery_is_in_the_file_when_it_shows_as_delivered(serve: Serve, path: Path) -> None:
    server = await serve(Instant(), state_url=url_of(path))
    await server.post_init(rollout_id="a")
    await server.wait_phase("a")

    record = record_in(left_behind(path), "a")

    assert (record.phase, record.attempts) == ("delivered", 1)


async def test_a_delivered_record_is_forgotten_after_its_time(serve: Serve, path: Path) -> None:
    clock = FakeClock()
    server = await serve(Instant(), state_url=url_of(path), clock=clock, cleanup_interval_seconds=0.1)
    await server.post_init(rollout_id="a")
    await server.wait_phase("a")

    clock.advance(3601)
    await wait_until(lambda: server.service.registry.store.tally().records == 0)  # the sweeper comes by itself

    assert (await server.get("/status/a")).status == 404


# ---------------------------------------------------------------- restart: interrupted


async def test_what_a_dead_process_left_is_reported_as_interrupted_once(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    first = await serve(Held(), state_url=url_of(path), max_concurrent_rollouts=1)
    for name in ("running", "queued"):
        await first.post_init(rollout_id=name)
    copy = left_behind(path)
    agent = Instant()

    second = await serve(agent, state_url=url_of(copy))
    callbacks = await trainer.wait_completed(2, accepted=True)
    for name in ("running", "queued"):
        await second.wait_phase(name)
    third = await serve(agent, state_url=url_of(left_behind(copy, 2)))

    assert {callback.json["rollout_id"] for callback in callbacks} == {"running", "queued"}
    for callback in callbacks:
        result = callback.json
        assert (result["status"], result["finish_reason"]) == ("ERROR", "interrupted")
        assert (result["error_category"], result["retryable"], result["final_messages"]) == ("interrupted", True, [])
    assert (await third.get("/status/running")).json["phase"] == "delivered"
    assert len(trainer.completions()) == 2
    assert agent.ran == []


async def test_an_interrupted_rollout_reports_the_messages_last_put_in_safety(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    running = asyncio.Event()

    async def run(ctx: RolloutContext) -> None:
        assert await ctx.checkpoint(TURN)
        running.set()
        await asyncio.Event().wait()

    first = await serve(Doing(run), state_url=url_of(path))
    await first.post_init(rollout_id="a")
    await running.wait()

    await serve(Instant(), state_url=url_of(left_behind(path)))

    assert (await trainer.wait_completed("a")).json["final_messages"] == TURN


async def test_each_turn_is_put_in_safety_where_the_setting_says_so(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    running = asyncio.Event()

    async def run(ctx: RolloutContext) -> None:
        await ctx.chat(TURN[:1])
        running.set()
        await asyncio.Event().wait()

    first = await serve(Doing(run), state_url=url_of(path), checkpoint_turns=True)
    await first.post_init(rollout_id="a")
    await running.wait()

    await serve(Instant(), state_url=url_of(left_behind(path)))

    assert (await trainer.wait_completed("a")).json["final_messages"] == TURN


async def test_a_rollout_that_has_seen_three_processes_die_is_ended(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    await file_with(path, live_record(trainer), run=3)
    agent = Instant()

    server = await serve(agent, state_url=url_of(path), resume_rollouts=True)

    assert (await trainer.wait_completed("a")).json["finish_reason"] == "interrupted"
    assert agent.ran == []
    assert (await server.wait_phase("a"))["run"] == 3


async def test_a_deadline_that_passed_meanwhile_ends_the_rollout(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    record = live_record(trainer, timeout_seconds=5)
    record.created_at = 1.0
    await file_with(path, record)
    agent = Instant()

    await serve(agent, state_url=url_of(path), resume_rollouts=True)

    assert (await trainer.wait_completed("a")).json["finish_reason"] == "timeout"
    assert agent.ran == []


async def test_a_rollout_whose_tools_cannot_be_had_again_is_interrupted(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    await file_with(path, live_record(trainer))

    await serve(ToolsFailLater(), state_url=url_of(path))

    assert (await trainer.wait_completed("a")).json["finish_reason"] == "interrupted"


# ---------------------------------------------------------------- restart: run again


async def test_a_resumable_agent_goes_on_from_its_checkpoint(serve: Serve, trainer: MockTrainer, path: Path) -> None:
    trainer.on_chat([text("one"), text("two")])
    first = await serve(Resumable(), state_url=url_of(path))
    await first.post_init(rollout_id="a")
    await first.service.agent.running.wait()
    agent = Resumable()

    second = await serve(agent, state_url=url_of(left_behind(path)))
    result = (await trainer.wait_completed("a")).json
    state = await second.wait_phase("a")

    [(run, checkpointed)] = agent.seen
    assert run == 2
    assert [message["content"] for message in result["final_messages"][-2:]] == ["one", "two"]
    assert result["final_messages"][:-1] == checkpointed[:-1]
    assert (result["status"], state["run"]) == ("COMPLETED", 2)
    first_key, second_key = [chat.headers["Idempotency-Key"] for chat in trainer.chats("a")]
    assert first_key != second_key
    assert len(trainer.completions("a")) == 1


async def test_the_setting_runs_any_agent_again_with_its_whole_request(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    first = await serve(Held(), state_url=url_of(path))
    fields = {"metadata": {"n": [1, None, "ü"]}, "completion_params": {"seed": 7}, "max_turns": 3, "api_key": "secret"}
    await first.post_init(rollout_id="a", **fields)
    agent = Instant()

    await serve(agent, state_url=url_of(left_behind(path)), resume_rollouts=True)
    callback = await trainer.wait_completed("a")

    [request] = agent.requests
    assert {name: getattr(request, name) for name in fields} == fields
    assert (callback.json["status"], callback.bearer) == ("COMPLETED", "secret")


async def test_a_first_run_does_not_show_its_number(serve: Serve, path: Path) -> None:
    server = await serve(Instant(), state_url=url_of(path))
    await server.post_init(rollout_id="a")

    assert "run" not in await server.wait_phase("a")


async def test_runs_are_counted_from_one_process_to_the_next(serve: Serve, path: Path) -> None:
    server = await serve(Held(), state_url=url_of(path))
    await server.post_init(rollout_id="a")
    for number in (1, 2):
        path = left_behind(path, number)
        server = await serve(Held(), state_url=url_of(path), resume_rollouts=True)

        assert (await server.get("/status/a")).json["run"] == number + 1


# ---------------------------------------------------------------- restart: deliveries, duplicates, questions


async def test_a_due_delivery_goes_on_with_the_same_bytes(serve: Serve, trainer: MockTrainer, path: Path) -> None:
    trainer.on_completed(status(503, retry_after=200), times=1)
    first = await serve(Instant(), state_url=url_of(path))
    await first.post_init(rollout_id="a")
    await wait_until(lambda: first.service.metrics.deliveries.value("retried") == 1)
    await first.service.registry.store.expire(0.0, 0)  # what was written down before, without waiting, is there now

    second = await serve(Instant(), state_url=url_of(left_behind(path)))
    before, after = await trainer.wait_completed(2)

    assert before.body == after.body
    assert before.headers["Idempotency-Key"] == after.headers["Idempotency-Key"]
    assert (await second.wait_phase("a"))["delivery_attempts"] == 2


async def test_a_duplicate_after_the_restart_gets_the_first_answer(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    agent = Doing(lambda ctx: ctx.complete([]), TOOLS)
    first = await serve(agent, state_url=url_of(path))
    request = {"rollout_id": "a", "idempotency_key": "k"}
    answer = await first.post_init(**request)
    await first.wait_phase("a")

    second = await serve(Instant(), state_url=url_of(left_behind(path)))
    again = await second.post_init(**request)

    assert (again.status, again.body) == (202, answer.body)
    assert again.json["tools"] == TOOLS
    assert len(trainer.completions("a")) == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"rollout_id": "b"}, "key_in_use"),
        ({"idempotency_key": "other"}, "id_in_use"),
        ({"messages": [{"role": "user", "content": "other"}]}, "body_differs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_taken_is_taken_after_the_restart(
    serve: Serve, path: Path, fields: dict[str, Any], code: str
) -> None:
    request = {"rollout_id": "a", "idempotency_key": "k"}
    first = await serve(Instant(), state_url=url_of(path))
    await first.post_init(**request)
    await first.wait_phase("a")
    second = await serve(Instant(), state_url=url_of(left_behind(path)))

    answer = await second.post_init(**{**request, **fields})

    assert (answer.status, answer.json["code"]) == (409, code)


async def test_status_and_result_answer_for_the_time_before_the_restart(serve: Serve, path: Path) -> None:
    first = await serve(Doing(lambda ctx: ctx.complete(TURN, reward=0.5)), state_url=url_of(path))
    await first.post_init(rollout_id="a")
    before, result = await first.wait_phase("a"), await first.get("/result/a")

    second = await serve(Instant(), state_url=url_of(left_behind(path)))

    assert (await second.get("/status/a")).json == before
    assert (await second.get("/result/a")).body == result.body
    assert (await second.cancel(ids=["a"])) == {"a": "finished"}
    assert (await second.get("/health")).json["completed_rollouts"] == 1


# ---------------------------------------------------------------- checkpoints


@contextlib.asynccontextmanager
async def checkpoints_of(path: Path, clock: FakeClock) -> AsyncIterator[StoredCheckpoints]:
    store = make_sqlite(path)
    await store.open()
    await store.create(make_record("a"))
    try:
        yield StoredCheckpoints(store, "a", every_turn=False, clock=clock)
    finally:
        await store.close()


async def test_checkpoints_are_bounded_in_rate(path: Path) -> None:
    clock = FakeClock()
    async with checkpoints_of(path, clock) as checkpoints:
        stored = []
        for seconds in (0.0, PAUSE_SECONDS / 2, PAUSE_SECONDS / 2, 0.0):
            clock.advance(seconds)
            stored.append(await checkpoints.save(b"[]"))

    assert stored == [True, False, True, False]


async def test_checkpoints_are_bounded_in_size(path: Path) -> None:
    async with checkpoints_of(path, FakeClock()) as checkpoints:
        assert not await checkpoints.save(b" " * (LARGEST_BYTES + 1))
        assert await checkpoints.save(b"[]")


async def test_a_checkpoint_that_the_disk_refuses_is_no_error_for_the_agent(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with checkpoints_of(path, FakeClock()) as checkpoints:
        with full_disk():
            assert not await checkpoints.save(b"[]")

    assert "rollout 'a': a checkpoint could not be stored" in caplog.text


async def test_state_in_memory_keeps_no_checkpoints(serve: Serve) -> None:
    server = await serve(Doing(lambda ctx: _checkpoint_and_say(ctx)))
    await server.post_init(rollout_id="a")

    assert (await server.result("a"))["extra_fields"] == {"stored": False}


async def _checkpoint_and_say(ctx: RolloutContext) -> RolloutResult:
    return ctx.complete([], extra_fields={"stored": await ctx.checkpoint(TURN)})


# ---------------------------------------------------------------- a disk that fails


async def test_an_init_that_cannot_be_stored_is_refused_and_runs_nothing(serve: Serve, path: Path) -> None:
    agent = Instant()
    server = await serve(agent, state_url=url_of(path))
    with full_disk():
        refused = await server.post_init(rollout_id="a")
        health = await server.get("/health")
        metrics = (await server.get("/metrics")).body.decode()

    accepted = await server.post_init(rollout_id="a")
    await server.wait_phase("a")

    assert (refused.status, refused.json["code"]) == (503, "store_failed")
    assert "disk I/O error" in refused.json["detail"]
    assert int(refused.headers["Retry-After"]) > 0
    assert (health.status, health.json["status"]) == (503, "unhealthy")
    assert "the store fails" in health.json["reason"]
    assert "rollout_store_failing 1.0" in metrics
    assert accepted.status == 202
    assert agent.ran == ["a"]
    assert (await server.get("/health")).status == 200


async def test_a_running_rollout_goes_on_and_its_result_waits_for_the_disk(
    serve: Serve, trainer: MockTrainer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Held()
    server = await serve(agent, state_url=url_of(path))
    await server.post_init(rollout_id="a")
    await agent.running.wait()
    with full_disk():
        agent.release.set()
        await wait_until(lambda: "its result waits in memory" in caplog.text)
        waiting = (await server.get("/status/a")).json
        undelivered = list(trainer.completions())

    delivered = await server.wait_phase("a")

    assert (waiting["status"], undelivered) == ("STARTED", [])
    assert (delivered["status"], delivered["delivery_attempts"]) == ("COMPLETED", 1)
    assert (await server.get("/health")).status == 200


async def test_a_delivery_that_cannot_be_noted_is_noted_later_and_not_made_twice(
    serve: Serve, trainer: MockTrainer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.state.outbox.STORE_PAUSE_SECONDS", 0.01)
    trainer.on_completed(delay(0.05))
    server = await serve(Instant(), state_url=url_of(path))
    await server.post_init(rollout_id="a")
    await trainer.wait_completed("a")
    with full_disk():
        await wait_until(lambda: server.service.registry.store.failure is not None)
        state = (await server.get("/status/a")).json

    await server.wait_phase("a")

    assert state["phase"] == "delivering"
    assert len(trainer.completions("a")) == 1


async def test_questions_are_answered_while_the_disk_is_full(serve: Serve, path: Path) -> None:
    server = await serve(Instant(), state_url=url_of(path))
    await server.post_init(rollout_id="a")
    await server.wait_phase("a")
    with full_disk():
        await server.post_init(rollout_id="b")
        answers = [await server.get(question) for question in ("/status/a", "/result/a", "/status", "/status/b")]
        duplicate = await server.post_init(rollout_id="a")

    assert [answer.status for answer in answers] == [200, 200, 200, 404]
    assert "disk I/O error" in answers[2].json["store"]["failure"]
    assert duplicate.status == 202


async def test_a_service_starts_on_a_full_disk_and_runs_nothing_that_it_cannot_count(
    serve: Serve, trainer: MockTrainer, path: Path
) -> None:
    await file_with(path, live_record(trainer))
    agent = Instant()
    with full_disk():
        server = await serve(agent, state_url=url_of(path), resume_rollouts=True)
        health = await server.get("/health")

    assert (await trainer.wait_completed("a")).json["finish_reason"] == "interrupted"
    assert health.status == 503
    assert agent.ran == []


async def test_a_result_that_never_reached_the_disk_is_interrupted_for_the_next_service(
    serve: Serve, trainer: MockTrainer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.server.service.FLUSH_SECONDS", 0.02)
    agent = Held()
    server = await serve(agent, state_url=url_of(path))
    await server.post_init(rollout_id="a")
    await agent.running.wait()
    with full_disk():
        agent.release.set()
        await server.service.stop()

    second = await serve(Instant(), state_url=url_of(path))

    assert (await trainer.wait_completed("a")).json["finish_reason"] == "interrupted"
    await second.wait_phase("a")
    assert len(trainer.completions("a")) == 1
