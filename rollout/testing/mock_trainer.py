"""A trainer that needs no GPU: real HTTP on a real socket, scripted answers, faults on demand, everything recorded.

::

    async with MockTrainer() as trainer:
        trainer.on_chat([tool_calls([("add", {"a": 2, "b": 2})]), text("4")])
        trainer.on_completed(status(503), times=2)
        ...
        delivered = await trainer.wait_completed("rollout-1", timeout=5)

The server is asyncio streams and a small reader, because a web framework would not let it misbehave at byte level.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hmac
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from rollout.testing.faults import Answer, Reply, status, text
from rollout.testing.peer import READ_LIMIT_BYTES, MalformedRequest, Peer, RecordedRequest
from rollout.testing.script import Answers, RuleOptions, Script

T = TypeVar("T")

CHAT = "chat"
COMPLETED = "completed"

_DEFAULTS = {CHAT: text("ok"), COMPLETED: Reply(), None: status(404)}
_LISTED_IN_ERRORS = 30


class Log:
    """All requests in the order of arrival, and who waits for more. Lives on the trainer's loop."""

    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self._kinds: dict[str, list[RecordedRequest]] = {CHAT: [], COMPLETED: []}
        self._by_rollout: defaultdict[tuple[str, str], list[RecordedRequest]] = defaultdict(list)
        self._waiting: defaultdict[str | None, set[asyncio.Event]] = defaultdict(set)

    def add(self, request: RecordedRequest, kind: str | None) -> None:
        """Record a request and wake who waits for it."""
        self.requests.append(request)
        if kind is not None:
            self._kinds[kind].append(request)
            if request.rollout_id is not None:
                self._by_rollout[kind, request.rollout_id].append(request)
        self.wake(request)

    def wake(self, request: RecordedRequest) -> None:
        """Something became known of the request."""
        for key in {None, request.rollout_id}:
            for event in self._waiting.get(key, ()):
                event.set()

    def of(self, kind: str, rollout_id: str | None) -> list[RecordedRequest]:
        """What arrived of one kind, for one rollout or for all; a copy."""
        return list(self._of(kind, rollout_id))

    def enough_of(self, kind: str, rollout_id: str | None, count: int, accepted: bool) -> list[RecordedRequest] | None:
        """The same once there are so many, else None; with `accepted` only what the trainer took counts."""
        found = self._of(kind, rollout_id)
        if accepted and len(found) >= count:
            found = [request for request in found if request.accepted]
        return list(found) if len(found) >= count else None

    def _of(self, kind: str, rollout_id: str | None) -> list[RecordedRequest]:
        return self._kinds[kind] if rollout_id is None else self._by_rollout.get((kind, rollout_id), [])

    async def wait(self, rollout_id: str | None, found: Callable[[], T | None], timeout: float, wanted: str) -> T:
        """What `found()` returns once that is not None; `TimeoutError` says what was wanted and what did arrive."""
        event = asyncio.Event()
        self._waiting[rollout_id].add(event)
        try:
            async with asyncio.timeout(timeout):
                while (result := found()) is None:
                    event.clear()
                    await event.wait()
                return result
        except TimeoutError:
            raise TimeoutError(f"no {wanted} within {timeout:g} s; {self.describe()}") from None
        finally:
            self._waiting[rollout_id].discard(event)
            if not self._waiting[rollout_id]:
                del self._waiting[rollout_id]

    def describe(self) -> str:
        """The latest requests, one a line."""
        if not self.requests:
            return "no request has arrived at all"
        lines = [f"  {request}" for request in self.requests[-_LISTED_IN_ERRORS:]]
        return "\n".join([f"{len(self.requests)} requests have arrived, the latest:", *lines])

    def forget(self) -> None:
        """Drop all requests recorded so far."""
        self.requests.clear()
        self._by_rollout.clear()
        for requests in self._kinds.values():
            requests.clear()


