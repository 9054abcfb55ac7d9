"""JSON at the edge: what comes in is checked once, what goes out is always valid.

In: `check_body()` and `check_numbers()` find, at C speed and without building anything, what a lazily decoded body
could hide: bad UTF-8 in a skipped field, nesting beyond `MAX_DEPTH`, numbers out of range. Out: `encode()` is one call
of the encoder when the value is plain, and falls back to `plain()`, which converts what has a meaning in JSON and names
the rest.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import hashlib
import math
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from rollout.errors import InvalidJSON

JSON: TypeAlias = Any
"""A decoded JSON value."""

MAX_DEPTH = 100
"""How deep JSON may nest, in and out (PROTOCOL, Errors)."""

_ALL = set(range(256))
_NOT_OPENERS = bytes(_ALL - set(b"[{"))
_NOT_STRUCTURE = bytes(_ALL - set(b'[]{}"'))
_LONG_NUMBER = b"0" * 200  # with a two-digit exponent more digits than this may exceed what a double holds
_SHAPES = bytes(0x30 if chr(c).isdigit() else 0x65 if c in b"eE" else 0x20 for c in range(256))


def nests_deeper(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Whether the JSON text nests deeper than `limit`; of a text that is not JSON the answer means nothing.

    No parser and no recursion that a hostile text could exhaust: everything but brackets and quotes is cut out, the
    strings go (nearly all are then an empty pair of quotes), and the innermost pairs are removed layer by layer.
    """
    if len(text.translate(None, _NOT_OPENERS)) <= limit:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = text.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in brackets:
        brackets = b"".join(brackets.split(b'"')[::2])
    for _ in range(limit):
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    return bool(brackets)


def check_body(body: bytes) -> None:
    """Raise `InvalidJSON` for bad UTF-8 (a decoder does not look into fields that it skips) and for deep nesting."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as exc:
            raise InvalidJSON(f"the body is not UTF-8: byte {exc.start} is {body[exc.start]:#04x}") from None
    if nests_deeper(body):
        raise InvalidJSON(f"the body nests deeper than {MAX_DEPTH} levels")


def check_numbers(text: bytes) -> None:
    """Raise `InvalidJSON` if a number in a text that will be decoded later is out of range. About 2 us per KB."""
    shapes = text.translate(_SHAPES, b"+")
    if b"e000" in shapes or _LONG_NUMBER in shapes:
        decode(text)  # a large exponent, or words that look like one: only a full decode can tell


def decode(text: bytes | str) -> JSON:
    """The value of a JSON text; `InvalidJSON` for anything that is not strictly JSON within `MAX_DEPTH`."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if nests_deeper(raw):
        raise InvalidJSON(f"the JSON nests deeper than {MAX_DEPTH} levels")
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidJSON(str(exc)) from None
    except RecursionError:
        raise InvalidJSON("the JSON nests too deep") from None


def _whole_number(literal: str) -> float | int:
    value = float(literal)
    return int(value) if value.is_integer() else value


_canonical_decoder = msgspec.json.Decoder(float_hook=_whole_number)
_canonical_encoder = msgspec.json.Encoder(order="sorted")


def digest(text: bytes) -> bytes:
    """16 bytes that stand for these very bytes."""
    return hashlib.blake2b(text, digest_size=16).digest()


def canonical_digest(text: bytes) -> bytes:
    """16 bytes that stand for the JSON value: white space, key order, escapes and 1 against 1.0 make no difference."""
    return digest(_canonical_encoder.encode(_canonical_decoder.decode(text)))


# ---------------------------------------------------------------- out


def _hook(value: object) -> JSON:
    converted = _convert(value)
    if converted is value:
        raise TypeError(type(value).__name__)
    return converted


_encoder = msgspec.json.Encoder(enc_hook=_hook, decimal_format="number")


def encode_strict(value: object) -> bytes:
    """JSON of plain data; raises what msgspec raises. For our own messages only."""
    return _encoder.encode(value)


