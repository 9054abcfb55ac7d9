"""Reads one request body: as much as allowed, as slowly as allowed, and unpacked only as far as allowed."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import HttpVersion11, web

from rollout.errors import BodyTooLarge, InvalidJSON, RequestTimeout, UnsupportedMediaType

_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_RAW_DEFLATE = -15
_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_QUOTE = 100


def check_media_type(request: web.BaseRequest) -> str | None:
    """The content encoding to undo, if any. Raises `UnsupportedMediaType` for what is not JSON or not known."""
    headers = request.headers
    coding = headers.get("Transfer-Encoding")
    if coding is not None and coding.strip().lower() != "chunked":
        raise UnsupportedMediaType(f"the Transfer-Encoding must be chunked, not {_shown(coding)}")
    kind = headers.get("Content-Type")
    if kind and kind != "application/json":
        essence = kind.partition(";")[0].strip().lower()
        if essence not in ("application/json", "text/json") and not (
            essence.startswith("application/") and essence.endswith("+json")
        ):
            raise UnsupportedMediaType(f"the Content-Type must be application/json, not {_shown(kind)}")
    encoding = headers.get("Content-Encoding")
    if encoding is None:
        return None
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _ENCODINGS:
        raise UnsupportedMediaType(f"the Content-Encoding must be gzip, deflate or identity, not {_shown(encoding)}")
    return name


def _shown(header: str) -> str:
    return repr(header if len(header) <= _LONGEST_QUOTE else f"{header[:_LONGEST_QUOTE]}...")


async def read_body(request: web.BaseRequest, limit_bytes: int, pause_seconds: float) -> bytes:
    """The body, decompressed. Raises `BodyTooLarge`, `RequestTimeout`, `UnsupportedMediaType`, `InvalidJSON`.

    The limit counts after decompression and holds whatever limit the surrounding application has. The time limit is
    for a pause, not for the whole: a large body over a slow line is fine as long as it comes.
    """
    encoding = check_media_type(request)
    length = request.content_length
    if length is not None and length > limit_bytes:
        raise BodyTooLarge(f"the body has {length} bytes, the limit is {limit_bytes}")
    if "Expect" in request.headers and not request.content.is_eof():
        await _ask_for_body(request)
    try:
        body = await _read(request, limit_bytes, pause_seconds)
    except web.RequestPayloadError as exc:
        raise InvalidJSON(f"the body cannot be read: {exc}") from None
    if encoding is None or (len(body) != length and _may_be_unpacked(request) and _is_unpacked(body, encoding)):
        return body
    return _unpack(body, encoding, limit_bytes)


async def _ask_for_body(request: web.BaseRequest) -> None:
    """Tell a caller that waits for it to go on: nothing was found wrong with the headers."""
    if request.version >= HttpVersion11 and request.headers["Expect"].strip().lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


async def _read(request: web.BaseRequest, limit_bytes: int, pause_seconds: float) -> bytes:
    content = request.content
    if content.is_eof():  # it came with the headers, as small ones do: no need to wait for anything
        body = content.read_nowait(-1)
        if len(body) > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes")
        return body
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(pause_seconds):
                part = await content.readany()
        except TimeoutError:
            raise RequestTimeout(f"no byte of the body for {pause_seconds:g} s") from None
        if not part:
            return b"".join(parts)
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes")
        parts.append(part)


def _may_be_unpacked(request: web.BaseRequest) -> bool:
    """Whether the server in front of us undoes encodings, or may: our own (`server.guard`) says so of itself."""
    return bool(getattr(request.protocol, "undoes_encodings", True))


def _is_unpacked(body: bytes, encoding: str) -> bool:
    """Whether the server in front of us has undone the encoding: JSON starts with neither magic number.

    Asked only of a body that is not as long as its Content-Length says, or that had none.
    """
    if encoding.endswith("gzip"):
        return body[:2] != _GZIP_MAGIC
    return body[:1] in (b"{", b"[", b" ", b"\n", b"\r", b"\t", b"")


def _unpack(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    try:
        return _inflate(body, _ENCODINGS[encoding], limit_bytes)
    except InvalidJSON:
        if encoding != "deflate":
            raise
        return _inflate(body, _RAW_DEFLATE, limit_bytes)  # what many clients send under that name


def _inflate(body: bytes, window_bits: int, limit_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(window_bits)
    try:
        text = unpacker.decompress(body, limit_bytes + 1)
    except zlib.error:
        raise InvalidJSON("the body is not what its Content-Encoding says") from None
    if len(text) > limit_bytes:
        raise BodyTooLarge(f"the body has more than {limit_bytes} bytes when unpacked")
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidJSON("the compressed body is cut off, or something follows it")
    return text
