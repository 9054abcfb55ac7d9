"""Looks at tool definitions the way a chat server will, and names what it would refuse. Changes nothing, never raises.

Every walk goes by a list of what is left to see, not by recursion: a schema may nest a thousand deep or contain itself.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollout.agent.tools import Tool
from rollout.wire import JSON, MAX_DEPTH, encode, plain

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
_WRAPPING = 2
"""Levels around a tool on the wire: the message, and its list of tools."""
_NODE_LIMIT = 100_000
"""Values in one tool that are looked at; a definition that shares its parts can unfold to more than any memory."""

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_FOREIGN_TYPES = {
    "any": "no `type` at all", "arraylist": "array", "bool": "boolean", "byte": "integer", "char": "string",
    "date": "string", "datetime": "string", "dict": "object", "double": "number", "enum": "string", "float": "number",
    "hashmap": "object", "int": "integer", "list": "array", "long": "integer", "map": "object", "none": "null",
    "set": "array", "str": "string", "text": "string", "tuple": "array",
}  # fmt: skip
_SCHEMA_KEYS = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINATORS = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "if")


class ValidationFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with an agent or its tools, or likely to be."""

    code: str
    """Stable, for programs."""
    message: str
    """For people; names the tool."""
    path: str = "$"
    """Where, as in `$.tools[2].function.parameters.properties.x.type`."""
    suggestion: str | None = None
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{self.code} at {self.path}: {self.message}{hint}"


class CheckedTools(NamedTuple):
    """Tools, looked over."""

    findings: list[ValidationFinding]
    definitions: list[Any]
    """As they are on the wire; what could not go there stands here as it was."""


def check_tools(tools: Sequence[Any]) -> CheckedTools:
    """What is wrong with the tools that `get_tools()` returned, and what they look like on the wire."""
    checked = CheckedTools([], [])
    names: dict[str, int] = {}
    for index, item in enumerate(tools):
        check = _ToolCheck(item, index)
        check.run()
        checked.findings.extend(check.findings)
        checked.definitions.append(check.definition)
        if check.name is None:
            continue
        first = names.setdefault(check.name, index)
        if first != index:
            text = f"{check.label} has the same name as tools[{first}]: nobody could tell which one the model means"
            path = f"$.tools[{index}].function.name"
            checked.findings.append(ValidationFinding(code="DUPLICATE_NAME", message=text, path=path))
    return checked


