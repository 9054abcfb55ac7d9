"""JSON at the edge: what comes in is checked once, what goes out is always valid.

In: `check_body()` finds, at C speed and without building anything, what a decoder lets through: bad UTF-8 in a field
that it skips, and nesting beyond `MAX_DEPTH`. Out: `encode()` is one call of the encoder when the value is plain, and
falls back to `plain()`, which converts what has a meaning in JSON and names the rest.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import hashlib
import itertools
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from rollout.errors import InvalidJSON

JSON: TypeAlias = Any
"""A decoded JSON value."""

MAX_DEPTH = 100
"""How deep JSON may nest, in and out (PROTOCOL, Errors)."""

MAX_SLOW_NUMBERS = 2_000
"""How many numbers like 1e300 one text may hold: the decoder takes 15 us for each, 200 times what others take."""

MAX_CONTAINERS = 1_000_000
"""How many objects and arrays one body may hold: each costs more than a hundred bytes of text do."""

_SMALL_BYTES = 32 * 1024
_ALL = set(range(256))
_NOT_STRUCTURE = bytes(_ALL - set(b'[]{}"'))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_SLOW_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|([0-9][eE]\+?0*[2-9][0-9]{2,})', re.DOTALL)
"""A string, or (as a group) the end of a number from 1e200 on; possessive, so that no text makes it step back."""


def nests_deeper(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Whether the JSON text nests deeper than `limit`; of a text that is not JSON the answer means nothing.

    No parser and no recursion that a hostile text could exhaust: everything but brackets and quotes is cut out, the
    strings go (nearly all are then an empty pair of quotes), and the innermost pairs are removed layer by layer.
    """
    if len(text) <= 2 * limit:
        return False
    brackets = text.translate(None, _NOT_STRUCTURE)
    if brackets.count(b"[") + brackets.count(b"{") <= limit:
        return False
    brackets = _outside_strings(text, brackets)
    for _ in range(limit):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    return bool(brackets)


def _outside_strings(text: bytes, structure: bytes) -> bytes:
    """The brackets of the text that are not in strings, all of them square; `structure` is its brackets and quotes."""
    if b"\\" in text:
        structure = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_STRUCTURE)
    brackets = structure.replace(b'""', b"").translate(_SQUARE)
    return b"".join(brackets.split(b'"')[::2]) if b'"' in brackets else brackets


def holds_too_many_containers(text: bytes, limit: int = MAX_CONTAINERS) -> bool:
    """Whether the JSON text holds more objects and arrays than `limit`; costs nothing for a text that cannot."""
    if len(text) <= 2 * limit:
        return False
    structure = text.translate(None, _NOT_STRUCTURE)
    if structure.count(b"[") + structure.count(b"{") <= limit:
        return False
    return _outside_strings(text, structure).count(b"[") > limit


def is_slow_to_decode(text: bytes) -> bool:
    """Whether the JSON text holds more than `MAX_SLOW_NUMBERS` numbers that take the decoder's slow path.

    A few kilobytes of them pass unseen: looking would cost every text more than they do. Larger texts are counted at
    C speed with all digits made alike; words such as "file123" look the same then, so many of those are looked at
    once more, strings left out.
    """
    if len(text) <= _SMALL_BYTES or text.translate(_ALIKE, b"+").count(b"e000") <= MAX_SLOW_NUMBERS:
        return False
    slow = (found for found in _SLOW_NUMBER.finditer(text) if found.lastindex)
    return next(itertools.islice(slow, MAX_SLOW_NUMBERS, None), None) is not None


def check_body(body: bytes) -> None:
    """Raise `InvalidJSON` for bad UTF-8 (a decoder does not look into fields that it skips) and for deep nesting."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as exc:
            raise InvalidJSON(f"the body is not UTF-8: byte {exc.start} is {body[exc.start]:#04x}") from None
    if nests_deeper(body):
        raise InvalidJSON(f"the body nests deeper than {MAX_DEPTH} levels")


def decode(text: bytes | str) -> JSON:
    """The value of a JSON text; `InvalidJSON` for anything that is not strictly JSON within `MAX_DEPTH`."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if nests_deeper(raw):
        raise InvalidJSON(f"the JSON nests deeper than {MAX_DEPTH} levels")
    if is_slow_to_decode(raw):
        raise InvalidJSON(f"the JSON holds more than {MAX_SLOW_NUMBERS} numbers with such exponents as 1e300")
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidJSON(str(exc)) from None
    except RecursionError:
        raise InvalidJSON("the JSON nests too deep") from None


