"""PROTOCOL section 1: every path and its answers."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import msgspec
import pytest
from conftest import Serve
from served import Chat, Held, Instant

from rollout.testing import make_request, status

BOTH = pytest.mark.parametrize("prefix", ["", "/v1/rollout"], ids=["bare", "prefixed"])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# ---------------------------------------------------------------- the paths


@BOTH
async def test_every_rollout_path_stands_bare_and_under_v1_rollout(serve: Serve, prefix: str) -> None:
    server = await serve(Instant())
    accepted = await server.post_init(rollout_id="r", path=f"{prefix}/init")
    assert accepted.status == 202
    assert accepted.json == {"rollout_id": "r", "tools": []}
    assert (await server.get(f"{prefix}/result/r?wait=5")).status == 200
    assert (await server.get(f"{prefix}/status")).status == 200
    assert (await server.get(f"{prefix}/status/r")).json["status"] == "COMPLETED"
    assert (await server.get(f"{prefix}/openapi.json")).json["openapi"].startswith("3.1")
    assert (await server.call("POST", f"{prefix}/cancel", b'{"ids":["r"]}')).json == {"dispositions": {"r": "finished"}}


@pytest.mark.parametrize("path", ["/v1/rollout/health", "/v1/rollout/metrics", "/v1/init", "/", "/init/", "/status/"])
async def test_other_paths_are_404(serve: Serve, path: str) -> None:
    server = await serve(Instant())
    answer = await server.get(path)
    assert (answer.status, answer.json["code"]) == (404, "not_found")


async def test_a_slash_too_many_is_hinted_at(serve: Serve) -> None:
    server = await serve(Instant())
    details = {path: (await server.get(path)).json["detail"] for path in ("/status/", "/nowhere", "/")}
    assert details == {
        "/status/": "no such path: paths here do not end with a slash",
        "/nowhere": "no such path",
        "/": "no such path",
    }


async def test_metrics_are_prometheus_text(serve: Serve) -> None:
    server = await serve(Instant())
    answer = await server.get("/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert b"# TYPE" in answer.body


async def test_openapi_names_every_path(serve: Serve) -> None:
    server = await serve(Instant())
    paths = (await server.get("/openapi.json")).json["paths"]
    wanted = {"/init", "/status", "/status/{rollout_id}", "/result/{rollout_id}", "/cancel", "/health", "/metrics"}
    assert {path.removeprefix("/v1/rollout") for path in paths} >= wanted


async def test_status_tells_of_the_service(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1, max_queued_rollouts=7)
    for name in ("a", "b"):
        await server.post_init(rollout_id=name)
    await agent.running.wait()
    body = (await server.get("/status")).json
    assert body["agent"] == "held"
    assert body["version"]
    assert body["uptime_seconds"] >= 0
    assert body["draining"] is False
    assert body["rollouts"]["by_state"] == {"STARTED": 2, "COMPLETED": 0, "ERROR": 0}
    assert (body["rollouts"]["by_phase"]["running"], body["rollouts"]["by_phase"]["queued"]) == (1, 1)
    assert (body["limits"]["max_concurrent_rollouts"], body["limits"]["max_queued_rollouts"]) == (1, 7)
    assert "memory" in msgspec.json.encode(body["store"]).decode()


async def test_status_of_a_rollout_is_its_state(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent)
    await server.post_init(rollout_id="r")
    await agent.running.wait()
    running = (await server.get("/status/r")).json
    assert (running["rollout_id"], running["status"], running["phase"]) == ("r", "STARTED", "running")
    assert running["created_at"] <= running["started_at"]
    assert running["created_at"].endswith("Z")
    assert "finished_at" not in running
    agent.release.set()
    await server.result("r")
    assert (await server.get("/status/r")).json["status"] == "COMPLETED"


@pytest.mark.parametrize("path", ["/status/nobody", "/result/nobody", "/result/nobody?wait=5"])
async def test_unknown_rollouts_are_404(serve: Serve, path: str) -> None:
    server = await serve(Instant())
    answer = await server.get(path)
    assert (answer.status, answer.json["code"]) == (404, "not_found")


# ---------------------------------------------------------------- ids in paths

ODD_IDS = [
    "a/b",
    "a//b",
    "/",
    "a%2Fb",
    "100%",
    "%",
    "%2e",
    "a b",
    " a ",
    "a+b",
    "\u00fcn\u00ef\u4e2d\U0001f600",
    "nul\x00",
    "line\nfeed\r",
    "{rollout_id}",
    "a?b=c#d",
    "\\..\\..",
    "...",
    "'\";<script>",
    "\u202e\ufeff",
    "e\u0301",
    "x" * 256,
]


@pytest.mark.parametrize("rollout_id", ODD_IDS, ids=ascii)
async def test_an_id_of_any_characters_is_found_by_its_percent_encoded_path(serve: Serve, rollout_id: str) -> None:
    server = await serve(Instant())
    assert (await server.post_init(rollout_id=rollout_id)).status == 202
    await server.trainer.wait_completed(rollout_id)
    path = quote(rollout_id, safe="")
    for where in ("/status", "/v1/rollout/status", "/result", "/v1/rollout/result"):
        reader, writer = await server.send_raw(
            f"GET {where}/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200"), (where, body)
        assert msgspec.json.decode(body)["rollout_id"] == rollout_id
    callback = server.trainer.completions(rollout_id)[0]
    assert callback.headers["Idempotency-Key"].isascii()


@pytest.mark.parametrize("path", ["%FF", "%ED%A0%80", "%zz", "..%2f..%2fetc%2fpasswd", "%00", "x" * 5000])
async def test_a_path_that_is_no_id_is_404(serve: Serve, path: str) -> None:
    server = await serve(Instant())
    reader, writer = await server.send_raw(
        f"GET /status/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404")
    assert b'"code":"not_found"' in answer


# ---------------------------------------------------------------- result


async def test_result_is_the_very_body_that_is_delivered(serve: Serve) -> None:
    server = await serve(Chat())
    await server.post_init(rollout_id="r")
    delivered = await server.trainer.wait_completed("r")
    answer = await server.get("/result/r")
    assert (answer.status, answer.body) == (200, delivered.body)


async def test_result_is_200_although_the_delivery_fails(serve: Serve) -> None:
    server = await serve(Instant())
    server.trainer.on_completed(status(400))
    await server.post_init(rollout_id="r")
    assert (await server.result("r"))["status"] == "COMPLETED"


async def test_result_is_202_with_the_state_until_the_rollout_is_final(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent)
    await server.post_init(rollout_id="r")
    for query in ("", "?wait=0", "?wait=0.01", "?wait="):
        answer = await server.get(f"/result/r{query}")
        assert answer.status == 202
        assert (answer.json["rollout_id"], answer.json["status"]) == ("r", "STARTED")


async def test_result_waits_for_the_end(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent)
    await server.post_init(rollout_id="r")
    await agent.running.wait()
    waiting = [asyncio.create_task(server.get("/result/r?wait=60")) for _ in range(3)]
    await server.get("/health")  # three requests that came before are being waited for now
    agent.release.set()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200, 200]


@pytest.mark.parametrize("wait", ["60.1", "61", "-1", "-0.1", "nan", "inf", "soon", "1s", "1e999", "%00", "0x1"])
async def test_a_wait_that_is_not_0_to_60_is_422(serve: Serve, wait: str) -> None:
    server = await serve(Instant())
    await server.post_init(rollout_id="r")
    answer = await server.get(f"/result/r?wait={wait}")
    assert (answer.status, answer.json["code"]) == (422, "invalid_request")


async def test_a_result_that_is_no_longer_held_is_410_and_its_state_stays(serve: Serve) -> None:
    server = await serve(Instant(), result_cache_bytes=1 << 20)
    messages = [{"role": "user", "content": "x" * 700_000}]
    for name in ("old", "new"):
        assert (await server.post_init(rollout_id=name, messages=messages)).status == 202
        await server.wait_phase(name)
    dropped = await server.get("/result/old")
    assert (dropped.status, dropped.json["code"]) == (410, "result_dropped")
    state = (await server.get("/status/old")).json
    assert (state["status"], state["finish_reason"]) == ("COMPLETED", "stop")
    assert (await server.get("/result/new")).status == 200
    assert (await server.post_init(rollout_id="old", messages=messages)).status == 202


# ---------------------------------------------------------------- cancel


async def test_cancel_tells_what_became_of_each_id(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent, max_concurrent_rollouts=1)
    agent.release.set()
    await server.post_init(rollout_id="done")
    await server.result("done")
    agent.release.clear()
    agent.running.clear()
    await server.post_init(rollout_id="running")
    await agent.running.wait()
    await server.post_init(rollout_id="queued")
    dispositions = await server.cancel(ids=["done", "running", "queued", "nobody", "queued"])
    assert dispositions == {
        "done": "finished",
        "running": "cancelled_running",
        "queued": "cancelled_queued",
        "nobody": "not_found",
    }
    for name in ("running", "queued"):
        result = await server.result(name)
        assert (result["status"], result["finish_reason"], result["error_category"]) == (
            "ERROR",
            "cancelled",
            "cancelled",
        )
    assert await server.cancel(ids=["running", "queued"]) == {"running": "finished", "queued": "finished"}
    assert [c.json["finish_reason"] for c in server.trainer.completions("running")] == ["cancelled"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"prefix": "a"}, {"a1", "a2"}),
        ({"prefix": "a1"}, {"a1"}),
        ({"prefix": "zzz"}, set()),
        ({"prefix": "*"}, set()),
        ({"all": True}, {"a1", "a2", "b"}),
        ({"ids": []}, set()),
        ({"all": True, "unknown": 1}, {"a1", "a2", "b"}),
    ],
    ids=["prefix", "whole id as prefix", "no match", "no pattern", "all", "no ids", "unknown field"],
)
async def test_prefix_and_all_list_what_was_not_finished(serve: Serve, body: dict, found: set[str]) -> None:
    agent = Held()
    server = await serve(agent)
    agent.release.set()
    await server.post_init(rollout_id="a-finished")
    await server.result("a-finished")
    agent.release.clear()
    for name in ("a1", "a2", "b"):
        await server.post_init(rollout_id=name)
    dispositions = await server.cancel(**body)
    assert set(dispositions) == found
    assert set(dispositions.values()) <= {"cancelled_running", "cancelled_queued"}
    for name in found:
        await server.result(name)
    assert await server.cancel(**{k: v for k, v in body.items() if k != "ids"} or {"ids": []}) == {}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"ids": ["a"], "all": True},
        {"ids": ["a"], "prefix": "a"},
        {"prefix": "a", "all": True},
        {"prefix": ""},
        {"all": False},
        {"all": None},
        {"all": 1},
        {"all": "true"},
        {"ids": "a"},
        {"ids": [1]},
        {"ids": None},
        {"ids": {"a": 1}},
        {"prefix": None},
        {"prefix": 1},
        {"id": "a"},
        [],
        ["a"],
        "a",
        None,
        1,
    ],
    ids=str,
)
async def test_any_other_cancel_is_422_and_cancels_nothing(serve: Serve, body: object) -> None:
    agent = Held()
    server = await serve(agent)
    await server.post_init(rollout_id="a")
    answer = await server.call("POST", "/cancel", msgspec.json.encode(body))
    assert (answer.status, answer.json["code"]) == (422, "invalid_request")
    assert (await server.get("/status/a")).json["status"] == "STARTED"


class SlowTools(Instant):
    """An async get_tools() that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def get_tools(self, request):
        self.asked.set()
        await self.answer.wait()
        return []


