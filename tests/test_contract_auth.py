"""PROTOCOL section 1: the key, and the application inside another one."""

from __future__ import annotations

import io

import msgspec
import pytest
from aiohttp import ClientSession, web
from conftest import Serve
from served import Chat, Instant, listening, settings_with

from rollout.server.app import SERVICE, create_app
from rollout.testing import MockTrainer, hold, make_request, post_init

JSON = {"Content-Type": "application/json"}
KEY = "k3y-\u00fc-secret"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# ---------------------------------------------------------------- the key

PROTECTED = [
    ("POST", "/init"),
    ("POST", "/v1/rollout/init"),
    ("GET", "/status"),
    ("GET", "/status/r"),
    ("GET", "/result/r"),
    ("POST", "/v1/rollout/cancel"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/platform/health"),
    ("GET", "/no/such/path"),
    ("DELETE", "/init"),
    ("HEAD", "/status"),
    ("GET", "/health/"),
    ("GET", "/v1/rollout/health"),
]


@pytest.mark.parametrize(("method", "path"), PROTECTED, ids=str)
async def test_every_path_but_health_needs_the_key(serve: Serve, method: str, path: str) -> None:
    server = await serve(Instant(), api_key="secret")
    answer = await server.call(method, path, b"{not json" if method == "POST" else None)
    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.headers["X-Request-ID"]
    if method != "HEAD":
        assert answer.json["code"] == "unauthorized"
        assert "secret" not in answer.body.decode()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
async def test_health_never_needs_the_key(serve: Serve, method: str) -> None:
    server = await serve(Instant(), api_key="secret")
    answer = await server.call(method, "/health", headers=bearer("wrong"))
    assert answer.status == (200 if method in ("GET", "HEAD") else 405)


@pytest.mark.parametrize(
    "header",
    ["Bearer secret", "bearer secret", "BEARER secret", "bEaReR secret", "Bearer  secret"],
)
async def test_the_scheme_is_case_insensitive(serve: Serve, header: str) -> None:
    server = await serve(Instant(), api_key="secret")
    assert (await server.get("/status", headers={"Authorization": header})).status == 200


@pytest.mark.parametrize(
    "header",
    [
        "secret",
        "Bearer",
        "Bearer ",
        "Bearersecret",
        "Basic secret",
        "Token secret",
        "Bearer Secret",
        "Bearer secre",
        "Bearer secret2",
        "Bearer secret, Bearer secret",
        "Bearer Bearer secret",
        "Bearer \u00e9",
        'Bearer "secret"',
        "Bearer\tsecret\t",
    ],
    ids=ascii,
)
async def test_any_other_authorization_is_401(serve: Serve, header: str) -> None:
    server = await serve(Instant(), api_key="secret")
    answer = await server.get("/status", headers={"Authorization": header})
    assert (answer.status, answer.json["code"]) == (401, "unauthorized")


async def test_two_authorization_headers_are_401(serve: Serve) -> None:
    server = await serve(Instant(), api_key="secret")
    headers = [("Authorization", "Bearer secret"), ("Authorization", "Bearer wrong")]
    assert (await server.get("/status", headers=headers)).status == 401


async def test_a_key_that_is_not_ascii_is_compared_as_bytes(serve: Serve) -> None:
    server = await serve(Instant(), api_key=KEY)
    for token, expected in ((KEY.encode(), b"200"), (b"k3y-\xfc-secret", b"401"), (b"\xff\xfe", b"401")):
        reader, writer = await server.send_raw(
            b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 " + expected)


async def test_a_key_in_the_query_does_not_count(serve: Serve) -> None:
    server = await serve(Instant(), api_key="secret")
    assert (await server.get("/status?api_key=secret&access_token=secret")).status == 401


@pytest.mark.parametrize("extra", ["", "Expect: 100-continue\r\n"], ids=["plain", "expect"])
async def test_401_comes_before_the_body(serve: Serve, extra: str) -> None:
    server = await serve(Instant(), api_key="secret", max_body_bytes=1024)
    reader, writer = await server.send_raw(
        f"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\nContent-Type: text/html\r\n{extra}\r\n".encode()
    )
    assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
    writer.close()


async def test_a_body_is_asked_for_when_the_key_is_right(serve: Serve) -> None:
    server = await serve(Instant(), api_key="secret")
    body = msgspec.json.encode(make_request(rollout_id="r", server_url=server.trainer.url))
    reader, writer = await server.send_raw(
        b"POST /init HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert await reader.readline() == b"HTTP/1.1 202 Accepted\r\n"
    writer.close()


# ---------------------------------------------------------------- mounted


@pytest.mark.parametrize("prefix", ["/any", "/any/prefix", "/v1"])
async def test_the_application_can_be_mounted_anywhere(trainer: MockTrainer, prefix: str) -> None:
    root = web.Application()  # with its default client_max_size of 1 MiB
    app = create_app(Instant(), settings_with(api_key="secret"))
    root.add_subapp(prefix, app)
    async with listening(root) as url, ClientSession(headers=bearer("secret")) as session:
        messages = [{"role": "user", "content": "x" * 3_000_000}]
        body = msgspec.json.encode(make_request(rollout_id="r/1", server_url=trainer.url, messages=messages))
        for path in ("/init", "/v1/rollout/init"):
            async with session.post(url + prefix + path, data=io.BytesIO(body), headers=JSON) as accepted:
                assert accepted.status == 202
        async with session.get(f"{url}{prefix}/v1/rollout/result/r%2F1?wait=5") as answer:
            assert answer.status == 200
        async with session.get(f"{url}{prefix}/nowhere") as answer:
            assert (answer.status, (await answer.json())["code"]) == (404, "not_found")
            assert answer.headers["X-Request-ID"]
        async with session.get(f"{url}{prefix}/init") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")


async def test_a_mounted_application_asks_for_the_key_and_keeps_health_open(trainer: MockTrainer) -> None:
    root = web.Application()
    root.add_subapp("/agent", create_app(Instant(), settings_with(api_key="secret")))
    async with listening(root) as url, ClientSession() as session:
        async with session.get(f"{url}/agent/status") as answer:
            assert answer.status == 401
        async with session.get(f"{url}/agent/nowhere") as answer:
            assert answer.status == 401
        async with session.get(f"{url}/agent/health") as answer:
            assert answer.status == 200
        async with session.post(f"{url}/agent/health") as answer:
            assert answer.status == 405


async def test_two_agents_live_in_one_application(trainer: MockTrainer) -> None:
    root = web.Application()
    apps = {name: create_app(Instant(), settings_with()) for name in ("/one", "/two")}
    for prefix, app in apps.items():
        root.add_subapp(prefix, app)
    async with listening(root) as url:
        request = make_request(rollout_id="r", server_url=trainer.url)
        for prefix in apps:
            assert (await post_init(url + prefix, request)).status == 202
        await trainer.wait_completed(2)
    assert [app[SERVICE].agent.ran for app in apps.values()] == [["r"], ["r"]]


async def test_a_cancel_aborts_the_llm_call_in_flight(serve: Serve) -> None:
    server = await serve(Chat())
    server.trainer.on_chat(hold())
    await server.post_init(rollout_id="r")
    (call,) = await server.trainer.wait_chats()
    await server.cancel(ids=["r"])
    assert (await server.result("r"))["finish_reason"] == "cancelled"
    await server.trainer.wait_until(lambda: call.abandoned)