class MockTrainer:
    """The trainer's two endpoints below any prefix, on 127.0.0.1 and a free port; an async context manager.

    Custom paths are told apart by their body: `final_messages` makes a callback, `messages` a chat. With `api_key`
    every request needs it as bearer token, chats `llm_api_key` if that is given, else the answer is 401. All state
    belongs to the loop it was entered on; the `wait_...` methods may be awaited on any loop, and `chats()`,
    `completions()` and `on_...()` called from any thread.
    """

    def __init__(self, *, api_key: str | None = None, llm_api_key: str | None = None, port: int = 0) -> None:
        self.connections_opened = 0
        self._api_key = api_key
        self._llm_api_key = api_key if llm_api_key is None else llm_api_key
        self._port = port
        self._script = Script()
        self._log = Log()
        self._script_errors: list[Exception] = []
        self._serving: dict[asyncio.Task[None], Peer] = {}
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self._port, backlog=1024, limit=READ_LIMIT_BYTES
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        if exc is None:
            self._raise_script_errors()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        serving = dict(self._serving)
        for task, peer in serving.items():
            task.cancel()
            peer.reset()
        await asyncio.gather(*serving, return_exceptions=True)
        await self._server.wait_closed()

    def _raise_script_errors(self) -> None:
        if self._script_errors:
            raise ExceptionGroup("the script of the mock trainer failed", self._script_errors)

    @classmethod
    @contextlib.contextmanager
    def run_in_thread(cls, **options: Any) -> Iterator[Self]:
        """A trainer on a loop and thread of its own, for code that has no loop or must not share it."""
        trainer = cls(**options)
        started: concurrent.futures.Future[asyncio.Event] = concurrent.futures.Future()
        thread = threading.Thread(
            target=asyncio.run, args=(trainer._run_until_stopped(started),), name="mock-trainer", daemon=True
        )
        thread.start()
        stop = started.result()
        try:
            yield trainer
        finally:
            assert trainer._loop is not None
            trainer._loop.call_soon_threadsafe(stop.set)
            thread.join()
        trainer._raise_script_errors()

    async def _run_until_stopped(self, started: concurrent.futures.Future[asyncio.Event]) -> None:
        try:
            await self.__aenter__()
        except OSError as exc:
            started.set_exception(exc)
            return
        stop = asyncio.Event()
        started.set_result(stop)
        await stop.wait()
        await self._close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block for a coroutine on the loop of `run_in_thread`: `trainer.run(trainer.wait_chats())`."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ------------------------------------------------------------ where it is

    @property
    def url(self) -> str:
        """The `server_url` of a request."""
        return self.url_for("")

    def url_for(self, prefix: str) -> str:
        """A `server_url` with a path: every prefix leads to the same two endpoints."""
        assert self._server is not None, "the trainer runs inside `async with` only"
        path = prefix.strip("/")
        return f"http://127.0.0.1:{self._port}" + (f"/{path}" if path else "")

    # ------------------------------------------------------------ what it is to say

    def on_chat(self, answers: Answers, **options: Unpack[RuleOptions]) -> None:
        """Script `/v1/chat/completions`: answers are given one after the other, and the last one repeats.

        `times` ends the rule after so many answers. A rule with `rollout_id` or `when` goes before one without, one
        with `times` before one without, an older one before a newer; the default comes last. A new rule without `times`
        takes the place of the one for the same requests. With `each_rollout` every rollout gets the whole list.
        """
        self._script.add(CHAT, answers, **options)

    def on_completed(self, answers: Answers, **options: Unpack[RuleOptions]) -> None:
        """Script `/v1/rollout/completed`; as `on_chat`."""
        self._script.add(COMPLETED, answers, **options)

    def on_path(self, path: str, answers: Answers, **options: Unpack[RuleOptions]) -> None:
        """Script one exact path, whatever it is; as `on_chat`."""
        self._script.add(path, answers, **options)

    # ------------------------------------------------------------ what it has seen

    @property
    def requests(self) -> list[RecordedRequest]:
        """All requests, in the order in which they had been read; a copy."""
        return list(self._log.requests)

    def chats(self, rollout_id: str | None = None) -> list[RecordedRequest]:
        """The chat requests, of one rollout or of all."""
        return self._log.of(CHAT, rollout_id)

    def completions(self, rollout_id: str | None = None) -> list[RecordedRequest]:
        """The completed callbacks, of one rollout or of all; a repeated delivery is there each time."""
        return self._log.of(COMPLETED, rollout_id)

    def forget(self) -> None:
        """Drop what has been recorded, for runs that would fill the memory. On the trainer's loop only."""
        self._log.forget()

    @overload
    async def wait_completed(self, wanted: str, timeout: float = 5, *, accepted: bool = False) -> RecordedRequest: ...

    @overload
    async def wait_completed(
        self, wanted: int = 1, timeout: float = 5, *, accepted: bool = False
    ) -> list[RecordedRequest]: ...

    async def wait_completed(
        self, wanted: str | int = 1, timeout: float = 5, *, accepted: bool = False
    ) -> RecordedRequest | list[RecordedRequest]:
        """The first callback of this rollout, or a list once so many callbacks have arrived.

        With `accepted` only those count that the trainer took. `TimeoutError` lists what did arrive.
        """
        rollout_id, count = (wanted, 1) if isinstance(wanted, str) else (None, wanted)
        what = f"callback of {rollout_id!r}" if rollout_id else f"{count} callbacks"
        found = await self._wait(
            COMPLETED, rollout_id, count, timeout, f"accepted {what}" if accepted else what, accepted
        )
        return found[0] if rollout_id else found

    async def wait_chats(
        self, count: int = 1, rollout_id: str | None = None, timeout: float = 5
    ) -> list[RecordedRequest]:
        """The chats, once so many have arrived (answered or not)."""
        what = f"{count} chats" + (f" of {rollout_id!r}" if rollout_id else "")
        return await self._wait(CHAT, rollout_id, count, timeout, what)

    async def wait_until(self, condition: Callable[[], bool], timeout: float = 5, what: str = "such state") -> None:
        """Return once the condition holds; it is asked again whenever a request arrives or has been dealt with."""
        await self._on_own_loop(self._log.wait(None, lambda: condition() or None, timeout, what))

    async def _wait(
        self, kind: str, rollout_id: str | None, count: int, timeout: float, what: str, accepted: bool = False
    ) -> list[RecordedRequest]:
        enough = functools.partial(self._log.enough_of, kind, rollout_id, count, accepted)
        return await self._on_own_loop(self._log.wait(rollout_id, enough, timeout, what))

    async def _on_own_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        if self._loop is asyncio.get_running_loop():
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    # ------------------------------------------------------------ how it serves

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is not None and not self._server.is_serving():
            writer.transport.abort()  # it came in the very turn in which the trainer closed
            return
        self.connections_opened += 1
        peer = Peer(reader, writer, self.connections_opened)
        task = asyncio.create_task(self._serve(peer), name=f"mock-trainer-{peer.connection_id}")
        self._serving[task] = peer
        task.add_done_callback(self._serving.pop)

    async def _serve(self, peer: Peer) -> None:
        try:
            while peer.is_open and (request := await peer.read_request()) is not None:
                await self._answer(peer, request)
                if request.wants_close:
                    break
        except MalformedRequest as exc:
            with contextlib.suppress(ConnectionError):
                await peer.send(status(400, body={"error": {"message": f"malformed request: {exc}"}}).wire)
        finally:
            peer.close()

    async def _answer(self, peer: Peer, request: RecordedRequest) -> None:
        kind = _kind_of(request)
        self._log.add(request, kind)
        try:
            answer = await self._choose(request, kind)
            await answer.play(peer, request, _DEFAULTS[kind])
        except ConnectionError:
            request.abandoned = True
            peer.close()
        except Exception as exc:  # an Answer of the test's own: the test is told when the trainer closes
            self._script_errors.append(exc)
            peer.reset()
        self._log.wake(request)

    async def _choose(self, request: RecordedRequest, kind: str | None) -> Answer:
        if not self._is_authorized(request, kind):
            return status(401, body={"error": {"message": "no or wrong bearer token"}})
        default = _DEFAULTS[kind]
        if request.method != "POST" and kind is not None:
            default = status(405)
        endpoints = (request.path,) if kind is None else (request.path, kind)
        try:
            return await self._script.answer(request, endpoints, default)
        except Exception as exc:  # the test's own code: the test is told when the trainer closes
            self._script_errors.append(exc)
            return status(500, body={"error": {"message": f"the script failed: {exc!r}"}})

    def _is_authorized(self, request: RecordedRequest, kind: str | None) -> bool:
        key = self._llm_api_key if kind == CHAT else self._api_key
        if key is None:
            return True
        return request.bearer is not None and hmac.compare_digest(request.bearer.encode(), key.encode())


def _kind_of(request: RecordedRequest) -> str | None:
    if request.path.endswith("/v1/chat/completions"):
        return CHAT
    if request.path.endswith("/v1/rollout/completed"):
        return COMPLETED
    if request.envelope.final_messages:
        return COMPLETED
    return CHAT if request.envelope.messages else None