def _whole_number(literal: str) -> float | int:
    value = float(literal)
    return int(value) if -(2.0**63) < value < 2.0**63 and value.is_integer() else value


_canonical_decoder = msgspec.json.Decoder(float_hook=_whole_number)
_canonical_encoder = msgspec.json.Encoder(order="sorted")


def digest(text: bytes) -> bytes:
    """16 bytes that stand for these very bytes."""
    return hashlib.sha256(text).digest()[:16]  # has instructions of its own in today's processors


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
_skip = msgspec.json.Decoder(msgspec.Raw).decode


def is_json(text: bytes) -> bool:
    """Whether the text is JSON. Builds nothing, so it costs a small part of what encoding the text did."""
    try:
        _skip(text)
        return text.isascii() or bool(text.decode())
    except (ValueError, RecursionError):
        return False


def encode_strict(value: object) -> bytes:
    """JSON of plain data; raises what msgspec raises. For our own messages only."""
    return _encoder.encode(value)


def encode(value: object, path: str = "$") -> tuple[bytes, list[str]]:
    """JSON of any value, and what had to be left out or changed in meaning, one line each. Never raises.

    NumPy scalars, tuples, sets, datetimes, UUIDs, Decimals, enums, dataclasses and Structs become what they mean;
    NaN and infinities become null and are named; an object without a meaning in JSON becomes its type's name in
    angle brackets and is named; lone surrogates become U+FFFD. A `msgspec.Raw` is taken at its word.
    """
    try:
        text = _encoder.encode(value)
        if not (b"null" in text and _has_non_finite(value)) and not nests_deeper(text) and not _overflows(text):
            return text, []
    except BaseException:  # an object may raise anything, SystemExit too, when it is asked what it means
        text = b""  # of whatever kind it was: the slow way finds out which part of the value is to blame
    return _encode_plain(value, path)


def encode_checked(value: object, path: str = "$") -> tuple[bytes, list[str]]:
    """As `encode()`, but no `msgspec.Raw` is taken at its word: one that is not JSON is named and left out."""
    text, problems = encode(value, path)
    return (text, problems) if problems or is_json(text) else _encode_plain(value, path)


def _encode_plain(value: object, path: str) -> tuple[bytes, list[str]]:
    problems: list[str] = []
    return _encoder.encode(plain(value, path, problems)), problems


def _overflows(text: bytes) -> bool:
    """Whether a Decimal beyond what a double holds was written; only those are written with a capital E."""
    if b"E+" not in text:
        return False
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return True
    return False


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
    if value is None or value is True or value is False:
        return value
    try:
        if isinstance(value, str):
            return _clean(value)
        if isinstance(value, int):
            return _plain_int(value, path, problems)
        if isinstance(value, float):
            return _plain_float(value, path, problems)
    except BaseException as exc:
        return _lost(value, path, problems, exc)
    if depth >= MAX_DEPTH - 2:
        problems.append(f"{path} nests deeper than {MAX_DEPTH} levels")
        return None
    if id(value) in above:
        problems.append(f"{path} contains itself")
        return None
    above.add(id(value))
    try:
        return _plain_container(value, path, problems, depth, above)
    except BaseException as exc:
        return _lost(value, path, problems, exc)
    finally:
        above.discard(id(value))


def _lost(value: object, path: str, problems: list[str], exc: BaseException) -> str:
    """What stands for an object that raises when it is looked at."""
    kind = type(value).__name__
    problems.append(f"{path} is a {kind} that could not be converted ({type(exc).__name__})")
    return f"<{kind}>"


