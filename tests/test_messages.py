"""Reading chat messages in all the shapes they come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import FOLDER, NEEDS_CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agent.messages import (
    count_messages_by_role,
    get_message_content,
    get_message_role,
    is_assistant_message,
    is_tool_message,
    is_user_message,
    normalize_stop,
    parse_message,
)

CASES = FOLDER / "inputs"
MESSAGE_FILES = sorted(CASES.glob("messages/*.json"))
COMPLETION_FILES = sorted(CASES.glob("completions/*.json"))
needs_cases = pytest.mark.skipif(not MESSAGE_FILES, reason=NEEDS_CASES)

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]) | st.text(), inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, ""),
        (5, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "output_text", "text": "out"}, {"type": "input_text", "text": "in"}], "outin"),
        ([{"text": "no type"}, {"audio": "x"}], "no type"),
        (["bare", {"type": "text", "text": " part"}], "bare part"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "so"}], "so"),
        ([{"type": "image_url", "image_url": {"url": "x"}, "text": "no"}], ""),
        ([{"type": ["text"], "text": "no"}, {"type": "text", "text": None}, 3, None], ""),
        ({"type": "text", "text": "one"}, "one"),
    ],
)
def test_the_text_of_a_message_is_that_of_its_text_parts(content: Any, text: str) -> None:
    assert get_message_content({"role": "user", "content": content}) == text


def test_a_message_without_content_or_role_has_neither() -> None:
    assert (get_message_content({}), get_message_role({})) == ("", "unknown")
    assert get_message_role({"role": 123}) == "unknown"


def test_roles_are_told_apart() -> None:
    roles = ["assistant", "tool", "user"]
    tests = [is_assistant_message, is_tool_message, is_user_message]
    assert [[test({"role": role}) for role in roles] for test in tests] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]


def test_messages_are_counted_by_role() -> None:
    messages = [{"role": "user"}, {"role": "tool"}, {"role": "user"}, {}, 123]
    assert count_messages_by_role(messages) == {"user": 2, "tool": 1, "unknown": 2}
    assert count_messages_by_role(None) == {}


def test_the_common_fields_are_taken_out() -> None:
    call = {"id": "1"}
    assert parse_message({"role": "assistant", "content": None, "tool_calls": [call]}) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
        "tool_call_id": None,
    }


@pytest.mark.parametrize(
    ("stop", "normal"),
    [
        ("I am", ["I am"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        (("a",), ["a"]),
        ([], []),
        (None, None),
        (5, None),
        (["a", 5], ["a"]),
    ],
)
def test_one_stop_text_is_a_list_of_one(stop: Any, normal: list[str] | None) -> None:
    assert normalize_stop(stop) == normal


@settings(max_examples=30, deadline=None)
@given(ANYTHING)
def test_no_message_makes_the_readers_raise(message: Any) -> None:
    parsed = parse_message(message)
    assert isinstance(parsed["content"], str)
    assert isinstance(parsed["role"], str)
    assert sum(count_messages_by_role([message]).values()) == 1
    normalize_stop(message)


@needs_cases
@pytest.mark.parametrize("path", MESSAGE_FILES, ids=lambda path: path.stem)
def test_real_messages_are_read(path: Path) -> None:
    messages = json.loads(path.read_bytes())
    for message in messages if isinstance(messages, list) else [messages]:
        parsed = parse_message(message)
        content = message.get("content") if isinstance(message, dict) else None
        assert parsed["content"] == content or not isinstance(content, str)


@needs_cases
@pytest.mark.parametrize("path", COMPLETION_FILES, ids=lambda path: path.stem)
def test_the_messages_of_real_completions_are_read(path: Path) -> None:
    body = json.loads(path.read_bytes()).get("body")
    choices = body.get("choices") if isinstance(body, dict) else None
    for choice in choices or []:
        assert isinstance(parse_message(choice.get("message"))["content"], str)
