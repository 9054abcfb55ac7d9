"""Making tools, and running the calls of one turn."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import threading
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agent.tool_calls import execute_tool_calls, get_tool_call_info, parse_tool_arguments, run_tool_calls
from rollout.agent.tool_results import (
    create_tool_error_result,
    create_tool_result,
    describe_error,
    serialize_tool_result,
)
from rollout.agent.tool_threads import ToolThreads
from rollout.agent.tools import Tool, bind_tools, tool, tools_to_wire
from rollout.errors import ToolArgumentError, ToolExecutionError
from rollout.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolResponse,
)


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool
async def echo(text: str = "nothing") -> str:
    """Say it again."""
    return text


@tool
def fail(kind: str) -> None:
    raise {
        "value": ValueError("no such city"),
        "blank": ValueError(),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "cancel": asyncio.CancelledError(),
        "tool": ToolExecutionError("the shop is closed"),
        "stop": StopIteration(),
    }[kind]


def call(name: str, arguments: Any = None, call_id: Any = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def answer(*calls: Any, tools: Any = (add, echo, fail), **options: Any) -> list[str]:
    return [message["content"] for message in await run_tool_calls(tools, list(calls), **options)]


# ---------------------------------------------------------------- making tools


def test_a_tool_still_works_as_the_function_it_was() -> None:
    assert (add(2, 3), add.name, add.description, add.__doc__) == (5, "add", "Add two numbers.", "Add two numbers.")


def test_name_description_and_strict_can_be_given() -> None:
    @tool(name="sum", description="Sums up.", strict=True)
    def anything(a: int) -> int:
        return a

    assert anything.schema["function"] == {
        "name": "sum",
        "description": "Sums up.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    assert repr(anything) == "<tool 'sum'>"


async def test_a_given_schema_is_sent_as_it_is_and_allows_any_arguments() -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "x-own": [1.5, None]}

    @tool(parameters=schema)
    def search(**kwargs: Any) -> str:
        return json.dumps(kwargs)

    assert search.schema["function"]["parameters"] == schema
    assert await answer(call("search", '{"q": "a", "n": 2}'), tools=[search]) == ['{"q": "a", "n": 2}']


def test_changing_a_schema_that_was_handed_out_changes_nothing() -> None:
    add.schema["function"]["name"] = "other"
    assert add.schema["function"]["name"] == "add"


class Shop:
    def __init__(self, price: int) -> None:
        self.price = price

    @tool
    def cost(self, count: int) -> int:
        return self.price * count

    @tool
    async def tax(self) -> float:
        return self.price / 10

    @tool
    @staticmethod
    def free(count: int) -> int:
        return 0 * count


async def test_methods_become_tools_of_their_instance() -> None:
    cheap, dear = Shop(2), Shop(50)
    assert (cheap.cost(3), cheap.free(3), Shop.cost(dear, 2)) == (6, 0, 100)
    texts = await answer(
        call("cost", {"count": 2}), call("tax"), call("free", {"count": 2}), tools=[dear.cost, dear.tax, dear.free]
    )
    assert texts == ["100", "5.0", "0"]


def test_binding_leaves_alone_what_is_no_method() -> None:
    schema: dict[str, Any] = {"type": "function"}
    bound = bind_tools([Shop.cost, add, schema], Shop(4))
    assert bound[0](2) == 8
    assert bound[1] is add
    assert bound[2] is schema
    assert bound[0].__get__(Shop(9)) is bound[0]


def test_callable_objects_and_partials_become_tools() -> None:
    class Weather:
        """Tells the weather."""

        def __call__(self, city: str) -> str:
            """Look out of the window."""
            return f"sun in {city}"

    def power(base: int, exponent: int) -> int:
        return int(base**exponent)

    weather, square = tool(Weather()), tool(functools.partial(power, exponent=2))
    assert (weather.name, weather("Rome"), weather.description) == ("Weather", "sun in Rome", "Look out of the window.")
    assert (square.name, square(3)) == ("power", 9)
    assert tool(add)(1, 1) == 2


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: tool(lambda x: x), ValueError, "pass name="),
        (lambda: tool(name=" ")(add), ValueError, "blank"),
        (lambda: tool(3), TypeError, "not of int"),  # type: ignore[call-overload]
        (lambda: tool(parameters={"x": object()})(add), TypeError, "not JSON"),
    ],
    ids=["lambda", "blank name", "no function", "no JSON"],
)
def test_what_cannot_be_a_tool_is_refused(make: Callable[[], Tool], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_tools_go_over_the_wire_as_they_were_given() -> None:
    plain: dict[str, Any] = {"type": "function", "function": {"name": "x", "parameters": None}}
    struct = OpenAIFunctionToolSchema(function=OpenAIFunctionSchema(name="y"))
    wire = tools_to_wire([add, plain, struct])
    assert wire[0] == add.schema
    assert wire[1] is plain
    assert wire[2] is struct


@pytest.mark.parametrize(("item", "says"), [(len, "builtin"), (answer, "put @tool above it"), (None, "NoneType")])
def test_what_is_no_tool_is_named_with_its_index(item: Any, says: str) -> None:
    with pytest.raises(TypeError, match=rf"tools\[1\].*{says}"):
        tools_to_wire([add, item])


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("arguments", ["", "  ", None, "null", "{}", {}, b"", msgspec.UNSET])
async def test_no_arguments_come_in_many_shapes(arguments: Any) -> None:
    assert await answer(call("echo", arguments)) == ["nothing"]


async def test_a_call_without_the_arguments_key_has_none() -> None:
    assert await answer({"id": "1", "function": {"name": "echo"}}) == ["nothing"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("print(1)", "not valid JSON"),
        ("[" * 5000, "not valid JSON"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "deeper"),
        ('{"a": "\\ud83e"}', "not valid JSON"),
        ('{"a": "\ud83e"}', "not valid JSON"),
        ('{"a": NaN}', "not valid JSON"),
        ("[1]", "an array"),
        ("5", "a number"),
        ("true", "a boolean"),
        ('"{}"', "a string"),
        (object(), "a object"),
        ('{"b": 1}', "missing required argument: 'a'"),
        ('{"a": 1, "bb": 2}', "unknown argument 'bb' (did you mean 'b'?); it takes 'a', 'b'"),
        ('{"a": 1, "x": 2, "y": 3}', "unknown arguments 'x', 'y'"),
        ('{"a": "five"}', "Expected `int`"),
        ('{"a": true}', "got `bool` - at `a`"),
        ('{"a": 1.5}', "got `float`"),
        ('{"a": null}', "got `null`"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(arguments: Any, says: str) -> None:
    (text,) = await answer(call("add", arguments))
    assert text.startswith("Error: ")
    assert says in text
    text.encode()


@pytest.mark.parametrize(
    ("arguments", "result"), [('{"a": "5"}', "6"), ('{"a": 5.0}', "6"), ('{"a": 5, "b": null}', "6")]
)
async def test_what_models_write_for_an_integer_is_accepted(arguments: str, result: str) -> None:
    assert await answer(call("add", arguments)) == [result]


async def test_a_tool_without_parameters_says_so() -> None:
    @tool
    def now() -> str:
        return "12:00"

    assert await answer(call("now", '{"zone": "UTC"}'), tools=[now]) == [
        "Error: unknown argument 'zone'; it takes no arguments"
    ]


class Deep(msgspec.Struct):
    next: Deep | None = None


def test_a_python_value_that_nests_too_deep_is_an_argument_error() -> None:
    @tool
    def take(x: Deep) -> None: ...

    value: dict[str, Any] = {}
    for _ in range(100_000):  # newer Pythons let C code go deeper than older ones
        value = {"next": value}
    with pytest.raises(ToolArgumentError, match="too deep"):
        take.parse_arguments({"x": value})


@settings(max_examples=30, deadline=None)
@given(st.text())
def test_any_text_as_arguments_gives_a_dict_or_an_argument_error(text: str) -> None:
    with contextlib.suppress(ToolArgumentError):
        assert isinstance(parse_tool_arguments(call("add", text)), dict)


# ---------------------------------------------------------------- one turn


async def test_every_call_is_answered_in_order_whatever_its_siblings_do() -> None:
    messages = await run_tool_calls(
        [add, echo, fail],
        [call("add", '{"a": 1}', "1"), call("fail", '{"kind": "value"}', "2"), call("echo", '{"text": "hi"}', "3")],
    )
    assert messages == [
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: ValueError: no such city", "tool_call_id": "2"},
        {"role": "tool", "content": "hi", "tool_call_id": "3"},
    ]


async def test_ids_are_repeated_as_they_came_and_never_invented() -> None:
    calls = [call("echo", "", ""), call("echo", "", 7), call("echo", "", None), {"function": {"name": "echo"}}]
    messages = await run_tool_calls([echo], [*calls, call("echo", "", "same"), call("echo", "", "same")])
    assert [message.get("tool_call_id", "absent") for message in messages] == [
        "",
        7,
        "absent",
        "absent",
        "same",
        "same",
    ]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("value", "ValueError: no such city"),
        ("blank", "ValueError"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("cancel", "CancelledError"),
        ("tool", "the shop is closed"),
    ],
)
async def test_whatever_a_tool_raises_is_a_message(kind: str, text: str) -> None:
    async def same(kind: str) -> None:
        fail(kind)

    texts = await answer(call("fail", {"kind": kind}), call("same", {"kind": kind}), tools=[fail, tool(same)])
    assert texts == [f"Error: {text}"] * 2


async def test_stop_iteration_of_a_tool_does_not_hang_the_turn() -> None:
    (text,) = await answer(call("fail", {"kind": "stop"}))
    assert "StopIteration" in text


async def test_unknown_and_unfinished_tools_are_named() -> None:
    schema = {"type": "function", "function": {"name": "remote"}}
    texts = await answer(call("ad"), call("remote"), call("zzz"), tools=[add, schema])
    assert texts == [
        "Error: there is no tool 'ad' (did you mean 'add'?); the tools are 'add', 'remote'",
        "Error: tool 'remote' has no implementation",
        "Error: there is no tool 'zzz'; the tools are 'add', 'remote'",
    ]
    assert await answer(call("add"), tools=[]) == ["Error: there is no tool 'add'; there are no tools"]


@pytest.mark.parametrize(
    "malformed", ["x", None, 5, [], {}, {"id": "1"}, {"function": "add"}, {"function": {"name": 5}}]
)
async def test_a_malformed_call_is_answered_too(malformed: Any) -> None:
    messages = await run_tool_calls([add], [malformed, call("add", {"a": 1})])
    assert messages[0]["content"] == "Error: the tool call names no function; the tools are 'add'"
    assert messages[1]["content"] == "2"


async def test_a_call_object_that_breaks_when_read_is_malformed() -> None:
    class Broken:
        @property
        def function(self) -> Any:
            raise RuntimeError

    assert (await answer(Broken()))[0].startswith("Error: the tool call names no function")


async def test_flat_calls_and_structs_are_understood() -> None:
    struct = OpenAIFunctionToolCall(id="s", function=OpenAIFunctionCallSchema(name="add", arguments='{"a": 4}'))
    assert await answer({"name": "add", "arguments": {"a": 1}}, struct) == ["2", "5"]


@pytest.mark.parametrize(("calls", "count"), [(None, 0), ([], 0), (msgspec.UNSET, 0), (call("echo"), 1), ("text", 1)])
async def test_what_is_no_list_of_calls_is_answered_all_the_same(calls: Any, count: int) -> None:
    assert len(await run_tool_calls([echo], calls)) == count


async def test_of_two_tools_with_one_name_the_one_that_can_run_is_run() -> None:
    schema = {"type": "function", "function": {"name": "add"}}
    assert await answer(call("add", {"a": 1}), tools=[schema, add, schema]) == ["2"]


async def test_implementations_run_what_schemas_describe() -> None:
    async def later(x: int) -> int:
        return x * 2

    options = {"now": lambda x: x, "later": later, "add": add}
    schemas = [{"type": "function", "function": {"name": name}} for name in ("now", "later", "add")]
    calls = [call("now", {"x": 1}), call("later", {"x": 2}), call("add", {"a": "3"}), call("now", {"y": 1})]
    texts = await answer(*calls, tools=schemas, implementations=options)
    assert texts[:3] == ["1", "4", "4"]
    assert texts[3].startswith("Error: TypeError")


async def test_async_tools_run_side_by_side() -> None:
    barrier = asyncio.Barrier(3)

    @tool
    async def meet() -> str:
        await barrier.wait()
        return "met"

    async with asyncio.timeout(0.9):
        assert await answer(*[call("meet")] * 3, tools=[meet]) == ["met"] * 3


async def test_plain_tools_run_side_by_side_in_threads() -> None:
    barrier = threading.Barrier(20, timeout=0.9)

    @tool
    def meet() -> bool:
        barrier.wait()
        return threading.current_thread() is not threading.main_thread()

    assert await answer(*[call("meet")] * 20, tools=[meet]) == ["true"] * 20


async def test_no_more_calls_run_at_once_than_allowed() -> None:
    running = most = 0

    @tool
    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await answer(*[call("count")] * 1000, tools=[count], max_parallel=3)
    assert most == 3
    await answer(*[call("count")] * 200, tools=[count], max_parallel=None)
    assert most == 200


async def test_context_variables_reach_every_tool() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("seen")

    @tool
    def blocking() -> str:
        return variable.get()

    @tool
    async def quick() -> str:
        return variable.get()

    assert await answer(call("blocking"), call("quick"), tools=[blocking, quick]) == ["seen", "seen"]


async def test_a_plain_function_that_returns_an_awaitable_is_awaited() -> None:
    async def work() -> str:
        return "done"

    @tool
    def start() -> Any:
        return work()

    assert await answer(call("start"), tools=[start]) == ["done"]


async def test_the_context_is_put_in_and_not_shown() -> None:
    @tool
    def who(greeting: str, ctx: Any) -> str:
        return f"{greeting} {ctx}"

    assert list(who.schema["function"]["parameters"]["properties"]) == ["greeting"]
    assert await answer(call("who", {"greeting": "hi"}), tools=[who], ctx="me") == ["hi me"]


async def test_each_call_is_reported_with_its_time_and_error() -> None:
    seen: list[tuple[str, bool, str | None]] = []

    def note(name: str, latency_ms: float, error: str | None) -> None:
        seen.append((name, latency_ms >= 0, error))

    await answer(call("echo"), call("fail", {"kind": "value"}), on_done=note)
    assert sorted(seen) == [("echo", True, None), ("fail", True, "ValueError: no such city")]


async def test_a_tool_that_returns_a_whole_tool_message_has_it_sent() -> None:
    message = {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "mine"}

    @tool
    def whole() -> dict[str, Any]:
        return message

    assert await run_tool_calls([whole], [call("whole")]) == [message]


# ---------------------------------------------------------------- cancellation


async def test_cancelling_the_turn_cancels_and_awaits_its_tools() -> None:
    started, ended = asyncio.Event(), []

    @tool
    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    turn = asyncio.create_task(run_tool_calls([wait], [call("wait"), call("wait")]))
    await started.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert ended == [True, True]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_a_thread_returns_after_a_cancel_is_dropped() -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    @tool
    def block() -> None:
        started.set()
        go.wait(1)
        ended.set()

    turn = asyncio.create_task(run_tool_calls([block], [call("block")]))
    await asyncio.to_thread(started.wait, 1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    go.set()
    assert await asyncio.to_thread(ended.wait, 1)


def test_a_thread_that_ends_after_its_loop_does_no_harm() -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    @tool
    def block() -> None:
        started.set()
        go.wait(1)
        ended.set()

    async def run() -> None:
        turn = asyncio.create_task(run_tool_calls([block], [call("block")]))
        await asyncio.to_thread(started.wait, 1)
        turn.cancel()

    asyncio.run(run())
    go.set()
    assert ended.wait(1)
    assert asyncio.run(answer(call("add", {"a": 1}))) == ["2"]


async def test_threads_are_reused_and_end_when_idle() -> None:
    threads = ToolThreads(idle_seconds=0.02)
    first = await threads.call(threading.current_thread)
    assert await threads.call(threading.current_thread) is first
    await asyncio.to_thread(first.join, 0.9)
    assert not first.is_alive()
    assert await threads.call(threading.current_thread) is not first


async def test_a_thread_that_was_promised_a_job_waits_for_it_however_late() -> None:
    threads = ToolThreads(idle_seconds=0)
    assert await asyncio.gather(*[threads.call(functools.partial(int, n)) for n in range(200)]) == list(range(200))


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def test_a_tool_that_cancels_its_own_task_has_failed() -> None:
    @tool
    async def then_waits() -> None:
        cancel_this_task()
        await asyncio.sleep(0)

    @tool
    async def then_returns() -> None:
        cancel_this_task()

    texts = await answer(call("then_waits"), call("then_returns"), call("echo"), tools=[then_waits, then_returns, echo])
    assert texts == ["Error: CancelledError", "Error: the tool cancelled itself", "nothing"]


# ---------------------------------------------------------------- results as text


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int


class Model:
    def model_dump(self) -> dict[str, Any]:
        return {"city": "Rome"}


class Scalar:
    def item(self) -> float:
        return 1.5


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        ("a\x00b", "a\x00b"),
        ("lone \ud83e", "lone \ufffd"),
        (None, ""),
        (True, "true"),
        (3, "3"),
        (1.0, "1.0"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (decimal.Decimal("1.5"), "1.5"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"by\xfftes", "by\ufffdtes"),
        ({1}, "[1]"),
        (Colour.RED, "red"),
        (Point(1), '{"x":1}'),
        (Model(), '{"city":"Rome"}'),
        (Scalar(), "1.5"),
        (ValueError("odd"), "ValueError: odd"),
        (ToolResponse(text="said"), "said"),
        (ToolResponse(), ""),
        (ToolResponse(text="see", image=["i"]), '{"text":"see","image":["i"]}'),
    ],
)
def test_results_become_text(result: Any, text: str) -> None:
    assert serialize_tool_result(result) == text


def test_what_json_cannot_hold_is_named() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    for result, says in [(float("nan"), "nan"), (loop, "contains itself"), ({"o": object()}, "<object>")]:
        text = serialize_tool_result(result)
        assert says in text
        assert "(note: $" in text
        assert " at 0x" not in text


@pytest.mark.parametrize(
    "make", [lambda: (x for x in "ab"), lambda: iter([1]), echo], ids=["generator", "iterator", "coroutine"]
)
def test_what_must_be_consumed_is_an_error(make: Callable[[], Any]) -> None:
    result = make()
    assert serialize_tool_result(result).startswith("Error: the tool returned a ")
    getattr(result, "close", lambda: None)()


def test_a_large_text_is_kept_whole_and_a_large_error_is_not() -> None:
    assert len(serialize_tool_result("x" * 5_000_000)) == 5_000_000
    assert describe_error(ValueError("x" * 9000)).endswith("... (9000 characters)")


def test_an_exception_that_cannot_be_read_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(Mute()) == "Mute"


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(), s, max_size=3),
        max_leaves=6,
    )
)
def test_every_result_becomes_text_that_can_be_sent(result: Any) -> None:
    serialize_tool_result(result).encode()


# ---------------------------------------------------------------- by hand, as in the reference


def test_tool_messages_are_made_by_hand() -> None:
    assert create_tool_result("1", "ok") == {"role": "tool", "content": "ok", "tool_call_id": "1"}
    assert create_tool_error_result("1", "no")["content"] == "Error: no"


def test_a_call_is_taken_apart() -> None:
    assert get_tool_call_info(call("add", '{"a": 1}')) == ("c1", "add", {"a": 1})
    assert get_tool_call_info({}) == ("", "", {})


def test_an_argument_error_names_its_call() -> None:
    with pytest.raises(ToolArgumentError) as caught:
        parse_tool_arguments(call("add", "{"))
    assert (caught.value.tool_call_id, caught.value.tool_name) == ("c1", "add")


async def test_an_executor_of_either_form_answers_the_calls() -> None:
    async def whole(tool_call: dict[str, Any]) -> dict[str, Any]:
        return create_tool_result(tool_call["id"], "whole")

    async def parts(name: str, arguments: dict[str, Any]) -> int:
        return len(name) + int(arguments["a"])

    def plain(tool_call: dict[str, Any]) -> str:
        raise LookupError("gone")

    calls = [call("add", '{"a": 1}')]
    assert await execute_tool_calls(calls, whole) == [create_tool_result("c1", "whole")]
    assert await execute_tool_calls(calls, parts) == [create_tool_result("c1", "4")]
    assert await execute_tool_calls(calls, plain) == [create_tool_error_result("c1", "LookupError: gone")]
    assert (await execute_tool_calls(calls, dict))[0]["content"]


async def test_an_executor_that_cannot_be_called_so_fails_each_call() -> None:
    async def three(a: int, b: int, c: int) -> None: ...

    (message,) = await execute_tool_calls([call("add")], three)
    assert message["content"].startswith("Error: TypeError")
