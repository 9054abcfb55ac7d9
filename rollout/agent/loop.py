"""What a user subclasses, and what a run of it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.agent.tools import bind_tools
from rollout.schemas import MessageDict, RolloutMetrics, RolloutRequest, RolloutStatus

if TYPE_CHECKING:
    from rollout.agent.context import RolloutContext


class RolloutResult(msgspec.Struct, kw_only=True):
    """How one rollout ended, as the agent sees it. Every field stays assignable until `run()` returns it."""

    status: str = RolloutStatus.COMPLETED
    """A `RolloutStatus`, or its text."""
    final_messages: list[MessageDict] = msgspec.field(default_factory=list)
    finish_reason: str | None = "stop"
    error_message: str | None = None
    metrics: RolloutMetrics | None = None
    reward: float | None = None
    extra_fields: dict[str, Any] = msgspec.field(default_factory=dict)


class RolloutAgentLoop(ABC):
    """An agent. One instance serves every rollout, many at a time: what belongs to one rollout lives in `run()`.

    ::

        class Calculator(RolloutAgentLoop):
            name = "calculator"
            tools = [add, subtract]

            async def run(self, ctx):
                messages = ctx.request.messages
                result = await ctx.chat(messages, **ctx.request.completion_params)
                return ctx.complete([*messages, result.message])

    A subclass that can be built has a `name`: `TypeError` where it is missing, `ValueError` where it is blank.
    """

    name: str
    """What the service and its metrics call the agent."""
    tools: Sequence[Any] = ()
    """Tools of the default `get_tools()`; methods made into tools are bound to the instance."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if ABC in cls.__bases__ or getattr(cls.run, "__isabstractmethod__", False):
            return
        name = getattr(cls, "name", None)
        if name is None:
            raise TypeError(f'{cls.__name__} has no name: add a class attribute, for example `name = "calculator"`')
        if isinstance(name, str) and not name.strip():
            raise ValueError(f"the name of {cls.__name__} is blank: it is what the service calls the agent")

    def get_tools(self, request: RolloutRequest) -> list[Any] | Awaitable[list[Any]]:
        """What the model may call in this rollout: tools, dicts and schemas, mixed. May be overridden with `async def`.

        Answers `/init`, so it should be quick. Raise `RequestRejected` to say that the request is wrong (422).
        """
        return bind_tools(self.tools, self)

    @abstractmethod
    async def run(self, ctx: RolloutContext) -> RolloutResult:
        """Play one rollout to its end. Whatever is raised ends it as ERROR; a `LimitReached` as COMPLETED."""
