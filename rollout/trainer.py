"""The service's client of the trainer: one session for the process, a light handle for each rollout."""

from __future__ import annotations

import asyncio
import errno
import functools
import io
import logging
import re
import socket
import time
import urllib.parse
from collections.abc import Collection
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from msgspec import Struct
from yarl import URL

from rollout.completions import CompletionsResult, SentMessages, encode_call, error_of, usage_tokens
from rollout.errors import BadCompletion, RolloutError, TrainerRefused, TrainerTimeout, TrainerUnreachable
from rollout.hosts import AllowedHosts, parse_address
from rollout.metrics import Metrics
from rollout.retry import Clock, RetryPolicy, with_retries
from rollout.schemas import MessageDict
from rollout.settings import RolloutClientSettings
from rollout.tracing import Attributes, Span
from rollout.wire import encode

logger = logging.getLogger(__name__)

ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
"""A longer answer is cut off and refused: no trainer means it, and no process survives many of them."""

_UNPACKED_BYTES = 8 * 1024 * 1024
_UNPACKED_RATIO = 100
"""An answer may unpack to so many bytes, or to so many times what came: beyond both it is a bomb."""

_LONGEST_HEADER_BYTES = 64 * 1024

_CONNECT_SECONDS = 10.0
_KEEPALIVE_SECONDS = 4.0  # below the 5 s after which common servers close an idle connection
_DRAIN_BYTES = 64 * 1024
_DRAIN_SECONDS = 1.0
_NO_SPAN = Span()
_CONNECT_PROBLEMS = {
    errno.ECONNREFUSED: "connection refused by",
    errno.ECONNRESET: "connection reset by",
    errno.EHOSTUNREACH: "no way to",
    errno.ENETUNREACH: "no network leads to",
    errno.ETIMEDOUT: "no answer from",
}
_QUOTED_BYTES = re.compile(r"""\s+b['"].*""", re.DOTALL)
"""What a parser's error repeats of what came: a trainer may have put the key there."""

_JSON_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "gzip"}


class _Answer(Struct):
    status: int
    content_type: str
    retry_after: str | None
    body: bytes


class HostRefused(OSError):
    """None of the addresses that a name has now is on the list of allowed hosts."""


