"""Inputs from the wild, which lie beside the checkout and are nobody's to copy: each behaves as its index says."""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from case_stage import Stage, staged, validate_tool
from cases import FOLDER, NEEDS_CASES

from rollout.testing import Reply, raw, status

INDEX = FOLDER / "INDEX.tsv"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not INDEX.exists(), reason=NEEDS_CASES),
]

SUCCESS = "Must hold: the turn is taken as a success"
FAILED = "Must hold: treated as a failed LLM call"
NOT_RETRIED = "Must hold: not retried"


def read_index() -> dict[str, str]:
    """What a correct service does, by file."""
    if not INDEX.exists():
        return {}
    with INDEX.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {row[0]: row[3] for row in rows[1:]}


RULES = read_index()


def files(kind: str) -> Any:
    """Parametrize by the files of a kind, or by one that is skipped."""
    found = [name for name in RULES if name.startswith(f"inputs/{kind}/")]
    return pytest.mark.parametrize("file", found or [f"inputs/{kind}/none"], ids=lambda name: Path(name).stem)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with staged() as running:
        yield running


def content(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")


# ---------------------------------------------------------------- tools


@files("tools")
async def test_a_tool_travels_deep_equal(stage: Stage, file: str) -> None:
    await stage.play_tool(json.loads(content(file)))


NO_FUNCTION = ("Has no `function`", "Agent authors paste", "type is not")


@files("tools")
async def test_the_validation_takes_a_good_tool_and_names_what_is_wrong_with_another(file: str) -> None:
    tool, rule = json.loads(content(file)), RULES[file]
    result = validate_tool(tool)
    found = [str(finding) for finding in (*result.errors, *result.warnings)]
    good = rule.startswith("Must hold: an agent whose get_tools() returns this validates")
    assert result.valid or not good, found
    assert found or not rule.startswith(NO_FUNCTION)
    assert result.tools == [tool]


# ---------------------------------------------------------------- messages

REFUSED = {"59-negative-null", "60-negative-string", "61-negative-list-of-int"}
JUDGED_BY_THE_TRAINER = {"62-negative-empty-object", "63-negative-role-int", "64-negative-content-int",
                         "65-negative-second-message-empty", "66-negative-two-trailing-assistants"}  # fmt: skip
SURROGATE = "54-lone-high-surrogate"


@files("messages")
async def test_messages_travel_deep_equal_or_are_refused_by_name(stage: Stage, file: str) -> None:
    name, text = Path(file).stem, content(file)
    if name in REFUSED:
        await expect_refusal(stage, text, 422, "messages")
    elif name == SURROGATE:
        await expect_refusal(stage, text, 400, "")
    elif name in JUDGED_BY_THE_TRAINER:
        await expect_trainers_word(stage, messages=text)
    else:
        await stage.play_messages(text)


async def expect_refusal(stage: Stage, messages: str, code: int, word: str) -> None:
    rollout_id = stage.new_id()
    answer = await stage.init(rollout_id, messages=messages)
    assert answer.status == code
    assert word in answer.json["detail"]
    assert (await stage.server.get(f"/status/{rollout_id}")).status == 404
    assert (await stage.init(rollout_id)).status == 202
    assert (await stage.result(rollout_id))["status"] == "COMPLETED"


async def expect_trainers_word(stage: Stage, **texts: str) -> None:
    rollout_id = stage.new_id()
    stage.server.trainer.on_chat(status(400, body={"error": {"message": "I do not like this"}}), rollout_id=rollout_id)
    assert (await stage.init(rollout_id, **texts)).status == 202
    result = await stage.result(rollout_id)
    assert (result["status"], result["error_category"]) == ("ERROR", "llm_error")
    assert "I do not like this" in result["error_message"]
    assert len(stage.chats(rollout_id)) == 1


# ---------------------------------------------------------------- params


@files("params")
async def test_params_go_out_unchanged(stage: Stage, file: str) -> None:
    name, text = Path(file).stem, content(file)
    sent = await stage.play_params(text)
    if name == "45-llamacpp-invalid-response-format":
        await expect_trainers_word(stage, params=text)
    if name == "51-rollout-peer-empty":
        assert None not in sent.values()
        assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["logprobs"]) == (1.0, 1.0, 512, True)


# ---------------------------------------------------------------- completions


def reply_of(file: str) -> Reply:
    case = json.loads(content(file))
    body = case["body_text"] if "body_text" in case else json.dumps(case["body"])
    return raw(body, case["http"]["headers"].get("content-type", "application/json"), case["http"]["status"])


FLAT_CALL = "51-llamacpp-call-without-function"  # the flat form is taken: the turn is good
RETRIED = {"41-openrouter-429": "Provider returned error", "73-html-502-from-proxy": "502 Bad Gateway"}
SAID = {
    "69-vllm-400-object-error": "max_tokens must be at least 1",
    "71-openrouter-200-error-body": "Provider returned",
}


@files("completions")
async def test_completions_are_used_or_fail_clearly(stage: Stage, file: str) -> None:
    name, rule, reply = Path(file).stem, RULES[file], reply_of(file)
    if name in RETRIED:
        assert RETRIED[name] in await stage.play_failed_call(reply, attempts=2)
    elif rule.startswith(NOT_RETRIED):
        message = await stage.play_failed_call(reply)
        assert str(reply.status) in message
        assert SAID.get(name, "") in message
    elif rule.startswith(FAILED) and name != FLAT_CALL:
        assert SAID.get(name, "") in await stage.play_failed_call(reply)
    else:
        expect_measured(await stage.play_good_completion(reply), reply)


def expect_measured(result: dict[str, Any], reply: Reply) -> None:
    """The tokens of the turn are those of its usage, and nothing where it has none."""
    usage = json.loads(reply.body).get("usage") or {}
    more = (10, 5) if result["metrics"]["num_llm_calls"] == 2 else (0, 0)  # of the trainer's "done"
    assert result["metrics"]["prompt_tokens"] == (usage.get("prompt_tokens") or 0) + more[0]
    assert result["metrics"]["response_tokens"] == (usage.get("completion_tokens") or 0) + more[1]
