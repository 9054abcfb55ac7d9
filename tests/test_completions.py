"""One LLM call as text: what an answer means, what an error says, and when a history continues the one before."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.completions import (
    EXCERPT_CHARACTERS,
    CompletionsResult,
    History,
    SentMessages,
    encode_call,
    error_of,
    excerpt,
    usage_tokens,
)
from rollout.errors import BadCompletion, TrainerRefused, TrainerUnavailable
from rollout.testing import make_completion, make_tool_call
from rollout.wire import decode, encode

TEXT = st.text(max_size=4)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 0.5]) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]) | TEXT, JSON_VALUES, max_size=3)
MESSAGES = st.lists(MESSAGE, max_size=4)

CHOICE = st.fixed_dictionaries({"message": MESSAGE}, optional={"index": JSON_VALUES})


def result_of(body: Any) -> CompletionsResult:
    return CompletionsResult.from_body(body if isinstance(body, bytes) else json.dumps(body).encode())


def read_all(result: CompletionsResult) -> list[Any]:
    """Everything that an agent can ask an answer for."""
    names = ("message", "finish_reason", "content", "tool_calls", "has_tool_calls", "usage", "model")
    return [getattr(result, name) for name in (*names, "token_ids", "prompt_token_ids", "logprobs")] + [repr(result)]


# ---------------------------------------------------------------- answers


@settings(max_examples=30, deadline=None)
@given(
    st.binary(max_size=40)
    | JSON_VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(["choices", "usage", "id", "logprobs", "token_ids", "error", "model", "prompt_token_ids"]),
        JSON_VALUES | st.lists(CHOICE, max_size=2),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_an_answer_or_one_kind_of_error(body: bytes) -> None:
    try:
        result = CompletionsResult.from_body(body)
    except BadCompletion:
        return
    read_all(result)


@pytest.mark.parametrize("field", ["logprobs", "token_ids", "prompt_token_ids", "usage", "id", "unknown"])
@pytest.mark.parametrize("value", [b"1e999", b'"\xff"', b"[1e999]", b"NaN", b'"\\ud800"', b"[" * 99 + b"]" * 99])
def test_a_broken_part_of_an_answer_is_one_kind_of_error(field: str, value: bytes) -> None:
    body = b'{"choices":[{"message":{"role":"assistant"}}],"%s":%s}' % (field.encode(), value)
    try:
        read_all(CompletionsResult.from_body(body))
    except BadCompletion:
        return


@settings(max_examples=30, deadline=None)
@given(MESSAGE)
def test_the_message_is_handed_on_as_it_came(message: dict[str, Any]) -> None:
    assert result_of({"choices": [{"message": message}]}).message == message


def test_half_an_emoji_costs_the_emoji_and_not_the_answer() -> None:
    body = json.dumps(make_completion("half \ud83d of it")).encode()

    assert result_of(body).content == "half \ufffd of it"


def test_of_several_choices_the_one_with_index_0_counts() -> None:
    choices = [{"index": 1, "message": {"content": "b"}}, {"index": 0, "message": {"content": "a"}}]

    assert result_of({"choices": choices}).content == "a"
    assert result_of({"choices": [{"message": None}, {"message": {"content": "c"}}]}).content == "c"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON: empty"),
        (b"<html>Bad Gateway</html>", "not JSON: <html>Bad Gateway</html>"),
        (b"data: {}\n\n", "not JSON: data: {}"),
        (b"{}", "has no choices"),
        (b'{"choices": null}', "has no choices"),
        (b'{"choices": []}', "an empty list of choices"),
        (b'{"choices": [{"finish_reason": "content_filter"}]}', "no message (finish_reason 'content_filter')"),
        (b'{"choices": [{"message": "hi"}]}', "no message"),
        (b'{"choices": {}}', "no chat completion"),
        (b"[]", "no chat completion"),
        (b'{"error": {"message": "too long", "code": "context_length"}}', "too long (context_length)"),
        (b'{"choices": [{"message": {"a": NaN}}]}', "not JSON"),
        (b'{"choices": [{"message": {"a": ' + b"[" * 100 + b"]" * 100 + b"}}]}", "nests too deep"),
    ],
)
def test_an_unusable_answer_is_named(body: bytes, says: str) -> None:
    with pytest.raises(BadCompletion) as raised:
        CompletionsResult.from_body(body)

    assert says in str(raised.value)


def test_null_and_absent_are_alike() -> None:
    bare = result_of({"choices": [{"message": {}}]})
    nulls = result_of(
        {
            "choices": [{"message": {"content": None, "tool_calls": None}, "finish_reason": None, "logprobs": None}],
            "usage": None,
            "logprobs": {"content": None},
            "token_ids": None,
            "prompt_token_ids": None,
            "model": None,
        }
    )

    assert read_all(bare)[1:] == read_all(nulls)[1:]
    assert (bare.tool_calls, bare.has_tool_calls, bare.usage, bare.token_ids) == ([], False, {}, None)


def test_what_stands_in_the_choice_counts_where_the_top_level_has_none() -> None:
    choice = {"message": {}, "token_ids": [1], "logprobs": {"content": [1]}}

    inside = result_of({"choices": [choice], "token_ids": None})
    both = result_of({"choices": [choice], "token_ids": [2], "logprobs": {"content": [2]}, "prompt_token_ids": [3]})

    assert (inside.token_ids, inside.logprobs) == ([1], {"content": [1]})
    assert (both.token_ids, both.logprobs, both.prompt_token_ids) == ([2], {"content": [2]}, [3])


def test_calls_are_to_be_carried_out_whatever_the_finish_reason_says() -> None:
    result = result_of(make_completion(tool_calls=[make_tool_call("add")], finish_reason="stop"))

    assert result.has_tool_calls
    assert repr(result) == "CompletionsResult(finish_reason='stop', tool_calls=1)"


def test_a_finish_reason_of_another_kind_becomes_text() -> None:
    assert result_of({"choices": [{"message": {}, "finish_reason": 3}]}).finish_reason == "3"


# ---------------------------------------------------------------- usage, excerpts, errors


@given(st.dictionaries(st.sampled_from(["prompt_tokens", "other"]), JSON_VALUES | st.integers() | st.floats()))
def test_a_count_is_a_number_that_can_be_added(usage: dict[str, Any]) -> None:
    count = usage_tokens(usage, "prompt_tokens")

    assert type(count) is int
    assert 0 <= count < 2**53


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (7, 7),
        (7.0, 7),
        (7.9, 7),
        (0, 0),
        (-1, 0),
        (True, 0),
        (None, 0),
        ("7", 0),
        (2**53, 0),
        (math.inf, 0),
        ([], 0),
    ],
)
def test_what_is_no_count_counts_as_none(value: Any, count: int) -> None:
    assert usage_tokens({"completion_tokens": value}, "completion_tokens") == count
    assert usage_tokens({}, "completion_tokens") == 0


@given(st.binary(max_size=100) | st.text(max_size=100).map(lambda text: json.dumps({"error": text}).encode()))
def test_an_excerpt_is_one_line(body: bytes) -> None:
    said = excerpt(body)

    assert "\n" not in said
    assert said == " ".join(said.split())


@pytest.mark.parametrize(
    "body",
    [b"x" * 10_000, "é".encode() * 10_000, b'{"error": "' + b"x" * 10_000 + b'"}', b'"' + b"x" * (1 << 21) + b'"'],
    ids=["ascii", "utf-8", "error-body", "huge"],
)
def test_an_excerpt_is_bounded(body: bytes) -> None:
    assert len(excerpt(body)) == EXCERPT_CHARACTERS + len("...")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"error": {"message": "no such model", "code": "model_not_found"}}', "no such model (model_not_found)"),
        (b'{"error": {"message": "no such model", "code": 404}}', "no such model"),
        (b'{"error": "bad"}', "bad"),
        (b'{"message": "bad"}', "bad"),
        (b'{"detail": "bad\\n  thing"}', "bad thing"),
        (b'{"detail": [{"loc": 1}]}', '{"detail": [{"loc": 1}]}'),
        (b'{"error": ""}', '{"error": ""}'),
        (b"[1,\n2]", "[1, 2]"),
        (b"\xff", "\ufffd"),
        (b"", ""),
        (b"[" * 5000, "[" * EXCERPT_CHARACTERS + "..."),
    ],
)
def test_an_excerpt_is_what_the_trainer_means_to_say(body: bytes, said: str) -> None:
    assert excerpt(body) == said


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 599])
def test_what_may_pass_is_unavailable(status: int) -> None:
    error = error_of(status, b"busy", "7", "chat completions")

    assert isinstance(error, TrainerUnavailable)
    assert (error.status, error.retry_after_seconds, error.retryable) == (status, 7.0, True)
    assert str(error) == f"the trainer answered {status} to chat completions: busy"


@pytest.mark.parametrize("status", [301, 400, 401, 404, 409, 422])
def test_what_will_not_pass_is_refused(status: int) -> None:
    error = error_of(status, b"", None, "the result")

    assert isinstance(error, TrainerRefused)
    assert (error.status, error.retryable) == (status, False)
    assert str(error) == f"the trainer answered {status} to the result"


# ---------------------------------------------------------------- calls


def test_a_call_carries_the_parameters_over_the_defaults() -> None:
    call = decode(encode_call(b"[]", "r", {"temperature": 0, "tools": [{"a": None}], "top_k": 5, "stop": "x"}))

    assert call == {
        "model": "default",
        "messages": [],
        "rollout_id": "r",
        "temperature": 0,
        "top_p": 1.0,
        "max_tokens": 512,
        "logprobs": True,
        "tools": [{"a": None}],
        "top_k": 5,
        "stop": ["x"],
    }


def test_a_call_is_never_a_stream_and_never_of_another_rollout() -> None:
    params = {"stream": True, "stream_options": {}, "rollout_id": "other", "messages": [1], "stop": None}

    call = decode(encode_call(b'[{"role":"user"}]', "r", params))

    assert "stream" not in call
    assert "stream_options" not in call
    assert (call["rollout_id"], call["messages"], call["stop"]) == ("r", [{"role": "user"}], None)


def test_sent_messages_are_a_list_that_knows_its_text() -> None:
    sent = SentMessages([{"a": 1}], b'[{"a":1}]')

    assert sent == [{"a": 1}]
    assert sent.text == b'[{"a":1}]'


# ---------------------------------------------------------------- the history


def same(one: Any, other: Any) -> bool:
    """Equal as JSON values: true is not 1, but 1 is 1.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def history_of(messages: list[Any]) -> History:
    history = History()
    history.record(history.text_of(messages)[0])
    return history


