"""Small inputs with the properties of those that were met in the wild."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from case_stage import Stage, staged, validate_tool

from rollout.testing import make_completion, make_tool_call, raw

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with staged() as running:
        yield running


def function(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def properties(**schemas: Any) -> dict[str, Any]:
    return function({"type": "object", "properties": schemas})


TOOLS = {
    "empty description and strict": function({"type": "object", "properties": {}}, description="", strict=True),
    "null default": properties(a={"type": "string", "default": None}),
    "anyOf": properties(a={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "list of types": properties(a={"type": ["string", "null"]}),
    "enum of numbers": properties(a={"enum": [1, 2.5, 0, -3]}),
    "enum of bools and null": properties(a={"enum": [True, False, None]}),
    "float that is whole": properties(a={"minimum": 1.0, "maximum": 2}),
    "nested objects": properties(a={"type": "object", "properties": {"b": {"type": "object", "properties": {}}}}),
    "refs": function({"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "null"}}}),
    "ref to itself": function({"$ref": "#/$defs/X", "$defs": {"X": {"properties": {"x": {"$ref": "#/$defs/X"}}}}}),
    "dangling ref": properties(a={"$ref": "#/$defs/Nowhere"}),
    "additionalProperties": function({"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}),
    "empty required": function({"type": "object", "properties": {}, "required": []}),
    "no required": function({"type": "object", "properties": {"a": {}}}),
    "unknown keys": {**properties(), "eager": True, "cache_control": {"type": "ephemeral"}, "x": None},
    "keys in an unusual order": {"function": {"parameters": {}, "name": "f"}, "type": "function"},
    "null parameters": function(None),
    "no parameters": {"type": "function", "function": {"name": "f"}},
    "parameters that are no schema": function({"foo": "bar"}),
    "invented types": properties(a={"type": "HashMap"}, b={"type": "STRING"}),
    "dotted name": {"type": "function", "function": {"name": "math.add", "parameters": {}}},
    "Korean": properties(도시={"description": "\ub3c4\uc2dc \u2028 \U0001f600 \x00"}),
    "flat": {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}},
    "other type": {"type": "web_search_preview", "user_location": None},
    "no type": {"name": "f", "inputSchema": {"type": "object"}},
    "64-bit numbers": properties(a={"maximum": 2**63, "minimum": -(2**63), "multipleOf": 1e-9}),
    "empty object": {},
}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
async def test_a_tool_travels_deep_equal(stage: Stage, tool: Any) -> None:
    await stage.play_tool(tool)


@pytest.mark.parametrize("name", ["flat", "other type", "no type", "empty object"])
async def test_a_dict_without_a_function_is_found_by_the_validation(name: str) -> None:
    result = validate_tool(TOOLS[name])
    assert result.errors or result.warnings


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = {
    "none": [],
    "role only": [{"role": "user"}],
    "null and empty content": [{"role": "user", "content": None}, {"role": "assistant", "content": ""}],
    "no content beside calls": [{"role": "assistant", "tool_calls": [CALL]}],
    "arguments as an object": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    ],
    "arguments that are no JSON": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "not json {"}}]}],
    "call with an id only": [{"role": "assistant", "tool_calls": [{"id": "c1"}]}],
    "tool answer without an id": [{"role": "tool", "content": "4"}],
    "content of parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, "bare", {"audio": "x"}, []]}],
    "unknown role and keys": [{"role": "developer", "name": None, "reasoning": [], "cost": 1.0, "n": 0, "t": -0.5}],
    "control characters": [
        {"role": "tool", "content": "".join(map(chr, range(32))) + "\x7f\x9b\u2028\u2029\ufeff\ufffd"}
    ],
    "beyond the basic plane": [{"role": "user", "content": "\U0001f600\U0010ffff e\u0301 \u200b"}],
    "key order": [{"z": 1, "role": "user", "a": 2, "content": "x"}],
    "odd keys": [{"": 0, "role": "user", "a.b": {"$ref": 1}, "\u00e9": [[[]]]}],
    "large": [{"role": "tool", "content": "line\n" * 20_000}],
    "numbers": [{"role": "user", "n": [1, 1.0, 1e300, 2**63, -(2**63), 0.1, 10**30]}],
}


@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
async def test_messages_travel_deep_equal(stage: Stage, messages: Any) -> None:
    await stage.play_messages(json.dumps(messages))


PARAMS = {
    "stop as text": {"stop": "I am"},
    "stop of blanks": {"stop": ["\n", " ", ""]},
    "nulls": {"stop": None, "n": None, "tool_choice": None, "seed": None},
    "falsy": {"temperature": 0.0, "parallel_tool_calls": False, "logprobs": False, "seed": 0, "top_k": -1, "stop": []},
    "integers for floats": {"temperature": 1, "top_p": 1},
    "streaming": {"stream": True, "stream_options": {"include_usage": True}},
    "objects": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": [None]}}}},
    "keys of numbers": {"logit_bias": {"12345": -100, "1": 5}},
    "names of ours": {"request_id": "x", "id": "y", "usage": {"include": True}, "extra_body": {"k": {}}, "model": "m"},
    "other limits": {"max_completion_tokens": 5, "max_new_tokens": 6},
    "braces": {"grammar": 'root ::= "{" %s {0} "}"'},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
async def test_params_go_out_unchanged(stage: Stage, params: Any) -> None:
    await stage.play_params(json.dumps(params))


@pytest.mark.parametrize("name", ["messages", "rollout_id"])
async def test_params_do_not_replace_what_is_ours(stage: Stage, name: str) -> None:
    rollout_id = stage.new_id()
    await stage.init(rollout_id, params=json.dumps({name: "other"}))
    await stage.result(rollout_id)
    for chat in stage.chats(rollout_id):
        assert chat.json["rollout_id"] == rollout_id
        assert chat.json["messages"] == [{"role": "user", "content": "hi"}]


def choice(message: Any, **more: Any) -> dict[str, Any]:
    return make_completion(choices=[{"message": message, **more}])


ANSWER = {"role": "assistant", "content": "hi"}
GOOD = {
    "bare": {"choices": [{"message": ANSWER}]},
    "null everywhere": make_completion(usage=None, id=None, created=None, model=None, object=None, token_ids=None),
    "wrong types": make_completion(id=7, created="now", model=["m"], system_fingerprint=0),
    "no role": choice({"content": " hi "}),
    "no content": choice({"role": "assistant"}),
    "content of parts": choice({"content": [{"type": "thinking", "thinking": [{}]}, {"type": "text", "text": "4"}]}),
    "refusal": choice({"role": "assistant", "content": None, "refusal": "no"}),
    "unknown keys": choice(
        {**ANSWER, "reasoning": "r", "audio": {"data": ""}, "x": [None]}, seed=2**64, stop_reason=50
    ),
    "finish reason null": choice(ANSWER, finish_reason=None),
    "finish reason of its own": choice(ANSWER, finish_reason="eos"),
    "second choice first": make_completion(
        choices=[{"index": 1, "message": {"content": "no"}}, {"index": 0, "message": ANSWER}]
    ),
    "usage with nulls": make_completion(usage={"prompt_tokens": None, "completion_tokens": None}),
    "usage with objects": make_completion(usage={"prompt_tokens": 3, "details": {"a": 1}, "time": 0.5}),
    "logprobs in the choice": choice(
        ANSWER, logprobs={"content": [{"token": "hi", "logprob": -0.1}]}, token_ids=[1, 2]
    ),
    "logprobs without content": choice(ANSWER, logprobs={"content": None, "refusal": None}),
    "logprobs at the top": make_completion(token_ids=[1, 2, 3], logprobs=[-0.1, None], prompt_token_ids=[0]),
    "legacy logprobs": choice(ANSWER, logprobs={"tokens": ["hi"], "token_logprobs": [None]}),
    "empty calls": choice({**ANSWER, "tool_calls": []}),
    "null calls": choice({**ANSWER, "tool_calls": None}),
    "call and stop": choice({"content": None, "tool_calls": [CALL]}, finish_reason="stop"),
    "call without an id": choice({"tool_calls": [make_tool_call("f", {}, id=None)]}),
    "call with an empty id": choice({"tool_calls": [make_tool_call("f", {}, id="")]}),
    "call with an id only": choice({"tool_calls": [{"id": "c"}]}),
    "call without arguments": choice({"tool_calls": [{"id": "c", "function": {"name": "f"}}]}),
    "call with code for arguments": choice({"tool_calls": [make_tool_call("f", "print(1)")]}),
    "call that is flat": choice({"tool_calls": [{"name": "f", "arguments": "{}"}]}),
    "legacy call": choice({"content": None, "function_call": {"name": "f", "arguments": "{}"}}),
}


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize("body", GOOD.values(), ids=GOOD)
async def test_a_turn_that_can_be_used_is_a_success(stage: Stage, body: Any, kind: str) -> None:
    await stage.play_good_completion(raw(json.dumps(body), kind))


BAD = {
    "nothing": "",
    "text": "method=POST",
    "HTML": "<html>busy</html>",
    "JSON text": '"hello"',
    "list": "[]",
    "number": "5",
    "null": "null",
    "empty object": "{}",
    "no choices": json.dumps(make_completion(choices=[])),
    "null choices": json.dumps(make_completion(choices=None)),
    "choices as an object": json.dumps(make_completion(choices={"0": {"message": ANSWER}})),
    "choice without a message": json.dumps(make_completion(choices=[{"index": 0, "finish_reason": "content_filter"}])),
    "null message": json.dumps(make_completion(choices=[{"message": None}])),
    "message of text": json.dumps(make_completion(choices=[{"message": "hi"}])),
    "choice of text": json.dumps(make_completion(choices=["hi"])),
    "error with 200": json.dumps({"error": {"message": "Provider returned error", "code": 502}}),
    "other shape": json.dumps({"message": ANSWER, "done": True}),
    "wrapped": json.dumps({"predictions": make_completion()}),
    "events": 'data: {"choices":[{"delta":{"content":"h"}}]}\n\ndata: [DONE]\n\n',
    "comments and events": ": PROCESSING\n\n" * 50 + "data: [DONE]\n\n",
    "lines": '{"choices":[]}\n{"choices":[]}\n',
    "NaN": '{"choices":[{"message":{"content":NaN}}]}',
    "cut": json.dumps(make_completion())[:-4],
    "deep": '{"choices":' + "[" * 5000 + "]" * 5000 + "}",
    "latin-1": b'{"choices":[{"message":{"content":"\xe9"}}]}',
    "huge text": "x" * 100_000,
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_an_answer_without_a_usable_choice_fails_the_call_once(stage: Stage, body: str | bytes) -> None:
    kind = "text/event-stream" if isinstance(body, str) and "data: " in body else "application/json"
    await stage.play_failed_call(raw(body, kind))


@pytest.mark.parametrize(("code", "attempts"), [(400, 1), (404, 1), (422, 1), (408, 2), (425, 2), (429, 2), (502, 2)])
async def test_an_error_of_the_trainer_is_told_with_its_status_and_text(stage: Stage, code: int, attempts: int) -> None:
    message = await stage.play_failed_call(
        raw(json.dumps({"id": 1, "message": "no such model"}), status=code), attempts
    )
    assert str(code) in message
    assert "no such model" in message