def encode(value: object, path: str = "$") -> tuple[bytes, list[str]]:
    """JSON of any value, and what had to be left out or changed in meaning, one line each. Never raises.

    NumPy scalars, tuples, sets, datetimes, UUIDs, Decimals, enums, dataclasses and Structs become what they mean;
    NaN and infinities become null and are named; an object without a meaning in JSON becomes its type's name in
    angle brackets and is named; lone surrogates become U+FFFD.
    """
    try:
        text = _encoder.encode(value)
    except Exception:
        return _encode_slowly(value, path)
    if b"null" in text and _has_non_finite(value):
        return _encode_slowly(value, path)
    if nests_deeper(text):
        return _encode_slowly(value, path)
    return text, []


def _encode_slowly(value: object, path: str) -> tuple[bytes, list[str]]:
    problems: list[str] = []
    return _encoder.encode(plain(value, path, problems)), problems


def _has_non_finite(value: object) -> bool:
    """Whether a float that JSON cannot hold (msgspec writes null for it) hides in the value."""
    todo: list[object] = [value]
    while todo:
        item = todo.pop()
        if type(item) is str or item is None:
            continue
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo.extend(item)
        elif isinstance(item, decimal.Decimal):
            if not item.is_finite():
                return True
        elif not isinstance(item, (int, bytes, bytearray, memoryview, msgspec.Raw)):
            converted = _convert(item)
            if converted is not item:
                todo.append(converted)
    return False


def plain(value: object, path: str = "$", problems: list[str] | None = None) -> JSON:
    """A copy of dicts with str keys, lists, str, int, finite float, bool and None; `problems` names what was lost."""
    return _plain(value, path, [] if problems is None else problems, 0, set())


def _plain(value: object, path: str, problems: list[str], depth: int, above: set[int]) -> JSON:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, int):
        return _plain_int(value, path, problems)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        problems.append(f"{path} is {value!r}, which JSON cannot hold")
        return None
    if depth >= MAX_DEPTH - 2:
        problems.append(f"{path} nests deeper than {MAX_DEPTH} levels")
        return None
    if id(value) in above:
        problems.append(f"{path} contains itself")
        return None
    above.add(id(value))
    try:
        return _plain_container(value, path, problems, depth, above)
    finally:
        above.discard(id(value))


def _plain_container(value: object, path: str, problems: list[str], depth: int, above: set[int]) -> JSON:
    if isinstance(value, msgspec.Raw):
        return _plain(decode(bytes(value)), path, problems, depth, above)
    if isinstance(value, Mapping):
        return {_clean(_key(k)): _plain(v, f"{path}.{_key(k)}", problems, depth + 1, above) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v, f"{path}[{i}]", problems, depth + 1, above) for i, v in enumerate(value)]
    try:
        converted = _convert(value)
    except Exception as exc:
        problems.append(f"{path} is a {type(value).__name__} that could not be converted ({type(exc).__name__})")
        return f"<{type(value).__name__}>"
    if converted is not value:
        return _plain(converted, path, problems, depth + 1, above)
    problems.append(f"{path} is a {type(value).__name__}, which JSON cannot hold")
    return f"<{type(value).__name__}>"


def _plain_int(value: int, path: str, problems: list[str]) -> JSON:
    if value.bit_length() <= 1023:
        return int(value)
    problems.append(f"{path} is an integer of {value.bit_length()} bits")
    return None


def _key(key: object) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, enum.Enum):
        return _key(key.value)
    return "null" if key is None else str(key).lower() if isinstance(key, bool) else str(key)


def _clean(text: str) -> str:
    """The text without lone surrogates, which no UTF-8 can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return str(text)


def _convert(value: object) -> object:
    """What the value means in JSON, one layer deep; the value itself if it means nothing."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, decimal.Decimal):
        if not value.is_finite():
            return float(value)
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, msgspec.Struct):
        return {f: getattr(value, f) for f in value.__struct_fields__ if getattr(value, f) is not msgspec.UNSET}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return _convert_by_shape(value)


def _convert_by_shape(value: object) -> object:
    """Objects of libraries that are not imported here, told by the methods they are known for."""
    if isinstance(value, type):
        return value
    for method in ("model_dump", "tolist", "item"):  # Pydantic; NumPy and array libraries; one-element tensors
        call = getattr(value, method, None)
        if callable(call):
            converted = call()
            return value if converted is value else converted
    if isinstance(value, Iterable) and hasattr(value, "__len__"):
        return list(value)
    return value