@settings(max_examples=30, deadline=None)
@given(MESSAGES, MESSAGES)
def test_any_two_histories_are_compared_as_values(before: list[Any], after: list[Any]) -> None:
    expected = len(before) <= len(after) and all(map(same, before, after))

    assert history_of(before).continues(encode(after)[0]) is expected


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(item) for key, item in reversed(value.items())}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=30, deadline=None)
@given(MESSAGES, MESSAGES)
def test_appending_continues_however_the_text_is_spelled(before: list[Any], more: list[Any]) -> None:
    history = history_of(before)

    assert history.continues(encode([*before, *more])[0])
    assert history.continues(json.dumps(reordered([*before, *more])).encode())


def alter(messages: list[Any], at: int, how: str) -> list[Any]:
    altered = copy.deepcopy(messages)
    if how == "drop":
        del altered[at]
    elif how == "insert":
        altered.insert(at, {"role": "new"})
        altered.append({"role": "user"})
    else:
        altered[at] = {**altered[at], "content": [how]}
    return altered


@pytest.mark.parametrize("how", ["drop", "insert", "change"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_change_before_the_end_is_a_break(at: int, how: str) -> None:
    before = [{"role": role, "content": role} for role in ("system", "user", "assistant")]

    assert not history_of(before).continues(encode(alter(before, at, how))[0])


@pytest.mark.parametrize(
    ("before", "after", "continues"),
    [
        ([], [], True),
        ([], [{"a": 1}], True),
        ([{"a": 1}], [{"a": 1}], True),
        ([{"a": 1}], [{"a": 1.0}], True),
        ([{"a": 1}], [{"a": True}], False),
        ([{"a": 0}], [{"a": False}], False),
        ([{"a": "x"}], [{"a": "x", "b": 1}], False),
        ([{"a": 1}], [], False),
        ([{"a": 1}], [{"a": 12}], False),
        ([{}], [{}, {}], True),
    ],
)
def test_what_continues_what(before: list[Any], after: list[Any], continues: bool) -> None:
    assert history_of(before).continues(encode(after)[0]) is continues


def test_whatever_is_the_first_call_continues() -> None:
    assert History().continues(b"[]")
    assert History().continues(b'[{"role":"user"}]')


def test_what_was_sent_stays_what_it_was_whatever_the_agent_does_to_it() -> None:
    history, messages = History(), [{"role": "user", "content": "a"}]
    history.record(history.text_of(messages)[0])

    messages[0]["content"] = "b"

    assert not history.continues(history.text_of(messages)[0])
    assert decode(bytes(history.reached())) == [{"role": "user", "content": "a"}]


def test_what_was_reached_is_the_last_history_and_its_answer() -> None:
    history = History()
    reached = [decode(bytes(history.reached()))]
    for sent in ([], [{"a": 1}]):
        history.record(encode(sent)[0])
        reached.append(decode(bytes(history.reached())))
        history.answer = {"b": 2}
        reached.append(decode(bytes(history.reached())))

    assert reached == [[], [], [{"b": 2}], [{"a": 1}], [{"a": 1}, {"b": 2}]]
