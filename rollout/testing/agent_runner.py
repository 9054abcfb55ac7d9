"""One agent, one rollout, no server: what `run_agent` does for a user's tests."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop
from rollout.agent.runner import RolloutRun
from rollout.requests import receive
from rollout.schemas import DEFAULT_MAX_METADATA_SIZE_BYTES, RolloutResponse
from rollout.testing.builders import make_request
from rollout.testing.fakes import ScriptedLLM
from rollout.wire import encode_strict

_decode_response = msgspec.json.Decoder(RolloutResponse).decode


async def run_agent(
    agent: RolloutAgentLoop,
    messages: Sequence[dict[str, Any]] | None = None,
    answers: ScriptedLLM | Sequence[Any] = ("ok",),
    *,
    strict_history: bool = False,
    **request_fields: Any,
) -> RolloutResponse:
    """Run the agent once against scripted answers, and return the response exactly as a trainer would get it.

    `answers` are those of `ScriptedLLM`, or one of your own, whose `calls` tell afterwards what the agent sent.
    `request_fields` are further fields of the request (`max_turns=2`). Whatever the agent raises is in the response, as
    in the service; only an agent that asks more often than the script answers is an `AssertionError`.
    """
    if messages is not None:
        request_fields["messages"] = list(messages)
    body = encode_strict(make_request(**request_fields))
    request = receive(body, DEFAULT_MAX_METADATA_SIZE_BYTES).view
    tools = agent.get_tools(request)
    if inspect.isawaitable(tools):
        tools = await tools
    llm = answers if isinstance(answers, ScriptedLLM) else ScriptedLLM(answers)
    context = RolloutContext(request, llm, tools=tools, strict_history=strict_history)
    outcome = await RolloutRun(agent, context).run()
    if llm.overrun is not None:
        raise llm.overrun
    return _decode_response(outcome.body)
