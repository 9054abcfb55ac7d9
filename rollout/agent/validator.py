"""Looks an agent over before it serves: what would fail at the first request is told at the door, all at once."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import types
import typing
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Literal

import msgspec

from rollout.agent.loop import RolloutAgentLoop
from rollout.agent.tool_check import ValidationFinding, check_tools
from rollout.agent.tool_results import describe_error
from rollout.agent.tool_schema import inner_function
from rollout.errors import RequestRejected, RolloutError
from rollout.logs import counted
from rollout.schemas import RolloutRequest
from rollout.wire import JSON, plain

GET_TOOLS_TIMEOUT_SECONDS = 30.0
"""How long an async `get_tools()` may take in a validation."""

ValidationError = ValidationFinding
"""The name that the reference has for a finding."""

_NO_TOOLS: Any = object()
_NEVER_SENT = {"NOT_A_TOOL", "NOT_JSON", "TOO_DEEP"}
"""Findings in tools with which every init would fail."""


class AgentLoopValidationError(RolloutError):
    """The agent cannot serve; `findings` are the errors, and the text has one line for each."""

    def __init__(self, message: str, findings: list[ValidationFinding]) -> None:
        super().__init__(message, findings)
        self.findings = findings


class ValidationResult(msgspec.Struct, kw_only=True):
    """What a validation found. Warnings do not stand in the way of serving."""

    agent_name: str | None
    errors: list[ValidationFinding]
    warnings: list[ValidationFinding]
    tools: list[Any]
    """The definitions exactly as they are on the wire."""

    @property
    def valid(self) -> bool:
        """Whether nothing is in the way of serving."""
        return not self.errors

    def raise_if_invalid(self) -> None:
        """Raise `AgentLoopValidationError` if there are errors."""
        if self.errors:
            raise AgentLoopValidationError(str(self), self.errors)

    def to_dict(self) -> dict[str, JSON]:
        """All of it as plain JSON."""
        return {
            "valid": self.valid,
            "agent_name": plain(self.agent_name),
            "errors": [msgspec.to_builtins(finding) for finding in self.errors],
            "warnings": [msgspec.to_builtins(finding) for finding in self.warnings],
            "tools": plain(self.tools),
        }

    def __str__(self) -> str:
        counts = f"{counted(len(self.errors), 'error')}, {counted(len(self.warnings), 'warning')}"
        lines = [f"agent loop {self.agent_name!r}: {'valid' if self.valid else 'not valid'}, {counts}"]
        lines += [f"  error: {finding}" for finding in self.errors]
        lines += [f"  warning: {finding}" for finding in self.warnings]
        return "\n".join(lines)


def validate_agent_loop(agent: Any, request: RolloutRequest | None = None) -> ValidationResult:
    """Everything that is wrong with the agent. Never raises for what it finds, and changes nothing.

    `get_tools()` is really called, as the service would, with `request` or with an empty one. While a loop is running,
    a thread with a loop of its own does that, and the caller's loop stands still meanwhile: call it at start-up.
    """
    check = _AgentCheck(agent)
    if isinstance(agent, type):
        hint = f"validate an instance: {agent.__name__}()"
        check.add("AGENT_IS_CLASS", f"{agent.__name__} is a class, and an instance is needed", suggestion=hint)
        return check.result([])
    name = check.check_name()
    check.check_run()
    checked = check_tools(check.check_get_tools(request))
    check.findings += checked.findings
    return check.result(checked.definitions, name)


def check_before_serving(agent: Any) -> ValidationResult:
    """What `validate_agent_loop()` finds without a request; errors are only what would fail in every rollout.

    A `get_tools()` of the agent's own is not called: it may need a real request, or the loop that serves.
    """
    check = _AgentCheck(agent)
    name = check.check_name()
    check.check_run()
    get_tools = check.attribute("get_tools")
    if not callable(get_tools) or getattr(get_tools, "__func__", None) is RolloutAgentLoop.get_tools:
        check.findings += check_tools(check.check_get_tools(None)).findings
    result = check.result([], name)
    fatal = [finding for finding in result.errors if _is_hopeless(finding)]
    rest = [finding for finding in result.errors if not _is_hopeless(finding)]
    return ValidationResult(agent_name=name, errors=fatal, warnings=rest + result.warnings, tools=[])


def _is_hopeless(finding: ValidationFinding) -> bool:
    """Whether no request can change it. What is odd in a tool's schema is for the trainer to judge."""
    if finding.path.startswith("$.tools["):
        return finding.code in _NEVER_SENT
    return finding.code != "GET_TOOLS_FAILED"


