"""The trainer's other half: what asks the service for rollouts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from rollout.testing.mock_trainer import MockTrainer
from rollout.testing.script import Answers
from rollout.wire import JSON, encode_strict

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aiohttp import ClientResponse

INIT_PATH = "/v1/rollout/init"


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
    no result comes.
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
        callback = await trainer.wait_completed(request["rollout_id"], timeout, accepted=True)
    response: dict[str, Any] = callback.json
    return response
