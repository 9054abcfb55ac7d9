"""From a function's signature to the JSON Schema of its parameters, and to the reader of its arguments.

Both come from the same types, through msgspec, so what the model is told and what is accepted cannot differ.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rollout.agent.tool_docs import read_docstring
from rollout.errors import InvalidJSON, ToolArgumentError
from rollout.wire import JSON, decode, encode, plain

_CONTEXT_NAME = "RolloutContext"
_CONTEXT_IN_TEXT = re.compile(rf"\b{_CONTEXT_NAME}\b")


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter that the model fills in."""

    name: str
    type: Any
    required: bool
    default: Any = None
    takes_null: bool = False


class FunctionShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a function looks like from outside; built once, when the function is made a tool."""

    description: str
    parameters: dict[str, Parameter]
    schema: dict[str, JSON]
    arguments: type[msgspec.Struct]
    context_name: str | None
    takes_self: bool
    takes_any: bool
    """Has `**kwargs`: arguments beyond the parameters are handed over as they are."""


def inner_function(function: Any) -> Any:
    """The plain function below partials, callable objects, methods and decorators: where annotations and docs are."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = type(function).__call__
    return inspect.unwrap(function)


def function_shape(function: Any, schema: dict[str, JSON] | None, frame_names: Mapping[str, Any]) -> FunctionShape:
    """Read the signature; `TypeError` naming the parameter for what no model could fill in.

    `schema` replaces the schema that would be made; then `**kwargs` are allowed too. `frame_names` are the local names
    where the tool is defined, for annotations that are still text.
    """
    label = getattr(inner_function(function), "__qualname__", type(function).__name__)
    signature = _signature(function, label)
    docs = read_docstring(inspect.getdoc(inner_function(function)))
    found = list(signature.parameters.values())
    takes_self = bool(found) and _is_unbound_method(function, found[0])
    found = found[1:] if takes_self else found
    context = next((p.name for p in found if p.name == "ctx" or _names_context(p.annotation)), None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in found)
    found = [p for p in found if p.name != context and not (schema is not None and p.kind is p.VAR_KEYWORD)]
    for parameter in found:
        _check_kind(parameter, label)
    hints = _resolve(function, found, frame_names, label)
    parameters = {p.name: _parameter(p, hints[p.name], docs.parameters.get(p.name), label) for p in found}
    arguments = _argument_struct(parameters, label)
    return FunctionShape(
        description=docs.description,
        parameters=parameters,
        schema=_object_schema(parameters) if schema is None else schema,
        arguments=arguments,
        context_name=context,
        takes_self=takes_self,
        takes_any=takes_any,
    )


def _signature(function: Any, label: str) -> inspect.Signature:
    try:
        if sys.version_info >= (3, 14):
            import annotationlib

            return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
        return inspect.signature(function)
    except (TypeError, ValueError) as exc:
        raise TypeError(
            f"tool {label}: its signature cannot be read ({exc}); wrap it in a function of its own"
        ) from None


def _is_unbound_method(function: Any, first: inspect.Parameter) -> bool:
    """Whether the function was written in a class body and waits for its instance."""
    unannotated = first.annotation is inspect.Parameter.empty
    return inspect.isfunction(function) and first.name == "self" and unannotated and "." in function.__qualname__


def _names_context(annotation: Any) -> bool:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return _CONTEXT_IN_TEXT.search(annotation) is not None
    if isinstance(annotation, type):
        return any(base.__name__ == _CONTEXT_NAME for base in annotation.__mro__)
    return any(_names_context(argument) for argument in typing.get_args(annotation))


def _check_kind(parameter: inspect.Parameter, label: str) -> None:
    kinds = {
        parameter.VAR_POSITIONAL: f"*{parameter.name} has no place in a JSON object; take a list instead",
        parameter.VAR_KEYWORD: f"**{parameter.name} has no schema; name the parameters, or pass parameters={{...}}",
        parameter.POSITIONAL_ONLY: f"{parameter.name!r} is positional-only, but models name arguments; remove the `/`",
    }
    if parameter.kind in kinds:
        raise TypeError(f"tool {label}: {kinds[parameter.kind]}")


def _resolve(
    function: Any, parameters: list[inspect.Parameter], frame_names: Mapping[str, Any], label: str
) -> dict[str, Any]:
    """The type of each parameter, with annotations that are text evaluated; what has none is `Any`."""
    holder = types.FunctionType((lambda: None).__code__, {})
    holder.__annotations__ = {
        p.name: Any if p.annotation is p.empty or p.annotation is object else p.annotation for p in parameters
    }
    module = getattr(inner_function(function), "__globals__", {})
    try:
        return typing.get_type_hints(holder, dict(module), dict(frame_names), include_extras=True)
    except NameError as exc:
        raise TypeError(
            f"tool {label}: {exc} (in an annotation); import or define it above the tool, outside `if TYPE_CHECKING`"
        ) from None
    except Exception as exc:
        raise TypeError(f"tool {label}: an annotation cannot be evaluated ({exc})") from None


def _parameter(parameter: inspect.Parameter, hint: Any, described: str | None, label: str) -> Parameter:
    hint = _with_description(hint, described)
    required = parameter.default is parameter.empty
    if parameter.default is None and not _accepts_null(hint, parameter.name, label):
        hint = Union[hint, None]  # noqa: UP007  (`x: int = None` means an optional int; `|` refuses some of the types)
    return Parameter(
        name=parameter.name,
        type=hint,
        required=required,
        default=None if required else parameter.default,
        takes_null=_accepts_null(hint, parameter.name, label),
    )