class _AgentCheck:
    """Collects what is found about one agent."""

    def __init__(self, agent: Any) -> None:
        self.findings: list[ValidationFinding] = []
        self._agent = agent

    def add(
        self, code: str, message: str, path: str = "$", suggestion: str | None = None, *, warn: bool = False
    ) -> None:
        """Note a finding."""
        severity: Literal["error", "warning"] = "warning" if warn else "error"
        self.findings.append(
            ValidationFinding(code=code, message=message, path=path, suggestion=suggestion, severity=severity)
        )

    def result(self, tools: list[Any], name: str | None = None) -> ValidationResult:
        """What was found, errors apart from warnings."""
        return ValidationResult(
            agent_name=name,
            errors=[finding for finding in self.findings if finding.severity == "error"],
            warnings=[finding for finding in self.findings if finding.severity == "warning"],
            tools=tools,
        )

    def check_name(self) -> str | None:
        """The agent's name, if it has a usable one."""
        name = self.attribute("name")
        if not isinstance(name, str) or not name.strip():
            what = "no name" if name is None else f"the name {plain(name)!r}"
            hint = 'add a class attribute, for example name = "calculator"'
            self.add("MISSING_AGENT_NAME", f"the agent has {what}; a text that is not blank is needed", "$.name", hint)
            return None
        if name != name.strip() or not name.isprintable() or len(name) > 256:
            text = (
                f"the name {plain(name[:80])!r} has blanks around it, control characters, or more than 256 characters"
            )
            self.add("BAD_AGENT_NAME", text, "$.name", warn=True)
        return name

    def check_run(self) -> None:
        """Whether `run` can be awaited with a context."""
        run = self.attribute("run")
        if not callable(run):
            self.add("MISSING_RUN", "the agent has no run(ctx)", "$.run", "add `async def run(self, ctx)`")
            return
        self._check_run_is_async(run)
        try:
            inspect.signature(run).bind(None)
        except TypeError as exc:
            self.add("BAD_RUN_SIGNATURE", f"run cannot be called with the context alone: {exc}", "$.run")
        except ValueError:
            return  # a callable written in C: only a call could tell

    def _check_run_is_async(self, run: Any) -> None:
        inner = inner_function(run)
        if inspect.isasyncgenfunction(inner):
            hint = "use `return`, not `yield`"
            self.add("RUN_IS_GENERATOR", "run is an async generator; it must return one RolloutResult", "$.run", hint)
        elif _is_coroutine_function(run):
            return
        elif inspect.iscoroutinefunction(inner) or _promises_awaitable(inner):
            text = "run is a plain function that seems to return a coroutine; whether it does shows only in a rollout"
            self.add("RUN_MAY_NOT_BE_ASYNC", text, "$.run", warn=True)
        else:
            text = "run is a plain function: it would block every other rollout"
            self.add("RUN_NOT_ASYNC", text, "$.run", "write `async def run(self, ctx)`")

    def check_get_tools(self, request: RolloutRequest | None) -> list[Any]:
        """The tools that `get_tools` returns; none if it does not."""
        get_tools = self.attribute("get_tools")
        if not callable(get_tools):
            self.add("MISSING_GET_TOOLS", "the agent has no get_tools(request)", "$.get_tools")
            return []
        try:
            tools = _in_fresh_loop(get_tools, _empty_request() if request is None else request)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            self._note_failure(exc, real=request is not None)
            return []
        if not isinstance(tools, list):
            hint = "return [] for no tools" if tools is None else "return a list"
            text = f"get_tools() returned {type(tools).__name__}, not a list"
            self.add("GET_TOOLS_NOT_LIST", text, "$.get_tools", hint)
            return []
        return tools

    def _note_failure(self, exc: BaseException, *, real: bool) -> None:
        if isinstance(exc, RequestRejected) and not real:
            text = f"get_tools() rejects an empty request ({exc}), so its tools were not seen"
            self.add("GET_TOOLS_REJECTED", text, "$.get_tools", "validate with a request of yours", warn=True)
            return
        hint = None if real else "the request was an empty one; validate with a request of yours if it needs more"
        self.add("GET_TOOLS_FAILED", f"get_tools() raised {describe_error(exc)}", "$.get_tools", hint)

    def attribute(self, name: str) -> Any:
        """What the agent has under the name; None if it has nothing, or reading it raises, which is noted."""
        try:
            return getattr(self._agent, name, None)
        except Exception as exc:
            self.add("ATTRIBUTE_FAILED", f"reading {name!r} raised {describe_error(exc)}", f"$.{name}")
            return None


def _is_coroutine_function(run: Any) -> bool:
    """Whether calling it gives a coroutine for certain: seen through partials and callable objects, not wrappers."""
    while isinstance(run, functools.partial):
        run = run.func
    return inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(type(run).__call__)


def _promises_awaitable(function: Any) -> bool:
    """Whether the annotation of what it returns is an awaitable's."""
    returned = getattr(function, "__annotations__", {}).get("return")
    if isinstance(returned, str):
        return returned.split("[")[0].rsplit(".", 1)[-1].strip() in {"Awaitable", "Coroutine", "Future", "Task"}
    origin = typing.get_origin(returned) or returned
    return isinstance(origin, type) and issubclass(origin, Awaitable) and not issubclass(origin, AsyncIterator)


def _empty_request() -> RolloutRequest:
    return RolloutRequest(rollout_id="validation", server_url="http://localhost", messages=[], completion_params={})


def _in_fresh_loop(get_tools: Any, request: RolloutRequest) -> Any:
    """What `get_tools` gives when it is called on a loop, as the service does; a thread holds the loop if need be."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_ask(get_tools, request))
    outcome = types.SimpleNamespace(tools=_NO_TOOLS, error=None)
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(_ask_apart, get_tools, request, outcome), daemon=True)
    thread.start()
    thread.join()
    if outcome.error is not None:
        raise outcome.error
    return outcome.tools


def _ask_apart(get_tools: Any, request: RolloutRequest, outcome: types.SimpleNamespace) -> None:
    try:
        outcome.tools = asyncio.run(_ask(get_tools, request))
    except BaseException as exc:
        outcome.error = exc


async def _ask(get_tools: Any, request: RolloutRequest) -> Any:
    tools = get_tools(request)
    if not inspect.isawaitable(tools):
        return tools
    async with asyncio.timeout(GET_TOOLS_TIMEOUT_SECONDS):
        return await tools
