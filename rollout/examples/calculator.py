"""The calculator: a math word problem, four tools, a reward for the right number. The agent that is served by default.

::

    python -m rollout serve                  # or name it: rollout.examples.calculator:agent
    python -m rollout demo                   # 50 word problems, with a mock trainer
"""

from __future__ import annotations

import math
import re
from typing import Any

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.messages import get_message_content
from rollout.agent.tools import tool

_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
_AS_ASCII = str.maketrans({",": None, "\N{MINUS SIGN}": "-"})


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
    if metadata.get("answer") is None:
        return None
    expected = _last_number(str(metadata["answer"]))
    if expected is None:
        raise ValueError("metadata.answer holds no number to compare with")
    given = _last_number(get_message_content(answer))
    return float(given is not None and math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-6))


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text.translate(_AS_ASCII))
    return float(found[-1]) if found else None


agent = CalculatorAgent()
