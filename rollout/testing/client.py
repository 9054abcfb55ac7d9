"""The trainer's other half: what asks the service for rollouts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
from yarl import URL

from rollout.testing.mock_trainer import MockTrainer
from rollout.testing.script import Answers
from rollout.wire import JSON, encode_strict

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aiohttp import ClientResponse

INIT_PATH = "/v1/rollout/init"
_STATUS_SECONDS = 2.0


class CanPost(Protocol):
    """What `post_init` needs of a session with a base URL, or of aiohttp's TestClient."""

    @property
    def post(self) -> Callable[..., AbstractAsyncContextManager[ClientResponse]]:
        """Sends a POST; the answer is valid inside the context."""
        ...


class ReadResponse(NamedTuple):
    """An HTTP answer that has been read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> JSON:
        """The decoded body; raises `msgspec.DecodeError` if it is not JSON."""
        return msgspec.json.decode(self.body)


async def post_init(
    target: str | CanPost, request: JSON, *, api_key: str | None = None, path: str = INIT_PATH
) -> ReadResponse:
    """POST a request (bytes go as they are) to the service: its base URL, a session that has one, or a TestClient."""
    if isinstance(target, str):
        from aiohttp import ClientSession

        async with ClientSession() as session:
            return await _post(session, target.rstrip("/") + path, request, api_key)
    return await _post(target, path, request, api_key)


async def _post(session: CanPost, url: str, request: JSON, api_key: str | None) -> ReadResponse:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    body = request if isinstance(request, bytes) else encode_strict(request)
    async with session.post(url, data=body, headers=headers) as response:
        return ReadResponse(response.status, response.headers, await response.read())


async def _where_it_stands(target: str | CanPost, rollout_id: str, api_key: str | None) -> str:
    """What the service says of a rollout whose result has not come."""
    path = f"/v1/rollout/status/{quote(rollout_id, safe='')}"
    try:
        async with asyncio.timeout(_STATUS_SECONDS):
            answer = await _get(target, path, api_key)
        state: Any = answer.json
        phase = state["phase"]
    except Exception as exc:
        return f"asking for its status failed, too: {type(exc).__name__}: {exc}"
    if phase == "delivered":
        return (
            f"the result of {rollout_id!r} was already delivered, before or to another trainer: take a new rollout_id"
        )
    error = state.get("last_delivery_error")
    return f"the service has it in the phase {phase!r}" + (f": {error}" if error else "")


async def _get(target: str | CanPost, path: str, api_key: str | None) -> ReadResponse:
    from aiohttp import ClientSession

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with contextlib.AsyncExitStack() as stack:
        session: Any = await stack.enter_async_context(ClientSession()) if isinstance(target, str) else target
        url = URL((target.rstrip("/") if isinstance(target, str) else "") + path, encoded=True)
        async with session.get(url, headers=headers) as response:
            return ReadResponse(response.status, response.headers, await response.read())


async def drive(
    target: str | CanPost,
    request: Mapping[str, Any],
    *,
    trainer: MockTrainer | None = None,
    answers: Answers = None,
    api_key: str | None = None,
    timeout: float = 10,
) -> dict[str, Any]:
    """One rollout from init to its delivered result: the RolloutResponse that the trainer took, decoded.

    Without a `trainer` one is started for this rollout, and its chats get `answers`. The `server_url` of the request
    becomes the trainer's, unless it is below it already. `RuntimeError` if the init is not accepted, `TimeoutError` if
    no result comes; it says where the service has the rollout.
    """
    async with contextlib.AsyncExitStack() as stack:
        if trainer is None:
            trainer = await stack.enter_async_context(MockTrainer())
        if answers is not None:
            trainer.on_chat(answers, rollout_id=request["rollout_id"])
        if not str(request.get("server_url", "")).startswith(trainer.url):
            request = {**request, "server_url": trainer.url}
        async with asyncio.timeout(timeout):
            accepted = await post_init(target, request, api_key=api_key)
        if accepted.status != 202:
            raise RuntimeError(f"init was answered {accepted.status}: {accepted.body[:500]!r}")
        try:
            callback = await trainer.wait_completed(request["rollout_id"], timeout, accepted=True)
        except TimeoutError as exc:
            where = await _where_it_stands(target, request["rollout_id"], api_key)
            raise TimeoutError(f"{exc}; {where}") from None
    response: dict[str, Any] = callback.json
    return response
