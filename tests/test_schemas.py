"""The messages of the protocol: what `/init` and `/cancel` take, what they refuse, and what an agent gets to see."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from rollout.errors import InvalidJSON, InvalidRequest
from rollout.requests import InitRequest, callback_url, parse_cancel, parse_init, parse_url
from rollout.schemas import (
    DEFAULT_MAX_METADATA_SIZE_BYTES,
    MAX_ID_LENGTH,
    CancelRequest,
    CompletionsRequest,
    OpenAIFunctionPropertySchema,
    RolloutMetrics,
    RolloutResponse,
    RolloutStatus,
    error_body,
    get_max_metadata_size_bytes,
    set_max_metadata_size_bytes,
)
from rollout.testing import make_request
from rollout.wire import decode, encode_strict

LIMIT = DEFAULT_MAX_METADATA_SIZE_BYTES


def parse(**fields: Any) -> InitRequest:
    """A valid request with these fields in place of its own."""
    return parse_init(encode_strict(make_request(**fields)), LIMIT)


# ---------------------------------------------------------------- any bytes, any JSON

TEXT = st.text(max_size=6)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(InitRequest.__struct_fields__)
ODD_LITERALS = [
    "NaN",
    "1e999",
    "-1e999",
    "9" * 400,
    '"\\ud800"',
    "[" * 150 + "]" * 150,
    '[{"a":' * 60 + "1" + "}]" * 60,
]


def check_parse(body: bytes) -> None:
    try:
        request = parse_init(body, LIMIT)
    except (InvalidJSON, InvalidRequest) as exc:
        decode(error_body(exc.code, exc.detail))
        return
    assert decode(encode_strict(request.view().metadata)) == request.view().metadata
    assert request.endpoints().chat.host
    request.tool_endpoint()


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=60) | TEXT.map(str.encode))
def test_any_bytes_make_a_request_or_one_of_two_errors(body: bytes) -> None:
    check_parse(body)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS) | TEXT, JSON_VALUES, max_size=5))
def test_any_value_in_any_field_makes_a_request_or_one_of_two_errors(fields: dict[str, Any]) -> None:
    check_parse(json.dumps(make_request(**fields)).encode())


@pytest.mark.parametrize("field", [*FIELDS, "unknown"])
@pytest.mark.parametrize("literal", ODD_LITERALS, ids=lambda text: text[:12])
@pytest.mark.parametrize("around", ["%s", '{"a":%s}', '[{"a":%s}]'])
def test_odd_literals_make_a_request_or_one_of_two_errors(field: str, literal: str, around: str) -> None:
    body = json.dumps(make_request(**{field: "@"})).replace('"@"', around % literal).encode()

    check_parse(body)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_a_damaged_request_makes_a_request_or_one_of_two_errors(at: int, damage: bytes) -> None:
    body = bytearray(encode_strict(make_request(metadata={"é": [1.5e3, "x"]}, unknown="ü")))
    body[at : at + len(damage)] = damage

    check_parse(bytes(body))


# ---------------------------------------------------------------- what is well formed arrives

VALID = st.fixed_dictionaries(
    {
        "rollout_id": st.text(min_size=1, max_size=MAX_ID_LENGTH).filter(str.strip),
        "server_url": st.sampled_from(["http://trainer:8080", "https://[::1]:1/deep/path/", "http://a.example"]),
        "messages": st.lists(st.dictionaries(TEXT, JSON_VALUES, max_size=3), max_size=3),
        "completion_params": st.dictionaries(TEXT, JSON_VALUES, max_size=3),
    },
    optional={
        "tool_server_url": st.none() | st.just("http://tools/path?query=1"),
        "max_turns": st.integers(1, 2**40),
        "max_tokens_total": st.integers(1, 2**40),
        "metadata": st.dictionaries(TEXT, JSON_VALUES, max_size=3),
        "api_key": st.none() | st.from_regex(r"[!-~]{1,20}", fullmatch=True),
        "llm_api_key": st.none() | st.from_regex(r"[!-~]{1,20}", fullmatch=True),
        "idempotency_key": st.none() | st.text(min_size=1, max_size=MAX_ID_LENGTH).filter(str.strip),
        "chat_completions_url": st.none() | st.just("https://llm/v1/chat?key=1"),
        "completion_callback_url": st.none() | st.just("https://cb/done"),
        "timeout_seconds": st.none() | st.floats(0.001, 1e9),
    },
)
DEFAULTS = {"max_turns": 10, "max_tokens_total": 8192, "metadata": {}}


@settings(max_examples=30, deadline=None)
@given(VALID)
def test_a_valid_request_reaches_the_agent_unchanged(fields: dict[str, Any]) -> None:
    request = parse_init(json.dumps(fields).encode(), LIMIT)

    view = request.view()
    for name in FIELDS:
        assert getattr(view, name) == fields.get(name, DEFAULTS.get(name))
    assert request.key == fields.get("idempotency_key") or fields["rollout_id"]


@settings(max_examples=30, deadline=None)
@given(VALID)
def test_unknown_fields_are_ignored(fields: dict[str, Any]) -> None:
    extended = {"unknown": [1], **fields, "zz": {"a": None}}

    assert parse_init(json.dumps(extended).encode(), LIMIT) == parse_init(json.dumps(fields).encode(), LIMIT)


@pytest.mark.parametrize("field", sorted(set(FIELDS) - {"rollout_id", "server_url", "messages", "completion_params"}))
def test_null_for_an_optional_field_is_as_if_absent(field: str) -> None:
    base = make_request(rollout_id="r")

    with_null = parse_init(json.dumps({**base, field: None}).encode(), LIMIT)

    assert with_null.view() == parse_init(json.dumps(base).encode(), LIMIT).view()


@pytest.mark.parametrize("field", ["idempotency_key", "api_key", "llm_api_key", "tool_server_url"])
def test_blank_texts_count_as_absent(field: str) -> None:
    assert getattr(parse(**{field: "  "}), field) is None


def test_keys_lose_the_blanks_around_them() -> None:
    request = parse(api_key=" key\n", llm_api_key="\tother ")

    assert (request.api_key, request.llm_api_key) == ("key", "other")


# ---------------------------------------------------------------- what is refused, and where it was


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"rollout_id": ""}, "$.rollout_id"),
        ({"rollout_id": " \t"}, "$.rollout_id"),
        ({"rollout_id": "x" * 257}, "$.rollout_id"),
        ({"rollout_id": 1}, "$.rollout_id"),
        ({"rollout_id": UNSET}, "rollout_id"),
        ({"messages": UNSET}, "messages"),
        ({"messages": None}, "$.messages"),
        ({"messages": {}}, "$.messages"),
        ({"messages": [{}, 1]}, "$.messages[1]"),
        ({"messages": ["hi"]}, "$.messages[0]"),
        ({"completion_params": UNSET}, "completion_params"),
        ({"completion_params": None}, "$.completion_params"),
        ({"completion_params": []}, "$.completion_params"),
        ({"metadata": []}, "$.metadata"),
        ({"metadata": "x"}, "$.metadata"),
        ({"max_turns": 0}, "$.max_turns"),
        ({"max_turns": 1.5}, "$.max_turns"),
        ({"max_turns": True}, "$.max_turns"),
        ({"max_tokens_total": -1}, "$.max_tokens_total"),
        ({"timeout_seconds": 0}, "$.timeout_seconds"),
        ({"timeout_seconds": "5"}, "$.timeout_seconds"),
        ({"idempotency_key": "x" * 257}, "$.idempotency_key"),
        ({"api_key": "ключ"}, "$.api_key"),
        ({"llm_api_key": "two\r\nlines"}, "$.llm_api_key"),
        ({"server_url": UNSET}, "server_url"),
        ({"server_url": ""}, "$.server_url"),
        ({"server_url": UNSET, "chat_completions_url": "http://a"}, "server_url"),
        ({"server_url": UNSET, "completion_callback_url": "http://a"}, "server_url"),
        ({"chat_completions_url": "ftp://a"}, "$.chat_completions_url"),
        ({"completion_callback_url": "a"}, "$.completion_callback_url"),
        ({"tool_server_url": "a"}, "$.tool_server_url"),
    ],
    ids=str,
)
def test_a_refusal_names_the_field(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)

    assert where in refused.value.detail


def test_no_refusal_repeats_a_secret() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(api_key="s3cret-ключ")

    assert "s3cret" not in refused.value.detail


@pytest.mark.parametrize("tail", ["}", " {}", ",", '{"a":\xff'])
def test_text_after_the_schema_broke_is_still_no_json(tail: str) -> None:
    with pytest.raises(InvalidJSON):
        parse_init(b'{"rollout_id": 1}' + tail.encode("latin-1"), LIMIT)


def test_metadata_is_measured_as_it_came() -> None:
    body = json.dumps(make_request(metadata={"a": "x" * 10})).encode()
    size = len('{"a": "xxxxxxxxxx"}')

    assert parse_init(body, size).view().metadata == {"a": "x" * 10}
    with pytest.raises(InvalidRequest, match=f"{size} bytes of JSON, more than the limit of {size - 1}"):
        parse_init(body, size - 1)


URLS = [
    ("http://trainer", True, True),
    ("HTTP://trainer:8080/base/", True, True),
    ("https://[2001:db8::1]:8443/x", True, True),
    ("http://münchen.example/", True, True),
    ("http://trainer/path@with/at", True, True),
    ("http://trainer/?q=1", False, True),
    ("http://trainer?", False, True),
    ("http://trainer/#fragment", False, False),
    ("http://user@trainer", False, False),
    ("http://user:secret@trainer", False, False),
    ("http://:@trainer", False, False),
    ("http://", False, False),
    ("http:///path", False, False),
    ("http://:80", False, False),
    ("http://trainer:0", False, False),
    ("http://trainer:65536", False, False),
    ("http://trainer:port", False, False),
    ("http://[::1", False, False),
    ("ftp://trainer", False, False),
    ("//trainer", False, False),
    ("trainer:8080", False, False),
    ("/v1", False, False),
    ("", False, False),
    (" http://trainer", False, False),
    ("http://tra iner", False, False),
    ("http://trainer/\n", False, False),
    ("http://trainer\\@evil", False, False),
    ("http://trainer/\x7f", False, False),
    ("javascript:alert(1)", False, False),
    ("http://" + "a" * 254, False, False),
    ("http://a/" + "x" * 8192, False, False),
]


@pytest.mark.parametrize(("text", "as_base", "as_full"), URLS, ids=[text[:40] for text, _, _ in URLS])
def test_which_urls_may_be_called(text: str, as_base: bool, as_full: bool) -> None:
    for base, allowed in ((True, as_base), (False, as_full)):
        if allowed:
            assert parse_url(text, "field", base=base).host
        else:
            with pytest.raises(InvalidRequest, match=r"at `\$\.field`$"):
                parse_url(text, "field", base=base)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=20), st.sampled_from(["", "http://", "https://", "http://[", "http://a:"]), st.booleans())
def test_any_text_is_a_url_to_call_or_refused(text: str, start: str, base: bool) -> None:
    try:
        url = parse_url(start + text, "field", base=base)
    except InvalidRequest:
        return
    assert url.scheme in ("http", "https")
    assert url.host
    assert url.port
    assert url.user is None
    assert callback_url(str(url)) == url


@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_callbacks_go_below_the_server_url(slashes: str) -> None:
    endpoints = parse(server_url="http://trainer:81/base" + slashes).endpoints()

    assert str(endpoints.chat) == "http://trainer:81/base/v1/chat/completions"
    assert str(endpoints.completed) == "http://trainer:81/base/v1/rollout/completed"


def test_full_urls_replace_those_made_from_the_server_url() -> None:
    chat = parse(chat_completions_url="https://llm/chat?a=1").endpoints()
    done = parse(completion_callback_url="https://cb/done").endpoints()
    both = parse(server_url=UNSET, chat_completions_url="https://l/", completion_callback_url="https://c/").endpoints()

    assert (str(chat.chat), chat.completed.path) == ("https://llm/chat?a=1", "/v1/rollout/completed")
    assert (done.chat.path, str(done.completed)) == ("/v1/chat/completions", "https://cb/done")
    assert (str(both.chat), str(both.completed)) == ("https://l/", "https://c/")


# ---------------------------------------------------------------- views


def test_views_share_nothing_that_can_be_changed() -> None:
    request = parse(metadata={"a": [1]}, completion_params={"stop": ["x"]})
    one, other = request.view(), request.view()

    one.messages.append({"role": "user"})
    one.messages[0]["content"] = "changed"
    one.completion_params["stop"].append("y")
    one.metadata["a"].append(2)
    one.metadata = {}
    one.max_turns = 99

    for view in (other, request.view()):
        assert view.messages == [{"role": "user", "content": "What is 2 + 2?"}]
        assert view.completion_params == {"stop": ["x"]}
        assert view.metadata == {"a": [1]}
        assert view.max_turns == 10


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))])
def test_a_view_can_be_copied_and_compared(duplicate: Callable[[Any], Any]) -> None:
    request = parse(rollout_id="r", metadata={"a": 1})

    twin = duplicate(request.view())

    assert twin == request.view()
    assert request.view() == twin
    assert msgspec.structs.asdict(twin)["metadata"] == {"a": 1}
    assert msgspec.structs.replace(twin, max_turns=3).max_turns == 3
    assert request.view() != parse(rollout_id="r", metadata={"a": 2}).view()


def test_what_is_printed_holds_neither_keys_nor_content() -> None:
    request = parse(rollout_id="r-1", api_key="s3cret", llm_api_key="s3cret", metadata={"a": "s3cret"})

    assert "s3cret" not in repr(request) + repr(request.view())
    assert "2 + 2" not in repr(request) + repr(request.view())
    assert "r-1" in repr(request)
    assert "r-1" in repr(request.view())


# ---------------------------------------------------------------- cancel


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (b'{"ids": ["a", "b"]}', "ids", ["a", "b"]),
        (b'{"ids": []}', "ids", []),
        (b'{"prefix": "a"}', "prefix", "a"),
        (b'{"all": true, "unknown": 1}', "all", True),
    ],
)
def test_a_cancel_says_what_it_means(body: bytes, field: str, value: Any) -> None:
    request = parse_cancel(body)

    assert getattr(request, field) == value
    assert sum(getattr(request, name) is not UNSET for name in CancelRequest.__struct_fields__) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"null",
        b'{"all": false}',
        b'{"all": null}',
        b'{"prefix": ""}',
        b'{"prefix": null}',
        b'{"ids": null}',
        b'{"ids": "a"}',
        b'{"ids": [1]}',
        b'{"ids": ["a"], "all": true}',
        b'{"ids": ["a"], "all": false}',
        b'{"ids": [], "prefix": "a"}',
        b'{"ids": null, "all": true}',
    ],
)
def test_a_cancel_that_means_nothing_or_two_things_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_cancel(body)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=30) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_make_a_cancel_or_one_of_two_errors(body: bytes) -> None:
    try:
        parse_cancel(body)
    except (InvalidJSON, InvalidRequest):
        return


@pytest.mark.parametrize("body", [b"", b"{", b'{"x": "\xff", "all": true}', b'{"ids": 1}}', b"[" * 2000])
def test_a_cancel_that_is_no_json_is_refused_as_such(body: bytes) -> None:
    with pytest.raises(InvalidJSON):
        parse_cancel(body)


# ---------------------------------------------------------------- what goes out


def test_absent_optional_fields_are_left_out() -> None:
    response = RolloutResponse(
        rollout_id="r", status=RolloutStatus.COMPLETED, final_messages=[], metrics=RolloutMetrics(), extra_fields={}
    )

    assert set(decode(encode_strict(response))) == {"rollout_id", "status", "final_messages", "metrics", "extra_fields"}


def test_a_property_schema_says_only_what_was_set() -> None:
    schema = OpenAIFunctionPropertySchema(type="string", any_of=[], const=None, min_length=0)

    assert decode(encode_strict(schema)) == {"type": "string", "anyOf": [], "const": None, "minLength": 0}


def test_a_completions_request_can_be_built_by_hand() -> None:
    request = CompletionsRequest(messages=[], rollout_id="r")

    assert (request.temperature, request.top_p, request.max_tokens, request.logprobs) == (1.0, 1.0, 512, True)


@given(st.text(alphabet=st.characters(codec=None, categories=None)))
def test_an_error_body_can_always_be_written(detail: str) -> None:
    assert decode(error_body("code", detail))["code"] == "code"


# ---------------------------------------------------------------- the metadata limit of the process


def test_the_metadata_limit_of_the_process_can_be_changed() -> None:
    before = get_max_metadata_size_bytes()
    try:
        set_max_metadata_size_bytes(5000)
        assert get_max_metadata_size_bytes() == 5000
    finally:
        set_max_metadata_size_bytes(before)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "1", None])
def test_a_metadata_limit_that_is_no_positive_number_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="positive number of bytes"):
        set_max_metadata_size_bytes(size)