@pytest.mark.parametrize("body", [{"ids": ["r"]}, {"prefix": "r"}, {"all": True}], ids=["ids", "prefix", "all"])
async def test_a_cancel_before_the_init_is_answered_counts(serve: Serve, body: dict) -> None:
    agent = SlowTools()
    server = await serve(agent)
    init = asyncio.create_task(server.post_init(rollout_id="r"))
    await agent.asked.wait()
    assert await server.cancel(**body) == {"r": "cancelled_queued"}
    assert await server.cancel(**body) == {"r": "cancelled_queued"}
    agent.answer.set()
    assert (await init).status == 202
    result = await server.result("r")
    assert (result["status"], result["finish_reason"], result["error_category"]) == ("ERROR", "cancelled", "cancelled")
    assert agent.ran == []
    assert (await server.trainer.wait_completed("r")).json == result


async def test_a_duplicate_init_under_way_does_not_make_a_finished_rollout_cancellable(serve: Serve) -> None:
    agent = SlowTools()
    agent.answer.set()
    server = await serve(agent)
    request = make_request(rollout_id="r", server_url=server.trainer.url)
    await server.post_init(request)
    before = await server.result("r")
    answers = await asyncio.gather(
        *(server.post_init(request) if n % 2 else server.cancel(ids=["r"]) for n in range(40))
    )
    assert [a for a in answers if isinstance(a, dict) and a != {"r": "finished"}] == []
    assert await server.result("r") == before


