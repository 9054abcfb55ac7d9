"""The tool calls of one turn, run side by side; each gets its message, whatever becomes of the others.

Models call tools that do not exist, with arguments that are not JSON, twice under one id or under none. All of that
ends as a tool message that the model can read: an unanswered call would make the next request invalid.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout.agent.tool_results import ERROR_PREFIX, describe_error, serialize_tool_result
from rollout.agent.tool_schema import arguments_object, inner_function
from rollout.agent.tool_threads import ToolThreads
from rollout.agent.tools import Tool
from rollout.errors import ToolArgumentError, ToolError, ToolExecutionError
from rollout.tracing import Span
from rollout.wire import JSON, plain

logger = logging.getLogger(__name__)

_threads = ToolThreads()

DEFAULT_MAX_PARALLEL = 64
"""Calls of one turn that run at once unless `max_parallel` says otherwise."""

OnDone = Callable[[str, float, "str | None"], None]
"""Told of each call that ended: the tool's name, milliseconds, and the error text or None."""


class _Call(NamedTuple):
    """One entry of `tool_calls`, as far as it can be read."""

    source: Any
    id: Any
    name: str
    arguments: Any


_NO_SPAN = Span()

Answer = Callable[[_Call], Awaitable[Any]]


async def run_tool_calls(
    tools: Sequence[Any],
    tool_calls: Any,
    *,
    ctx: object = None,
    on_done: OnDone | None = None,
    max_parallel: int | None = DEFAULT_MAX_PARALLEL,
    implementations: Mapping[str, Callable[..., Any]] | None = None,
    span: Span = _NO_SPAN,
) -> list[dict[str, JSON]]:
    """The tool messages of one turn's calls, one for each, in their order.

    Async tools run side by side on the loop, the others in threads. A call that cannot be carried out,
    or whose tool raises anything at all, is answered with "Error: ..."; the text says what the model could do about it.
    Only what `@tool` made is run, and what `implementations` names; a dict among `tools` is a definition without code.

    When the caller is cancelled, the async tools are cancelled and awaited before that goes on. A thread cannot be
    cancelled: its tool runs to its end, and what it returns is dropped.
    """
    answer = functools.partial(_answer_call, _by_name(tools), implementations or {}, ctx)
    return await _Turn(answer, on_done, max_parallel, span).run(tool_calls)


async def execute_tool_calls(tool_calls: Any, executor: Callable[..., Any]) -> list[dict[str, JSON]]:
    """The tool messages of all calls, in their order, made by `executor(tool_call)` or `executor(name, arguments)`.

    The executor may give back a whole tool message, or a value that becomes one. What it raises becomes an error.
    """
    by_name = _takes_name_and_arguments(executor)
    answer = functools.partial(_answer_by_executor, executor, by_name)
    return await _Turn(answer, None, DEFAULT_MAX_PARALLEL).run(tool_calls)


def parse_tool_arguments(tool_call: Any) -> dict[str, JSON]:
    """The arguments of a call as a dict; `ToolArgumentError` where they are not a JSON object."""
    call = _read_call(tool_call)
    try:
        return arguments_object(call.arguments)
    except ToolArgumentError as exc:
        raise ToolArgumentError(str(exc), call.id if isinstance(call.id, str) else None, call.name) from None


def get_tool_call_info(tool_call: Any) -> tuple[str, str, dict[str, JSON]]:
    """Id, name and arguments of a call; "" for an id or a name that is not there. Raises `ToolArgumentError`."""
    call = _read_call(tool_call)
    return ("" if call.id is None else call.id, call.name, parse_tool_arguments(tool_call))


class _Turn:
    """Owns the tasks of one turn's calls."""

    def __init__(self, answer: Answer, on_done: OnDone | None, max_parallel: int | None, span: Span = _NO_SPAN) -> None:
        self._answer, self._on_done, self._span = answer, on_done, span
        self._slots: contextlib.AbstractAsyncContextManager[None] = (
            contextlib.nullcontext() if max_parallel is None else asyncio.Semaphore(max(1, max_parallel))
        )
        self._cancelled = False

    async def run(self, tool_calls: Any) -> list[dict[str, JSON]]:
        """One message for each call. No task outlives this, unless it is cancelled twice."""
        calls = [_read_call(source) for source in _listed(tool_calls)]
        if not calls:
            return []
        tasks = [asyncio.create_task(self._run_one(call), name="rollout tool") for call in calls]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            self._cancelled = True
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        return [
            _message(call, f"{ERROR_PREFIX}the tool cancelled itself") if task.cancelled() else task.result()
            for call, task in zip(calls, tasks, strict=True)
        ]

    async def _run_one(self, call: _Call) -> dict[str, JSON]:
        async with self._slots:
            started = time.perf_counter()
            with self._span.child("execute_tool", call.name) as span:
                content, error = await self._outcome(call)
                if error is not None:
                    span.fail("tool_error")
            if self._on_done is not None:
                self._on_done(call.name, (time.perf_counter() - started) * 1000, error)
        return content if isinstance(content, dict) else _message(call, content)

    async def _outcome(self, call: _Call) -> tuple[Any, str | None]:
        """The content and, if it is one, the error. Whatever a tool raises stays here: it is the model's to read."""
        try:
            result = await self._answer(call)
            if isinstance(result, dict) and result.get("role") == "tool" and "content" in result:
                return result, None
            return serialize_tool_result(result), None
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError):
                if self._cancelled:
                    raise
                _forget_cancellation()
            error = describe_error(exc)
            if not isinstance(exc, ToolError):
                logger.warning("tool %r raised %s", plain(call.name), type(exc).__name__)
                logger.debug("traceback of tool %r", plain(call.name), exc_info=exc)
            return f"{ERROR_PREFIX}{error}", error


