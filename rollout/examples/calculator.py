"""The calculator: a math word problem, four tools, a reward for the right number."""

from __future__ import annotations

import re
from typing import Any

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.messages import get_message_content
from rollout.agent.tools import tool


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def subtract(a: float, b: float) -> float:
    """Subtract b from a."""
    return a - b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


@tool
def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


class CalculatorAgent(RolloutAgentLoop):
    """Lets the model calculate until it answers, and compares the answer with `metadata["answer"]` if there is one."""

    name = "calculator"
    tools = (add, subtract, multiply, divide)

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        while True:
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
            if not result.has_tool_calls:
                break
            messages.extend(await ctx.call_tools(result.tool_calls))
        return ctx.complete(messages, reward=_reward(messages[-1], ctx.request.metadata))


def _reward(answer: dict[str, Any], metadata: dict[str, Any]) -> float | None:
    """1 if the last number in the answer is the expected one, 0 if not, None if nothing is expected."""
    expected = metadata.get("answer")
    if expected is None:
        return None
    numbers = re.findall(r"-?\d+(?:\.\d+)?", get_message_content(answer).replace(",", ""))
    return float(bool(numbers) and abs(float(numbers[-1]) - float(expected)) < 1e-6)


agent = CalculatorAgent()