class AllowedResolver(AbstractResolver):
    """Resolves a name to those of its addresses that the list allows: it may have others than at its init.

    An address in the place of a name never comes here; `Trainer` asks for it before the call.
    """

    def __init__(self, hosts: AllowedHosts, resolver: AbstractResolver) -> None:
        self._hosts = hosts
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The allowed addresses; `HostRefused` if there is none."""
        found = await self._resolver.resolve(host, port, family)
        allowed = [entry for entry in found if self._hosts.allows_resolved(host, entry["host"], port)]
        if not allowed:
            raise HostRefused(f"no address of {host!r} is on the list of allowed hosts any more")
        return allowed

    async def close(self) -> None:
        """Close the resolver behind this one."""
        await self._resolver.close()


class Trainer:
    """Owner of the one `ClientSession`. No cookies, no redirects, no proxy from the environment, no cap on connections
    unless a setting names one. An async context manager; safe for any number of concurrent calls on its loop.
    """

    def __init__(
        self,
        settings: RolloutClientSettings,
        metrics: Metrics,
        *,
        resolver: AbstractResolver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.policy = RetryPolicy(
            retries=settings.max_retries,
            base_delay_seconds=settings.retry_base_delay,
            max_delay_seconds=settings.retry_max_delay,
        )
        self.metrics = metrics
        self.clock = clock
        self._settings = settings
        self._hosts = AllowedHosts.parse(settings.allowed_hosts)
        self._resolver = resolver
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Trainer:
        seconds = self._settings.timeout_seconds
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._settings.max_connections,
                keepalive_timeout=_KEEPALIVE_SECONDS,
                resolver=self._make_resolver(),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _CONNECT_SECONDS)),
            max_line_size=_LONGEST_HEADER_BYTES,
            max_field_size=_LONGEST_HEADER_BYTES,
            trust_env=False,
        )
        return self

    def _make_resolver(self) -> AbstractResolver:
        # Named, because an installed aiodns would silently take its place.
        resolver = ThreadedResolver() if self._resolver is None else self._resolver
        return resolver if self._hosts.allows_everything else AllowedResolver(self._hosts, resolver)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def post(self, url: URL, body: bytes, headers: dict[str, str]) -> _Answer:
        """One POST, its answer read up to `ANSWER_LIMIT_BYTES`; connection trouble and timeouts as typed errors."""
        try:
            async with self._open(url, body, headers) as response:
                kind = response.headers.get("Content-Type", "")
                if kind.startswith("text/event-stream") and response.status < 300:
                    response.close()  # it may never end
                    raise BadCompletion(
                        "the trainer answered with a stream (text/event-stream), which was not asked for"
                    )
                return _Answer(response.status, kind, response.headers.get("Retry-After"), await _read(response))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as exc:
            raise self._failure(exc) from exc

    async def deliver(self, url: URL, body: bytes, headers: dict[str, str], secrets: Collection[str] = ()) -> None:
        """One POST of a terminal result. Returns when the status line says 2xx, whatever comes after it.

        The body of the answer is not unpacked: what it says is of use only if it is an error in plain text.
        """
        headers = {**headers, "Accept-Encoding": "identity"}
        try:
            async with self._open(url, body, headers, auto_decompress=False) as response:
                status, retry_after = response.status, response.headers.get("Retry-After")
                said = await _drain(response)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as exc:
            if _says_well_done(exc):
                return
            raise self._failure(exc) from exc
        if not 200 <= status < 300:
            raise error_of(status, said, retry_after, "the result", secrets)

    def _open(self, url: URL, body: bytes, headers: dict[str, str], auto_decompress: bool = True) -> Any:
        if self._http is None:
            raise TrainerUnreachable("the client session is closed")
        if not self._hosts.allows_everything:
            self._check_address(url)
        # From 1 MiB on aiohttp warns about bytes that are written at once; a file object goes out in pieces.
        data = body if len(body) < 1 << 20 else io.BytesIO(body)
        return self._http.post(url, data=data, headers=headers, allow_redirects=False, auto_decompress=auto_decompress)

    def _check_address(self, url: URL) -> None:
        """Refuse an address that the list does not allow: it was checked at the init, maybe by an earlier process."""
        host, port = url.raw_host or "", url.port or 0
        if parse_address(host) is not None and not self._hosts.allows_address(host, port):
            raise TrainerRefused(f"the host {host!r} with port {port} is not on the list of allowed hosts", 0)

    def _failure(self, exc: Exception) -> TrainerUnreachable:
        if isinstance(exc, TimeoutError):
            return TrainerTimeout(f"no answer from the trainer within {self._settings.timeout_seconds:g} s")
        failure = TrainerUnreachable(f"the trainer cannot be reached: {_describe(exc)}")
        failure.stale_connection = _was_closed(exc)
        return failure


def _says_well_done(exc: Exception) -> bool:
    """Whether the connection went away after a status line with 2xx: that alone is an acknowledgement."""
    if not isinstance(exc, aiohttp.ServerDisconnectedError):
        return False
    code = getattr(exc.message, "code", None)
    return isinstance(code, int) and 200 <= code < 300


def _was_closed(exc: Exception) -> bool:
    """Whether an open connection went away before the answer began: while it was read, or while we were writing."""
    if isinstance(exc, aiohttp.ClientConnectorError):
        return False
    return isinstance(exc, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError))


def _describe(exc: Exception) -> str:
    """What went wrong in plain words, where it is one of the common things."""
    if isinstance(exc, aiohttp.ClientConnectorError) and not isinstance(exc, aiohttp.ClientSSLError):
        place = f"[{exc.host}]:{exc.port}" if ":" in exc.host else f"{exc.host}:{exc.port}"
        if isinstance(exc, aiohttp.ClientConnectorDNSError):
            refused = isinstance(exc.os_error, HostRefused)
            return (
                str(exc.os_error) if refused else f"the name {exc.host!r} is not known ({exc.strerror or exc.os_error})"
            )
        if exc.errno in _CONNECT_PROBLEMS:
            return f"{_CONNECT_PROBLEMS[exc.errno]} {place}"
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return "the connection was closed before the answer came"
    if isinstance(exc, OSError) and exc.errno in (errno.ECONNRESET, errno.EPIPE):
        return "the connection was reset"
    text = str(exc) if isinstance(exc, (OSError, aiohttp.ClientError)) else ""
    if isinstance(exc, aiohttp.ClientResponseError):  # its own text has the URL, and so what the query may hold
        text = f"{exc.status} {exc.message}"
    text = " ".join(_QUOTED_BYTES.sub("", text).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = response.content
    if content.is_eof() and content.exception() is None and content.total_bytes <= _UNPACKED_BYTES:
        return content.read_nowait(-1)  # it came with the headers, as short ones do
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        size += len(part)
        if size > ANSWER_LIMIT_BYTES:
            response.close()
            raise BadCompletion(f"the trainer's answer is larger than {ANSWER_LIMIT_BYTES} bytes")
        if size > _UNPACKED_BYTES and size > _UNPACKED_RATIO * content.total_raw_bytes:
            response.close()
            raise BadCompletion(f"the trainer's answer unpacks to more than {_UNPACKED_RATIO} times what was sent")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _drain(response: aiohttp.ClientResponse) -> bytes:
    """Read a short body so that the connection can be used again; a long, slow or broken one costs the connection."""
    content = response.content
    if content.is_eof() and content.exception() is None:
        return content.read_nowait(-1)  # it came with the headers, as short ones do
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while not content.at_eof():
                parts.append(await content.readany())
                if sum(map(len, parts)) > _DRAIN_BYTES:
                    break
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        response.close()
    return b"".join(parts)


def bearer(key: str | None) -> dict[str, str]:
    """The headers of a JSON POST, with the key when there is one."""
    return _JSON_HEADERS if key is None else {**_JSON_HEADERS, "Authorization": f"Bearer {key}"}


def idempotency_header(rollout_id: str) -> str:
    """The id as a header value: percent-encoded where ASCII ends, so that different ids stay different."""
    if rollout_id.isascii() and rollout_id.replace("-", "").replace("_", "").isalnum():
        return rollout_id
    return urllib.parse.quote(rollout_id, safe="-_.~:/@+=,;!$'()*")


class TrainerSession:
    """The LLM of one rollout: an `LLMClient` whose calls go to the trainer, through the retries, until the deadline."""

    __slots__ = (
        "_calls",
        "_deadline",
        "_headers",
        "_key",
        "_rollout_id",
        "_secrets",
        "_span",
        "_trainer",
        "_url",
        "retries",
    )

    def __init__(
        self,
        trainer: Trainer,
        url: URL,
        *,
        rollout_id: str,
        key: str | None,
        secrets: Collection[str] = (),
        deadline: float | None = None,
        span: Span = _NO_SPAN,
        run: int = 1,
    ) -> None:
        self._trainer = trainer
        self._url = url
        self._rollout_id = rollout_id
        self._headers = bearer(key)
        self._secrets = secrets if key is None or key in secrets else (key, *secrets)
        self._deadline = deadline
        self._span = span
        self._key = f"{idempotency_header(rollout_id)}:{run}:"
        self._calls = 0
        self.retries = 0

    async def chat_completions(self, messages: list[MessageDict], /, **params: Any) -> CompletionsResult:
        """One turn. Raises an `LLMError`: what could be retried has been, within the policy and the deadline.

        All tries of a turn carry one `Idempotency-Key`; another run of the same rollout has others.
        """
        text = messages.text if isinstance(messages, SentMessages) else encode(messages)[0]
        body = encode_call(text, self._rollout_id, params)
        with self._span.child("chat", str(params.get("model", "default"))) as span:
            self._calls += 1
            headers = {**self._headers, "Idempotency-Key": f"{self._key}{self._calls}", **span.headers()}
            result = await with_retries(
                functools.partial(self._call, body, headers),
                self._trainer.policy,
                deadline=self._deadline,
                clock=self._trainer.clock,
                on_retry=self._retried,
            )
            if span.is_live:
                span.set(Attributes.INPUT_TOKENS, usage_tokens(result.usage, "prompt_tokens"))
                span.set(Attributes.OUTPUT_TOKENS, usage_tokens(result.usage, "completion_tokens"))
            return result

    async def _call(self, body: bytes, headers: dict[str, str]) -> CompletionsResult:
        answer = await self._trainer.post(self._url, body, headers)
        if 200 <= answer.status < 300:
            return CompletionsResult.from_body(answer.body, self._secrets)
        if 300 <= answer.status < 400:
            raise TrainerRefused(
                f"the trainer answered {answer.status}, a redirect, which is not followed", answer.status
            )
        raise error_of(answer.status, answer.body, answer.retry_after, "chat completions", self._secrets)

    def _retried(self, exc: RolloutError, failures: int, pause_seconds: float) -> None:
        self.retries += 1
        self._trainer.metrics.llm_retries.inc()
        logger.info(
            "rollout %r: LLM call failed (%s), try %d in %.2f s", self._rollout_id, exc, failures + 1, pause_seconds
        )