def _with_description(hint: Any, described: str | None) -> Any:
    """Texts inside `Annotated` become descriptions; the docstring's is taken where the annotation has none."""
    base: Any = hint
    extras: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        base, *rest = typing.get_args(hint)
        extras = tuple(Meta(description=extra) if isinstance(extra, str) else extra for extra in rest)
    if described and not any(isinstance(extra, Meta) and extra.description for extra in extras):
        extras = (*extras, Meta(description=described))
    for extra in extras:
        base = Annotated[base, extra]
    return base


def _accepts_null(hint: Any, name: str, label: str) -> bool:
    try:
        msgspec.convert(None, hint)
    except msgspec.ValidationError:
        return False
    except Exception as exc:
        raise _unsupported(name, label, exc) from None
    return True


def _unsupported(name: str, label: str, exc: Exception) -> TypeError:
    reason = str(exc).splitlines()[-1] if str(exc) else type(exc).__name__
    return TypeError(
        f"tool {label}: parameter {name!r} has a type that JSON cannot carry: {reason}; use JSON types, Literal, Enum, "
        "TypedDict, dataclass or msgspec.Struct"
    )


def _object_schema(parameters: dict[str, Parameter]) -> dict[str, JSON]:
    """JSON Schema of the parameters; types with a name stand under `$defs`."""
    if not parameters:
        return {"type": "object", "properties": {}}
    made, definitions = msgspec.json.schema_components(
        [parameter.type for parameter in parameters.values()], ref_template="#/$defs/{name}"
    )
    properties = dict(zip(parameters, made, strict=True))
    for name, parameter in parameters.items():
        if parameter.required:
            continue
        text, problems = encode(parameter.default)
        if not problems:
            properties[name] = {**properties[name], "default": msgspec.json.decode(text)}
    schema: dict[str, JSON] = {"type": "object", "properties": properties}
    required = [name for name, parameter in parameters.items() if parameter.required]
    if required:
        schema["required"] = required
    if definitions:
        schema["$defs"] = definitions
    return schema


def _argument_struct(parameters: dict[str, Parameter], label: str) -> type[msgspec.Struct]:
    """A Struct that holds what the model gave, and knows what it did not give: there the function's default counts."""
    for name, parameter in parameters.items():
        try:
            msgspec.json.schema(parameter.type)
            msgspec.json.Decoder(Union[parameter.type, UnsetType])  # noqa: UP007
        except Exception as exc:
            raise _unsupported(name, label, exc) from None
    fields = [
        (name, parameter.type) if parameter.required else (name, Union[parameter.type, UnsetType], UNSET)  # noqa: UP007
        for name, parameter in parameters.items()
    ]
    return msgspec.defstruct("Arguments", fields, kw_only=True)


def arguments_object(arguments: object) -> dict[str, JSON]:
    """What a model wrote as arguments, as a dict; `ToolArgumentError` with a text that the model can act on.

    Absent, blank and null mean no arguments: tools without parameters are called in all of these ways.
    """
    if isinstance(arguments, (str, bytes, bytearray)):
        if not arguments.strip():
            return {}
        try:
            arguments = decode(arguments if isinstance(arguments, str) else bytes(arguments))
        except InvalidJSON as exc:
            raise ToolArgumentError(f"the arguments are not valid JSON ({exc}); send one JSON object") from None
    if arguments is None or arguments is UNSET:
        return {}
    if isinstance(arguments, Mapping):
        return {str(name): value for name, value in arguments.items()}
    raise ToolArgumentError(f"the arguments must be one JSON object, got {_json_kind(arguments)}")


def _json_kind(value: object) -> str:
    kinds: tuple[tuple[Any, str], ...] = (
        (bool, "a boolean"),
        ((int, float), "a number"),
        (str, "a string"),
        ((list, tuple), "an array"),
    )
    return next((kind for types_, kind in kinds if isinstance(value, types_)), f"a {type(value).__name__}")


def convert_arguments(shape: FunctionShape, given: dict[str, JSON]) -> dict[str, Any]:
    """Keyword arguments for the function; `ToolArgumentError` naming what is missing, unknown or of the wrong type.

    Models quote numbers: "5" is taken for an integer, "true" for a boolean, 5.0 for an integer. A boolean is never a
    number, only a string is a string, and null for an optional parameter that does not take null is as if absent.
    """
    unknown = [name for name in given if name not in shape.parameters]
    extra = {name: given[name] for name in unknown} if shape.takes_any else {}
    if unknown and not shape.takes_any:
        raise ToolArgumentError(_unknown_arguments(unknown, list(shape.parameters)))
    known = {
        name: value
        for name, value in given.items()
        if name not in extra and not (value is None and _null_is_absent(shape.parameters[name]))
    }
    missing = [repr(p.name) for p in shape.parameters.values() if p.required and p.name not in known]
    if missing:
        raise ToolArgumentError(f"missing required argument{'s'[: len(missing) > 1]}: {', '.join(missing)}")
    try:
        values = msgspec.convert(known, shape.arguments, strict=False, str_keys=True)
    except msgspec.ValidationError as exc:
        raise ToolArgumentError(f"wrong argument: {plain(str(exc)).replace('`$.', '`')}") from None
    except RecursionError:
        raise ToolArgumentError("the arguments nest too deep") from None
    return {name: getattr(values, name) for name in known} | extra


def _null_is_absent(parameter: Parameter) -> bool:
    return not parameter.required and not parameter.takes_null


def _unknown_arguments(unknown: list[str], names: list[str]) -> str:
    near = [(name, difflib.get_close_matches(name, names, 1)) for name in unknown]
    text = ", ".join(f"{name!r} (did you mean {match[0]!r}?)" if match else repr(name) for name, match in near)
    takes = "it takes " + ", ".join(repr(name) for name in names) if names else "it takes no arguments"
    return f"unknown argument{'s'[: len(unknown) > 1]} {plain(text)}; {takes}"
