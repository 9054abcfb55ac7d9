"""A parcel desk: tools with nested arguments, a tool that is only a definition, and a tool list made for each request.

::

    python -m rollout validate rollout.examples.multi_tool:agent
    python -m rollout serve rollout.examples.multi_tool:agent

`quote` takes a list of dataclasses and a Struct; what the model is told and what is accepted come from these types.
`book` is a plain dict, as another system may hand it over: it travels unchanged, and the agent carries it out itself.
`customs_duty` is offered only where the request's `metadata` has `"abroad": true`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.tool_calls import get_tool_call_info
from rollout.agent.tools import tool
from rollout.errors import RequestRejected, ToolArgumentError
from rollout.schemas import MessageDict, RolloutRequest

Kilograms = Annotated[float, Meta(gt=0, le=30, description="weight in kilograms")]
Speed = Literal["standard", "express"]


class Address(Struct, kw_only=True):
    """Where a parcel goes."""

    city: str
    country: Annotated[str, Meta(pattern=r"^[A-Z]{2}\Z", description="two letters, ISO 3166")]
    lines: list[str] = []


@dataclasses.dataclass
class Parcel:
    """One parcel of a shipment."""

    weight: Kilograms
    contents: str = ""


class Quote(Struct, kw_only=True):
    """What a shipment costs; the model reads it as JSON."""

    cents: int
    days: int


@tool
async def quote(parcels: Annotated[list[Parcel], Meta(min_length=1)], to: Address, speed: Speed = "standard") -> Quote:
    """Price and duration of a shipment.

    Args:
        parcels: all parcels of the shipment
        to: where they go
        speed: express costs twice as much
    """
    base = sum(400 + round(120 * parcel.weight) for parcel in parcels)
    days = 2 if to.country == "DE" else 5
    return Quote(cents=base * 2, days=1) if speed == "express" else Quote(cents=base, days=days)


@tool(strict=True)
def customs_duty(value_cents: Annotated[int, Meta(ge=0)]) -> int:
    """Duty in cents on goods of this value that leave the country."""
    return 0 if value_cents <= 15_000 else value_cents * 19 // 100


BOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book the shipment. This ends the conversation.",
        "parameters": {
            "type": "object",
            "properties": {
                "sender": {"$ref": "#/$defs/party"},
                "recipient": {"$ref": "#/$defs/party"},
                "total_cents": {"type": "integer", "minimum": 0},
            },
            "required": ["recipient", "total_cents"],
            "$defs": {
                "party": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "city": {"type": ["string", "null"]}},
                    "required": ["name"],
                    "additionalProperties": False,
                }
            },
        },
    },
}


class ParcelDesk(RolloutAgentLoop):
    """Lets the model ask for prices until it books; the reward is 1 if it books for `metadata["expected_cents"]`."""

    name = "parcel-desk"

    def get_tools(self, request: RolloutRequest) -> list[Any]:
        """Customs only for requests from abroad. Raises `RequestRejected` where the metadata cannot be meant."""
        abroad = request.metadata.get("abroad", False)
        if not isinstance(abroad, bool):
            raise RequestRejected("metadata.abroad must be true or false")
        return [quote, customs_duty, BOOK] if abroad else [quote, BOOK]

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages: list[MessageDict] = list(ctx.request.messages)
        while True:
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
            booking = _booking_in(result.tool_calls)
            if booking is not None:
                expected = ctx.request.metadata.get("expected_cents")
                reward = None if expected is None else float(booking.get("total_cents") == expected)
                return ctx.complete(messages, "booked", reward, extra_fields={"booking": booking})
            if not result.has_tool_calls:
                return ctx.complete(messages, reward=0.0)
            messages.extend(await ctx.call_tools(result.tool_calls))


def _booking_in(tool_calls: list[Any]) -> dict[str, Any] | None:
    """The arguments of the first call of `book`; one that is no JSON object is an empty booking."""
    for call in tool_calls:
        try:
            _, name, arguments = get_tool_call_info(call)
        except ToolArgumentError as exc:
            name, arguments = exc.tool_name or "", {}
        if name == "book":
            return arguments
    return None


agent = ParcelDesk()
