"""PROTOCOL section 2, status 400: what is not JSON, and how deep and large its values may be."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from served import Chat, Served, body_of, insert, post, serving

from rollout.testing import MockTrainer, make_request

pytestmark = [pytest.mark.usefixtures("no_tracebacks"), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Served]:
    """One for all: what is refused leaves nothing behind."""
    async with MockTrainer() as trainer, serving(Chat(), trainer) as running:
        yield running


# ---------------------------------------------------------------- 400: not JSON

NOT_JSON = {
    "nothing": b"",
    "blank": b" \n",
    "cut": b'{"rollout_id": "r"',
    "text": b"hello",
    "form": b"rollout_id=r",
    "single quotes": b"{'a': 1}",
    "trailing comma": b'{"a": 1,}',
    "comment": b'{"a": 1} // no',
    "two documents": b"{}{}",
    "trailing text": b"{} x",
    "trailing NUL": b"{}\x00",
    "NUL": b"\x00",
    "bare key": b"{a: 1}",
    "hex": b'{"a": 0x1}',
    "leading zero": b'{"a": 01}',
    "plus": b'{"a": +1}',
    "point": b'{"a": 1.}',
    "raw newline in a string": b'{"a": "\n"}',
    "bad escape": b'{"a": "\\x41"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "UTF-32": '{"a": 1}'.encode("utf-32-le"),
    "undefined": b"undefined",
    "NaN alone": b"NaN",
    "closing": b"}",
    "array cut": b"[1, 2",
    "only quotes": b'"',
    "deep and cut": b"[" * 100_000,
    "deep and closed": b"[" * 5000 + b"]" * 5000,
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "deep in text": b'{"rollout_id":' + b"[" * 2000 + b"]" * 2000 + b"}",
}


@pytest.mark.parametrize("path", ["/init", "/cancel"])
@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
async def test_what_is_not_json_is_400(server: Served, path: str, body: bytes) -> None:
    answer = await server.call("POST", path, body)
    assert (answer.status, answer.json["code"]) == (400, "invalid_json")


IN_A_MEMBER = {
    "bad UTF-8": b'"\xff"',
    "overlong": b'"\xc0\x80"',
    "cut UTF-8": b'"\xe4\xb8"',
    "encoded surrogate": b'"\xed\xa0\x80"',
    "lone surrogate": b'"\\ud83e"',
    "lone low surrogate": b'"\\udc00 x"',
    "swapped surrogates": b'"\\udc00\\ud800"',
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "101 levels": b"[" * 100 + b"]" * 100,
    "101 levels of objects": b'{"a":' * 100 + b"1" + b"}" * 100,
    "raw control character": b'"\x01"',
}
PLACES = {
    "unknown field": b'"zz": %s',
    "metadata": b'"metadata": {"k": %s}',
    "message": b'"messages": [{"role": "user", "k": %s}]',
    "params": b'"completion_params": {"k": %s}',
    "known field": b'"tool_server_url": %s',
    "key": b"%s: 1",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("value", IN_A_MEMBER.values(), ids=IN_A_MEMBER)
async def test_what_is_not_json_is_400_wherever_it_stands(server: Served, place: bytes, value: bytes) -> None:
    fields = {"messages": [], "completion_params": {}}
    good = {k: v for k, v in make_request(server_url=server.trainer.url, **fields).items() if k.encode() not in place}
    answer = await server.call("POST", "/init", insert(msgspec.json.encode(good), place % value))
    assert (answer.status, answer.json["code"]) == (400, "invalid_json")
    assert (await server.get("/health")).json["active_rollouts"] == 0


async def test_not_json_counts_before_a_misfit_in_front_of_it(server: Served) -> None:
    for tail in (
        b',"a": NaN}',
        b',"a": "\xff"}',
        b"} x",
        b"",
        b',"a": "\\ud800"}',
        b',"a":' + b"[" * 120 + b"]" * 120 + b"}",
    ):
        assert await post(server, b'{"rollout_id": 1' + tail) == (400, "invalid_json")


async def test_a_bom_is_400(server: Served) -> None:
    assert await post(server, b"\xef\xbb\xbf" + body_of(server)) == (400, "invalid_json")
    assert (await server.call("POST", "/cancel", b'\xef\xbb\xbf{"ids":[]}')).status == 400


@pytest.mark.parametrize(
    ("place", "outer"),
    [(b'"zz": %s', 1), (b'"metadata": {"k": %s}', 2), (b'"messages": [{"role":"user","k": %s}]', 3),
     (b'"completion_params": {"k": %s}', 2)],
    ids=["unknown field", "metadata", "message", "params"],
)  # fmt: skip
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
async def test_json_may_nest_exactly_100_levels(
    server: Served, place: bytes, outer: int, opening: bytes, closing: bytes
) -> None:
    fields = {"messages": [], "completion_params": {}}
    for levels, expected in ((100, 202), (101, 400)):
        request = make_request(server_url=server.trainer.url, **fields)
        rest = msgspec.json.encode({k: v for k, v in request.items() if k.encode() not in place})
        inner = opening * (levels - outer) + (b"0" if opening != b"[" else b"") + closing * (levels - outer)
        assert (await post(server, insert(rest, place % inner)))[0] == expected
        if expected == 202:
            assert (await server.result(request["rollout_id"]))["status"] == "COMPLETED"


async def test_brackets_in_texts_are_no_levels(server: Served) -> None:
    texts = ["[" * 500, '"[{' * 200, "\\" * 301 + "[" * 300, '\\"' * 99 + "{" * 200, "]}" * 300]
    messages = [{"role": "user", "content": text, text: 1} for text in texts]
    assert (await server.post_init(messages=messages, metadata={"t": texts})).status == 202


NUMBERS = {
    "huge exponent": b"1e999",
    "negative huge exponent": b"-1e999",
    "many digits": b"9" * 400,
    "5000 digits": b"9" * 5000,
    "digits and exponent": b"9" * 300 + b"e99",
}


@pytest.mark.parametrize("place", [p for p in PLACES.values() if b"metadata" in p or b"message" in p or b"param" in p])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
async def test_numbers_out_of_range_are_400_or_422_or_taken_as_they_are(
    server: Served, place: bytes, number: bytes
) -> None:
    fields = {"messages": [], "completion_params": {}}
    request = make_request(server_url=server.trainer.url, **fields)
    good = {k: v for k, v in request.items() if k.encode() not in place}
    answer = await server.call("POST", "/init", insert(msgspec.json.encode(good), place % number))
    if number == b"9" * 400:  # an integer, and JSON has no bound for those
        assert answer.status in (202, 400, 422)
    else:
        assert answer.status in (400, 422)
    if answer.status == 202:
        assert (await server.result(request["rollout_id"]))["status"] in ("COMPLETED", "ERROR")


@pytest.mark.parametrize("field", ["max_turns", "max_tokens_total", "timeout_seconds"])
@pytest.mark.parametrize(
    "number", [b"1e999", b"-1e999", b"1e400", b"9" * 5000, b"9" * 400], ids=lambda n: n[:6].decode()
)
async def test_a_number_field_out_of_range_is_400_or_422_or_harmless(server: Served, field: str, number: bytes) -> None:
    body = insert(
        body_of(server, rollout_id=f"{field}-{len(number)}{number[:3]!r}"), b'"%s": %s' % (field.encode(), number)
    )
    code, _ = await post(server, body)
    assert code in (400, 422) or (field != "timeout_seconds" and number == b"9" * 400)
    if code == 202:
        assert (await server.get("/health")).status == 200
