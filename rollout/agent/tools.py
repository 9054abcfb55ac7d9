"""Tools of an agent: a plain function with `@tool` above it is one, with its schema read from the signature."""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import msgspec

from rollout.agent.tool_schema import arguments_object, convert_arguments, function_shape, inner_function
from rollout.errors import ToolArgumentError
from rollout.wire import JSON, encode


class Tool:
    """A function that a model may call. Calling it in Python still calls the plain function, with nothing checked.

    Immutable. A tool made of a method is bound by attribute access, as the method would be.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        strict: bool | None = None,
        parameters: dict[str, JSON] | None = None,
        frame_names: Mapping[str, Any] | None = None,
    ) -> None:
        """`TypeError` where the signature cannot be filled in by a model, `ValueError` for a blank name."""
        if isinstance(function, staticmethod):
            function = function.__func__
        elif isinstance(function, Tool):
            function = function.function
        if not callable(function):
            raise TypeError(f"a tool is made of a function, not of {type(function).__name__}")
        self.function: Callable[..., Any] = function
        self.shape = function_shape(function, parameters, frame_names or {})
        self.name = _tool_name(function) if name is None else name
        if not self.name.strip():
            raise ValueError("the name of a tool is blank")
        self._instance: object | None = None
        self._schema_text = _schema_text(self, description, strict)
        self.__doc__ = inspect.getdoc(function)
        self.__wrapped__ = function

    @property
    def schema(self) -> dict[str, JSON]:
        """The definition as it goes over the wire; a new dict each time, always equal."""
        made: dict[str, JSON] = msgspec.json.decode(self._schema_text)
        return made

    @property
    def description(self) -> str:
        """What the model is told about the tool."""
        return str(self.schema["function"].get("description", ""))

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine; other tools run in a thread."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(inner_function(self.function))

    def parse_arguments(self, arguments: object) -> dict[str, Any]:
        """Keyword arguments from what a model wrote (JSON text, a dict, or nothing); `ToolArgumentError` otherwise."""
        try:
            return convert_arguments(self.shape, arguments_object(arguments))
        except ToolArgumentError as exc:
            raise ToolArgumentError(str(exc), None, self.name) from None

    def bound_call(self, arguments: dict[str, Any], ctx: object = None) -> Callable[[], Any]:
        """The call, ready to be made, with the context put in where the function asks for it."""
        context_name = self.shape.context_name
        keywords = arguments if context_name is None else {**arguments, context_name: ctx}
        return lambda: self(**keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._instance is None:
            return self.function(*args, **kwargs)
        return self.function(self._instance, *args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> Tool:
        if instance is None or not self.shape.takes_self or self._instance is not None:
            return self
        bound = copy.copy(self)
        bound._instance = instance
        return bound

    def __repr__(self) -> str:
        return f"<tool {self.name!r}>"


def _tool_name(function: Any) -> str:
    inner = inner_function(function)
    name = getattr(function, "__name__", None) or getattr(inner, "__name__", "")
    if name == "__call__":
        name = type(function).__name__
    if name == "<lambda>":
        raise ValueError("a lambda has no name; pass name=...")
    return str(name)


def _schema_text(made: Tool, description: str | None, strict: bool | None) -> bytes:
    function: dict[str, JSON] = {"name": made.name}
    text = made.shape.description if description is None else description
    if text:
        function["description"] = text
    function["parameters"] = {**made.shape.schema, "additionalProperties": False} if strict else made.shape.schema
    if strict is not None:
        function["strict"] = strict
    schema, problems = encode({"type": "function", "function": function})
    if problems:
        raise TypeError(f"tool {made.name!r}: its schema is not JSON: {problems[0]}")
    return schema


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool | None = None,
    parameters: dict[str, JSON] | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool | None = None,
    parameters: dict[str, JSON] | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """A tool made of a plain or async function or method.

    ::

        @tool
        def add(a: int, b: int = 1) -> int:
            '''Add two numbers.

            Args:
                a: the first one
            '''
            return a + b

    Types may be those of JSON, unions, `Literal`, enums, TypedDicts, dataclasses and Structs, nested; limits and
    descriptions come from `Annotated[int, msgspec.Meta(ge=1)]` and `Annotated[str, "a city"]`. A parameter called `ctx`
    or annotated `RolloutContext` is filled in with the rollout's context and not shown to the model. `parameters`
    replaces the schema that would be made. `TypeError` for signatures that no model could fill in.
    """
    frame_names = dict(sys._getframe(1).f_locals)

    def decorate(decorated: Callable[..., Any]) -> Tool:
        return Tool(
            decorated,
            name=name,
            description=description,
            strict=strict,
            parameters=parameters,
            frame_names=frame_names,
        )

    return decorate if function is None else decorate(function)


def bind_tools(tools: Iterable[Any], instance: object) -> list[Any]:
    """The tools, with those that are made of methods bound to the instance."""
    return [item.__get__(instance, type(instance)) if isinstance(item, Tool) else item for item in tools]


def tools_to_wire(tools: Sequence[Any]) -> list[Any]:
    """The definitions as they go over the wire: dicts untouched, Structs as they are; `TypeError` naming the index."""
    return [_to_wire(item, index) for index, item in enumerate(tools)]


def tools_text(tools: Sequence[Any]) -> tuple[bytes, list[str]]:
    """JSON of the definitions, and what of them JSON cannot hold; `TypeError` naming the index of what is no tool."""
    return encode([msgspec.Raw(item._schema_text) if type(item) is Tool else item for item in _checked(tools)], "tools")


def _checked(tools: Sequence[Any]) -> Sequence[Any]:
    for index, item in enumerate(tools):
        if not isinstance(item, (dict, msgspec.Struct, Tool)):
            _to_wire(item, index)  # raises
    return tools


def _to_wire(item: Any, index: int) -> Any:
    if isinstance(item, (dict, msgspec.Struct)):
        return item
    if isinstance(item, Tool):
        return item.schema
    hint = "; put @tool above it" if isinstance(item, (types.FunctionType, types.MethodType)) else ""
    raise TypeError(f"tools[{index}] is of type {type(item).__name__}, not a tool, a dict or a schema{hint}")