# ---------------------------------------------------------------- health


async def test_health_counts_rollouts(serve: Serve) -> None:
    agent = Held()
    server = await serve(agent)
    await server.post_init(rollout_id="a")
    await agent.running.wait()
    answer = await server.get("/health")
    assert answer.status == 200
    body = answer.json
    assert (body["status"], body["agent_loop"]) == ("healthy", "held")
    assert (body["active_rollouts"], body["completed_rollouts"]) == (1, 0)
    agent.release.set()
    await server.result("a")
    body = (await server.get("/health")).json
    assert (body["active_rollouts"], body["completed_rollouts"]) == (0, 1)


async def test_health_says_draining_with_503(serve: Serve) -> None:
    server = await serve(Instant())
    server.service.registry.begin_drain()
    answer = await server.get("/health")
    assert (answer.status, answer.json["status"]) == (503, "draining")
    assert (await server.get("/status")).json["draining"] is True
    refused = await server.post_init()
    assert (refused.status, refused.json["code"]) == (503, "draining")
    assert int(refused.headers["Retry-After"]) >= 1


async def test_health_names_the_background_task_that_died(serve: Serve) -> None:
    server = await serve(Instant())
    task = server.service.sweeper.task
    assert task is not None
    task.cancel()
    await asyncio.wait([task])
    answer = await server.get("/health")
    assert answer.status == 503
    assert "sweeper" in answer.json["reason"]
    server.service.sweeper.task = None  # it was taken down by the test: nothing to wait for at the end


async def test_platform_health_is_404_without_a_configured_key(serve: Serve) -> None:
    server = await serve(Instant())
    assert (await server.get("/platform/health")).status == 404
    assert (await server.get("/platform/health", headers=bearer("any"))).status == 404


async def test_platform_health_needs_the_key(serve: Serve) -> None:
    server = await serve(Instant(), api_key="secret")
    assert (await server.get("/platform/health")).status == 401
    assert (await server.get("/platform/health", headers=bearer("wrong"))).status == 401
    answer = await server.get("/platform/health", headers=bearer("secret"))
    assert (answer.status, answer.json["status"]) == (200, "healthy")
    assert (await server.get("/health")).status == 200