def _plain_container(value: object, path: str, problems: list[str], depth: int, above: set[int]) -> JSON:
    if isinstance(value, msgspec.Raw):
        return _plain(decode(bytes(value)), path, problems, depth, above)
    if isinstance(value, Mapping):
        named = [(_key(k), v) for k, v in value.items()]
        return {k: _plain(v, f"{path}.{k}", problems, depth + 1, above) for k, v in named}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v, f"{path}[{i}]", problems, depth + 1, above) for i, v in enumerate(value)]
    converted = _convert(value)
    if converted is not value:
        return _plain(converted, path, problems, depth + 1, above)
    problems.append(f"{path} is a {type(value).__name__}, which JSON cannot hold")
    return f"<{type(value).__name__}>"


def _plain_float(value: float, path: str, problems: list[str]) -> JSON:
    if math.isfinite(value):
        return float(value)
    problems.append(f"{path} is {value!r}, which JSON cannot hold")
    return None


def _plain_int(value: int, path: str, problems: list[str]) -> JSON:
    if value.bit_length() <= 1023:
        return int(value)
    problems.append(f"{path} is an integer of {value.bit_length()} bits")
    return None


def _key(key: object) -> str:
    if isinstance(key, str):
        return _clean(key)
    if key is None or isinstance(key, bool):
        return "null" if key is None else str(key).lower()
    converted = key if isinstance(key, (int, float, tuple)) and not isinstance(key, enum.Enum) else _convert(key)
    return str(key) if converted is key else _key(converted)


def _clean(text: str) -> str:
    """The text without lone surrogates, which no UTF-8 can carry; a plain str, whatever a subclass says of itself."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return str.__str__(text)


def _convert(value: object) -> object:
    """What the value means in JSON, one layer deep and as msgspec has it; the value itself if it means nothing."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, decimal.Decimal):
        return float(value) if value.is_nan() or value != value.to_integral_value() else _whole_decimal(value)
    if isinstance(value, _TEXTS):
        return msgspec.to_builtins(value)
    if isinstance(value, msgspec.Struct):
        return _fields_of_struct(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name, msgspec.UNSET) for f in dataclasses.fields(value)}
        return {name: field for name, field in found.items() if field is not msgspec.UNSET}
    if isinstance(value, Mapping):
        return dict(value)
    return _convert_by_shape(value)


_TEXTS = (
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    bytes,
    bytearray,
    memoryview,
)
"""What msgspec writes as a text."""


_BUILT_IN = (dict, list, tuple, str, int, float, bool, type(None), decimal.Decimal, *_TEXTS)


def _whole_decimal(value: decimal.Decimal) -> float | int:
    """Never the billion digits that Decimal("1e999999999") would have as an integer."""
    return int(value) if value.is_finite() and value.adjusted() <= 308 else math.copysign(math.inf, value)


def _fields_of_struct(value: msgspec.Struct) -> dict[str, object]:
    """Under the names, and without the defaults, that the encoder would have used."""
    config, defaults = value.__struct_config__, value.__struct_defaults__
    found: dict[str, object] = {}
    if config.tag_field is not None:
        found[config.tag_field] = config.tag
    required = len(value.__struct_fields__) - len(defaults)
    for i, (name, written) in enumerate(zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)):
        field = getattr(value, name, msgspec.UNSET)
        default = defaults[i - required] if i >= required else msgspec.NODEFAULT
        if field is not msgspec.UNSET and not (config.omit_defaults and _is_default(field, default)):
            found[written] = field
    return found


def _is_default(field: object, default: object) -> bool:
    return field is default or (not field and getattr(default, "factory", None) is type(field))


def _convert_by_shape(value: object) -> object:
    """Objects of libraries that are not imported here, told by the methods they are known for.

    A mock has every method, and each gives back another mock: only what Python itself knows counts as a meaning.
    """
    if isinstance(value, type):
        return value
    for method in ("model_dump", "tolist", "item"):  # Pydantic; NumPy and array libraries; one-element tensors
        call = getattr(value, method, None)
        if callable(call):
            converted = call()
            return converted if issubclass(type(converted), _BUILT_IN) else value
    if isinstance(value, Iterable) and hasattr(value, "__len__"):
        return list(value)
    return value
