"""The agent of the crash proof: as many turns as its request says, some with a tool, going on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.tools import tool
from rollout.errors import RequestRejected
from rollout.schemas import MessageDict, RolloutRequest


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def turns_in(messages: Sequence[MessageDict]) -> int:
    """Answers of the model that a history holds."""
    return sum(message["role"] == "assistant" for message in messages)


class CrashAgent(RolloutAgentLoop):
    """Asks until the model has answered `metadata["turns"]` times; the extra fields say which run it was."""

    name = "crash"
    tools = (add,)

    def get_tools(self, request: RolloutRequest) -> list[Any]:
        """The one tool; a request that says so is refused."""
        if request.metadata.get("refuse"):
            raise RequestRejected("this request asks to be refused")
        return list(self.tools)

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages) if ctx.checkpointed is None else ctx.checkpointed
        while turns_in(messages) < ctx.request.metadata["turns"]:
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages = [*messages, result.message]
            if result.tool_calls:
                messages += await ctx.call_tools(result.tool_calls)
            await ctx.checkpoint(messages)
        return ctx.complete(messages, reward=float(turns_in(messages)), extra_fields={"run": ctx.run})


agent = CrashAgent()