class _ToolCheck:
    """One tool under the eye; `name` is what the model would call it, None if nothing could."""

    def __init__(self, item: Any, index: int) -> None:
        self.findings: list[ValidationFinding] = []
        self.name: str | None = None
        self.definition: Any = item.schema if isinstance(item, Tool) else item
        self.path = f"$.tools[{index}]"
        self.label = f"tools[{index}]"

    def run(self) -> None:
        """Collect the findings."""
        if not isinstance(self.definition, (dict, msgspec.Struct)):
            plain_function = inspect.isroutine(self.definition)
            hint = "put @tool above it" if plain_function else "use @tool, a dict or a schema"
            self._add(
                "NOT_A_TOOL", f"{self.label} is of type {type(self.definition).__name__}, not a tool", suggestion=hint
            )
            return
        named = next((n for n in _possible_names(self.definition) if isinstance(n, str) and n), None)
        self.label += f" ({plain(named)!r})" if named else ""
        if self._reads_as_json():
            self._check_definition()

    def _check_definition(self) -> None:
        if not self._check_type():
            return
        function = self.definition.get("function")
        if isinstance(function, dict):
            self._check_function(function)
        else:
            hint = _wrap_hint(self.definition)
            self._add("MISSING_FUNCTION", f"{self.label} has no `function` object", suggestion=hint)

    def _add(
        self, code: str, message: str, path: str = "", suggestion: str | None = None, *, warn: bool = False
    ) -> None:
        severity: Literal["error", "warning"] = "warning" if warn else "error"
        self.findings.append(
            ValidationFinding(
                code=code, message=message, path=self.path + path, suggestion=suggestion, severity=severity
            )
        )

    def _reads_as_json(self) -> bool:
        """Whether the definition can go over the wire as it is; from here on, it is what arrives there."""
        problem = _shape_problem(self.definition)
        if problem is not None:
            code, text, path = problem
            self._add(code, f"{self.label} {text}", path)
            return False
        encoded, problems = encode(self.definition, "")
        for line in problems[:5]:
            path, _, what = line.partition(" is ")
            self._add("NOT_JSON", f"{self.label}: a value is {what}", path)
        if not problems:
            self.definition = msgspec.json.decode(encoded)
        return not problems

    def _check_type(self) -> bool:
        """Whether it is meant to be a function."""
        kind = self.definition.get("type")
        if kind == "function":
            return True
        if kind is None:
            self._add("MISSING_TOOL_TYPE", f"{self.label} has no `type`", ".type", 'add "type": "function"')
            return True
        text = f"{self.label} has the type {plain(kind)!r}, not 'function'; it is passed on unchanged"
        self._add("TOOL_TYPE_NOT_FUNCTION", text, ".type", warn=isinstance(kind, str))
        return "function" in self.definition

    def _check_function(self, function: dict[str, JSON]) -> None:
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            self._add("MISSING_NAME", f"{self.label} has no name: no model could call it", ".function.name")
        else:
            self.name = name
            if not _NAME.match(name):
                text = f"{self.label}: the name breaks ^[a-zA-Z0-9_-]{{1,64}}$, which some servers demand"
                self._add("BAD_NAME", text, ".function.name", warn=True)
        if not isinstance(function.get("description"), (str, type(None))):
            self._add("BAD_DESCRIPTION", f"{self.label}: the description is no text", ".function.description")
        parameters = function.get("parameters")
        if parameters is None or parameters == {}:
            return
        if not isinstance(parameters, dict):
            text = f"{self.label}: the parameters are {_kind(parameters)}, not a JSON Schema object"
            self._add("PARAMETERS_NOT_OBJECT", text, ".function.parameters")
            return
        self._check_root(parameters)
        for path, schema in _schemas(parameters):
            self._check_schema(".function.parameters" + path, schema, parameters)

    def _check_root(self, parameters: dict[str, JSON]) -> None:
        kind = parameters.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        if kind is None:
            if not any(key in parameters for key in ("properties", *_COMBINATORS)):
                text = f"{self.label}: the parameters have neither a type nor properties"
                self._add("MISSING_TYPE", text, ".function.parameters", 'add "type": "object"', warn=True)
        elif "object" not in kinds and any(k in _TYPES for k in kinds if isinstance(k, str)):
            text = f"{self.label}: the parameters are of type {plain(kind)!r}, and a call has an object"
            self._add("PARAMETERS_NOT_OBJECT", text, ".function.parameters.type", 'use "type": "object"')

    def _check_schema(self, path: str, schema: JSON, root: dict[str, JSON]) -> None:
        """One schema, without those inside it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            self._add("SCHEMA_NOT_OBJECT", f"{self.label}: {_kind(schema)} where a JSON Schema belongs", path)
            return
        if "type" in schema:
            self._check_types(path + ".type", schema["type"])
        if schema.get("type") == "array" and not any(key in schema for key in ("items", "prefixItems")):
            text = f"{self.label}: an array that does not say what it holds; some servers refuse it"
            self._add("ARRAY_WITHOUT_ITEMS", text, path, 'add "items"', warn=True)
        for key in _SCHEMA_MAP_KEYS:
            if not isinstance(schema.get(key, {}), dict):
                self._add("NOT_A_MAP", f"{self.label}: `{key}` is {_kind(schema[key])}, not an object", f"{path}.{key}")
        for key in _SCHEMA_LIST_KEYS:
            if not isinstance(schema.get(key, []), list):
                self._add("NOT_A_LIST", f"{self.label}: `{key}` is {_kind(schema[key])}, not a list", f"{path}.{key}")
        self._check_required(path, schema)
        self._check_values(path, schema, root)

    def _check_types(self, path: str, given: JSON) -> None:
        for kind in given if isinstance(given, list) else [given]:
            if isinstance(kind, str) and kind in _TYPES:
                continue
            if not isinstance(kind, str):
                self._add("UNKNOWN_TYPE", f"{self.label}: a type is a text, not {_kind(kind)}", path)
                continue
            text = f"{self.label}: {plain(kind)!r} is no JSON Schema type"
            self._add("UNKNOWN_TYPE", text, path, _type_hint(kind), warn=True)

    def _check_required(self, path: str, schema: dict[str, JSON]) -> None:
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            text = f"{self.label}: `required` is {_kind(required)}, not a list of property names"
            hint = "list the name in the `required` of the object that holds the property" if required is True else None
            self._add("REQUIRED_NOT_LIST", text, path + ".required", hint)
            return
        properties = schema.get("properties")
        if not isinstance(properties, dict) or any(key in schema for key in _COMBINATORS):
            return
        for name in required:
            if name not in properties:
                near = difflib.get_close_matches(name, list(properties), 1)
                text = f"{self.label}: {plain(name)!r} is required, but no property has that name"
                self._add(
                    "REQUIRED_UNKNOWN_PROPERTY",
                    text,
                    path + ".required",
                    f"did you mean {near[0]!r}?" if near else None,
                )

    def _check_values(self, path: str, schema: dict[str, JSON], root: dict[str, JSON]) -> None:
        values = schema.get("enum")
        if values is not None and not isinstance(values, list):
            self._add("ENUM_NOT_LIST", f"{self.label}: `enum` is {_kind(values)}, not a list", path + ".enum")
        elif values == []:
            self._add("EMPTY_ENUM", f"{self.label}: an empty `enum` allows no value at all", path + ".enum", warn=True)
        ref = schema.get("$ref")
        if ref is not None and not (isinstance(ref, str) and _ref_leads_somewhere(ref, root)):
            text = f"{self.label}: {plain(ref)!r} leads nowhere in the parameters"
            self._add("DANGLING_REF", text, path + ".$ref", "define it under `$defs`", warn=True)


def _possible_names(tool: Any) -> Iterator[Any]:
    """Where definitions of all shapes keep their name."""
    for holder in (dict(_children(tool)).get("function"), tool):
        yield dict(_children(holder)).get("name")


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of an object, indices and values of a list; nothing of all else."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, msgspec.Struct):
        for field, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            yield key, getattr(value, field)
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def _kind(value: object) -> str:
    return {"dict": "an object", "list": "a list", "str": "a text", "bool": "a boolean", "NoneType": "null"}.get(
        type(value).__name__, "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}"
    )


def _wrap_hint(tool: dict[str, JSON]) -> str:
    schema_key = next((key for key in ("inputSchema", "input_schema") if key in tool), None)
    rename = f", with `{schema_key}` renamed to `parameters`" if schema_key else ""
    return 'put its name, description and parameters into one: {"type": "function", "function": {...}}' + rename


def _type_hint(kind: str) -> str:
    lower = kind.strip().lower()
    if not lower:
        return "leave `type` out, or name one of " + ", ".join(_TYPES)
    known = lower if lower in _TYPES else _FOREIGN_TYPES.get(lower)
    near = [known] if known else difflib.get_close_matches(lower, _TYPES, 1)
    return f"use {near[0]}" if near else "use one of " + ", ".join(_TYPES)


def _step(key: str) -> str:
    return f".{key}" if key.replace("$", "_").isidentifier() else f"[{plain(key)!r}]"


def _ref_leads_somewhere(ref: str, root: dict[str, JSON]) -> bool:
    """Whether a reference by JSON pointer finds something; of others (anchors, other documents) that is not known."""
    if ref == "#" or (ref.startswith("#") and not ref.startswith("#/")):
        return True
    if not ref.startswith("#/"):
        return "://" in ref
    value: JSON = root
    for part in ref[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return False
    return True


def _schemas(root: dict[str, JSON]) -> Iterator[tuple[str, JSON]]:
    """Every schema inside the root, itself first, each with its path. References are not followed: no cycles."""
    todo: list[tuple[str, JSON]] = [("", root)]
    while todo:
        path, schema = todo.pop()
        yield path, schema
        if isinstance(schema, dict):
            todo.extend(reversed(list(_subschemas(path, schema))))


def _subschemas(path: str, schema: dict[str, JSON]) -> Iterator[tuple[str, JSON]]:
    for key in _SCHEMA_MAP_KEYS:
        found = schema.get(key)
        if isinstance(found, dict):
            yield from ((f"{path}.{key}{_step(name)}", inner) for name, inner in found.items())
    for key in (*_SCHEMA_LIST_KEYS, *_SCHEMA_KEYS):
        found = schema.get(key)
        if isinstance(found, list):
            yield from ((f"{path}.{key}[{i}]", inner) for i, inner in enumerate(found))
        elif key in _SCHEMA_KEYS and key in schema:
            yield f"{path}.{key}", found


def _shape_problem(tool: Any) -> tuple[str, str, str] | None:
    """Why the definition cannot be JSON on the wire as it stands: code, text and path; None if its shape is fine."""
    todo: list[tuple[str, Any, int]] = [("", tool, 1)]
    seen = 0
    while todo:
        path, value, depth = todo.pop()
        if depth > MAX_DEPTH - _WRAPPING:
            return "TOO_DEEP", f"nests deeper than {MAX_DEPTH - _WRAPPING} levels, or contains itself", path
        is_list = isinstance(value, (list, tuple))
        for key, inner in _children(value):
            seen += 1
            if seen > _NODE_LIMIT:
                return "TOO_LARGE", f"holds more than {_NODE_LIMIT} values, or contains itself", path
            if not is_list and not isinstance(key, str):
                return "NOT_JSON", f"has the key {plain(key)!r}, which is no text", path
            if isinstance(inner, (Mapping, msgspec.Struct, list, tuple)):
                todo.append((f"{path}[{key}]" if is_list else path + _step(key), inner, depth + 1))
    return None
