"""PROTOCOL sections 2 and 3: what `get_tools()` may do, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from conftest import Serve
from served import Instant

from rollout.errors import RequestRejected
from rollout.schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
)
from rollout.testing import make_request

# ---------------------------------------------------------------- get_tools() and the agent's word


class ToolsAre(Instant):
    """`get_tools()` does what it is told to: raises an exception, or returns (the result of) something."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def get_tools(self, request: Any) -> Any:
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what() if callable(self.what) else self.what


class ToolsAreAsync(ToolsAre):
    """The same, awaited."""

    async def get_tools(self, request: Any) -> Any:
        await asyncio.sleep(0)
        return super().get_tools(request)


class Unprintable(Exception):
    """Not even its text can be had."""

    def __str__(self) -> str:
        raise RuntimeError("hunter2")


RAISED = [
    RuntimeError("hunter2"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(),
    RecursionError("hunter2"), MemoryError(), StopIteration(1), TimeoutError("hunter2"), BaseException("hunter2"),
    web.HTTPBadRequest(text="hunter2"), web.HTTPFound("/hunter2"), StopAsyncIteration(), Unprintable(),
]  # fmt: skip


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
@pytest.mark.parametrize("raised", RAISED, ids=lambda e: type(e).__name__)
async def test_get_tools_that_raises_is_500_and_is_not_remembered(serve: Serve, kind: Any, raised: Any) -> None:
    agent = kind(raised)
    server = await serve(agent)
    answer = await server.post_init(rollout_id="r")
    assert (answer.status, answer.json["code"]) == (500, "get_tools_failed")
    assert "hunter2" not in answer.body.decode()
    assert "Traceback" not in answer.body.decode()
    assert (await server.get("/status/r")).status == 404
    agent.what = []
    assert (await server.post_init(rollout_id="r")).status == 202
    assert (await server.result("r"))["status"] == "COMPLETED"


async def test_the_traceback_of_get_tools_goes_to_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve(ToolsAre(RuntimeError("the cause")))
    await server.post_init(rollout_id="r-17")
    (record,) = [r for r in caplog.records if r.exc_info and "get_tools" in r.getMessage()]
    assert "r-17" in record.getMessage()
    assert "the cause" in str(record.exc_info[1])


def async_generator() -> Any:
    async def generate() -> AsyncIterator[dict[str, Any]]:
        yield {}

    return generate()


NO_LISTS = {
    "None": None,
    "dict": {"type": "function"},
    "text": "tools",
    "bytes": b"[]",
    "number": 7,
    "set": {1},
    "generator": lambda: (tool for tool in ()),
    "async generator": async_generator,
    "iterator": lambda: iter([]),
    "class": lambda: list,
    "list of None": [None],
    "list of texts": ["add"],
    "list of lists": [[{}]],
    "list with a function": [len],
}


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
@pytest.mark.parametrize("returned", NO_LISTS.values(), ids=NO_LISTS)
async def test_get_tools_that_returns_no_list_of_tools_is_500(serve: Serve, kind: Any, returned: Any) -> None:
    server = await serve(kind(returned))
    answer = await server.post_init(rollout_id="r")
    assert (answer.status, answer.json["code"]) == (500, "get_tools_failed")
    assert (await server.get("/status/r")).status == 404
    assert (await server.get("/health")).json["active_rollouts"] == 0


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
async def test_a_tuple_of_tools_is_taken_for_a_list(serve: Serve, kind: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    server = await serve(kind((tool,)))
    assert (await server.post_init()).json["tools"] == [tool]


class OwnRejection(RequestRejected):
    """A user's subclass with arguments of its own."""

    def __init__(self, field: str, *, why: str) -> None:
        super().__init__(f"{field}: {why}")


@pytest.mark.parametrize("kind", [ToolsAre, ToolsAreAsync])
@pytest.mark.parametrize(
    ("raised", "detail"),
    [
        (RequestRejected("no such dataset"), "no such dataset"),
        (OwnRejection("metadata.split", why="unknown"), "metadata.split: unknown"),
        (RequestRejected(7), "7"),  # type: ignore[arg-type]
        (RequestRejected("half \ud83e"), "half ?"),
        (RequestRejected("\u00e9\n"), "\u00e9\n"),
    ],
    ids=ascii,
)
async def test_request_rejected_is_422_with_the_agents_words(serve: Serve, kind: Any, raised: Any, detail: str) -> None:
    agent = kind(raised)
    server = await serve(agent)
    answer = await server.post_init(rollout_id="r")
    assert (answer.status, answer.json["code"]) == (422, "request_rejected")
    assert answer.json["detail"].replace("\ufffd", "?") == detail
    agent.what = []
    assert (await server.post_init(rollout_id="r")).status == 202


async def test_what_get_tools_does_to_its_request_harms_nobody(serve: Serve) -> None:
    class Vandal(Instant):
        def get_tools(self, request: Any) -> Any:
            request.messages.clear()
            request.metadata.clear()
            request.rollout_id = "other"
            request.completion_params["temperature"] = "hot"
            return []

    agent = Vandal()
    server = await serve(agent)
    sent = make_request(rollout_id="r", server_url=server.trainer.url, metadata={"a": [1]})
    assert (await server.post_init(sent)).json["rollout_id"] == "r"
    await server.result("r")
    seen = agent.requests[0]
    assert (seen.messages, seen.metadata) == (sent["messages"], {"a": [1]})
    assert seen.completion_params == sent["completion_params"]
    assert (await server.post_init(sent)).status == 202


# ---------------------------------------------------------------- tools


async def test_init_answers_the_id_and_the_tools_and_nothing_else(serve: Serve) -> None:
    agent = Instant()
    by_hand = OpenAIFunctionToolSchema(
        function=OpenAIFunctionSchema(
            name="f",
            description="d",
            parameters=OpenAIFunctionParametersSchema(
                type="object",
                properties={"a": OpenAIFunctionPropertySchema(type="string", description="p", enum=["x", "y"])},
                required=["a"],
            ),
            strict=True,
        )
    )
    as_dict = {"type": "function", "function": {"name": "g", "parameters": {"$defs": {"X": {}}}}, "extra": None}
    agent.tools = [by_hand, as_dict]  # type: ignore[misc]
    server = await serve(agent)
    answer = await server.post_init(rollout_id="r")
    assert answer.json == {
        "rollout_id": "r",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "d",
                    "parameters": {
                        "type": "object",
                        "properties": {"a": {"type": "string", "description": "p", "enum": ["x", "y"]}},
                        "required": ["a"],
                    },
                    "strict": True,
                },
            },
            as_dict,
        ],
    }