def _message(call: _Call, content: str) -> dict[str, JSON]:
    """The answer to the call, under its id as it came; no id is invented."""
    message: dict[str, JSON] = {"role": "tool", "content": content}
    if call.id is not None:
        message["tool_call_id"] = call.id
    return message


def _forget_cancellation() -> None:
    """A tool that cancels its own task, or raises CancelledError, has failed; nobody has cancelled the turn."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def _listed(tool_calls: Any) -> list[Any]:
    """The calls of a turn; what is no list of calls is taken for one, so that it gets its error message."""
    if tool_calls is None or tool_calls is msgspec.UNSET:
        return []
    if isinstance(tool_calls, Sequence) and not isinstance(tool_calls, (str, bytes)):
        return list(tool_calls)
    return [tool_calls]


def _read_call(source: Any) -> _Call:
    """What can be read of a call: `{"id", "function": {"name", "arguments"}}`, the same flat, or objects alike."""
    call_id = _field(source, "id")
    function = _field(source, "function")
    holder = source if function is None else function
    name = _field(holder, "name")
    return _Call(source, call_id, name if isinstance(name, str) else "", _field(holder, "arguments"))


def _field(source: Any, key: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(key)
    if source is None or isinstance(source, (str, bytes, int, float, list, tuple)):
        return None
    try:
        return getattr(source, key, None)
    except Exception:
        return None


def _by_name(tools: Sequence[Any]) -> dict[str, Any]:
    """Tools and definitions by name; of two with one name a tool that can run comes first."""
    found: dict[str, Any] = {}
    for item in tools:
        name = item.name if isinstance(item, Tool) else _field(_field(item, "function"), "name")
        if isinstance(name, str) and not (name in found and isinstance(found[name], Tool)):
            found[name] = item
    return found


async def _answer_call(
    tools: Mapping[str, Any], implementations: Mapping[str, Callable[..., Any]], ctx: object, call: _Call
) -> Any:
    if not call.name.strip():
        raise ToolExecutionError("the tool call names no function; " + _what_there_is([*tools, *implementations]))
    runnable = implementations.get(call.name, tools.get(call.name))
    if runnable is None:
        raise ToolExecutionError(_no_such_tool(call.name, [*tools, *implementations]))
    if isinstance(runnable, Tool):
        return await _invoke(runnable.bound_call(runnable.parse_arguments(call.arguments), ctx), runnable.is_async)
    if call.name not in implementations:
        raise ToolExecutionError(f"tool {call.name!r} has no implementation")
    arguments = arguments_object(call.arguments)
    is_async = inspect.iscoroutinefunction(inner_function(runnable))
    return await _invoke(functools.partial(runnable, **arguments), is_async)


async def _answer_by_executor(executor: Callable[..., Any], by_name: bool, call: _Call) -> Any:
    arguments = (call.name, arguments_object(call.arguments)) if by_name else (call.source,)
    is_async = inspect.iscoroutinefunction(inner_function(executor))
    return await _invoke(functools.partial(executor, *arguments), is_async)


def _takes_name_and_arguments(executor: Callable[..., Any]) -> bool:
    """Whether the executor cannot be called with one argument, but with two."""
    try:
        signature = inspect.signature(executor)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(None)
    except TypeError:
        with contextlib.suppress(TypeError):
            signature.bind(None, None)
            return True
    return False


def _no_such_tool(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"there is no tool {plain(name)!r}{hint}; " + _what_there_is(names)


def _what_there_is(names: list[str]) -> str:
    return "the tools are " + ", ".join(map(repr, names)) if names else "there are no tools"


async def _invoke(call: Callable[[], Any], is_async: bool) -> Any:
    """The result of the call; what turns out to be awaitable is awaited on the loop."""
    result = call() if is_async else await _threads.call(call)
    return await result if inspect.isawaitable(result) else result
