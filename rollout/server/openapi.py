"""`/openapi.json`: OpenAPI 3.1, made from the Structs of `schemas` so that it cannot drift from them.

What the Structs cannot say (bounds that are checked while decoding, alternatives, what `null` means) is laid over the
generated schemas here; then come the operations, as one table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from http import HTTPStatus

import msgspec

from rollout._version import __version__
from rollout.schemas import (
    MAX_ID_LENGTH,
    CancelRequest,
    CancelResponse,
    CompletionsRequest,
    ErrorResponse,
    InitResponse,
    OpenAIFunctionToolSchema,
    RolloutRequest,
    RolloutResponse,
    RolloutState,
)
from rollout.wire import JSON

TWIN_PREFIX = "/v1/rollout"
"""Under which every path but health and metrics stands a second time."""

_STRUCTS = (
    RolloutRequest,
    InitResponse,
    RolloutState,
    RolloutResponse,
    CancelRequest,
    CancelResponse,
    CompletionsRequest,
    ErrorResponse,
    OpenAIFunctionToolSchema,
)
_REF_TEMPLATE = "#/components/schemas/{name}"
_MAX_URL_LENGTH = 8192


def _ref(name: str) -> JSON:
    return {"$ref": _REF_TEMPLATE.format(name=name)}


# ---------------------------------------------------------------- schemas


def _ipv6_pattern() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    forms = [f"({group}:){{7}}{group}", f"({group}:){{1,7}}:", f":((:{group}){{1,7}}|:)"]
    forms += [f"({group}:){{1,{n}}}(:{group}){{1,{7 - n}}}" for n in range(1, 7)]
    return rf"\[({'|'.join(forms)})\]"


_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_PATH = r"(/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?"
_QUERY = r"(\?[A-Za-z0-9._~!$&'()*+,;=:%/?-]*)?"
_BASE_PATTERN = rf"^https?://({_LABEL}(\.{_LABEL}){{0,31}}\.?|{_ipv6_pattern()})(:{_PORT})?{_PATH}"


def _url(pattern: str) -> JSON:
    return {"type": "string", "format": "uri", "maxLength": _MAX_URL_LENGTH, "pattern": pattern}


_BASE_URL, _FULL_URL = _url(f"{_BASE_PATTERN}$"), _url(f"{_BASE_PATTERN}{_QUERY}$")
_BLANK = {"type": "string", "pattern": r"^\s*$"}
_KEY = {"type": "string", "pattern": "^[ -~]*$"}
_COUNT = {"type": "integer", "minimum": 1}


def _nullable(schema: JSON, description: str, default: JSON = None) -> JSON:
    return {"anyOf": [schema, {"type": "null"}], "default": default, "description": description}


_REQUEST_PROPERTIES: dict[str, JSON] = {
    "rollout_id": {"type": "string", "minLength": 1, "maxLength": MAX_ID_LENGTH, "pattern": r"\S"},
    "server_url": _nullable(_BASE_URL, "Where the callbacks go; needed unless both callback URLs are given."),
    "tool_server_url": _nullable({"anyOf": [_FULL_URL, _BLANK]}, "Handed to the agent; blank counts as absent."),
    "max_turns": _nullable(_COUNT, "How many LLM calls the agent may make.", 10),
    "max_tokens_total": _nullable(_COUNT, "How many tokens the conversation may hold.", 8192),
    "metadata": _nullable({"type": "object"}, "Handed to the agent; of limited size as JSON text.", {}),
    "api_key": _nullable(_KEY, "Bearer token of the callbacks."),
    "idempotency_key": _nullable(
        {"type": "string", "maxLength": MAX_ID_LENGTH}, "What makes two requests the same one; else it is `rollout_id`."
    ),
    "chat_completions_url": _nullable(_FULL_URL, "Replaces `{server_url}/v1/chat/completions`."),
    "completion_callback_url": _nullable(_FULL_URL, "Replaces `{server_url}/v1/rollout/completed`."),
    "llm_api_key": _nullable(_KEY, "Bearer token of chat completions, if it is not `api_key`."),
    "timeout_seconds": _nullable({"type": "number", "exclusiveMinimum": 0}, "The deadline, from acceptance on."),
}
_REQUEST_CHOICE = [
    {"required": ["server_url"], "properties": {"server_url": {"type": "string"}}},
    {
        "required": ["chat_completions_url", "completion_callback_url"],
        "properties": {"chat_completions_url": {"type": "string"}, "completion_callback_url": {"type": "string"}},
    },
]
_REQUEST_EXAMPLE = {
    "rollout_id": "train-17-0042",
    "server_url": "http://trainer:8080",
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
    "completion_params": {"temperature": 0.7, "max_tokens": 512},
    "max_turns": 8,
    "metadata": {"answer": "4"},
}
_HEALTH = {
    "title": "Health",
    "type": "object",
    "properties": {
        "status": {"enum": ["healthy", "draining", "unhealthy"]},
        "reason": {"type": "string", "description": "Why it is unhealthy."},
        "agent_loop": {"type": "string"},
        "active_rollouts": {"type": "integer", "minimum": 0},
        "completed_rollouts": {"type": "integer", "minimum": 0},
        "undelivered_rollouts": {"type": "integer", "minimum": 0},
        "uptime_seconds": {"type": "number", "minimum": 0},
        "version": {"type": "string"},
    },
    "required": ["status"],
}
_SERVICE_STATUS = {
    "title": "ServiceStatus",
    "description": "The service: its agent, version, uptime, counts by state and phase, limits, store.",
    "type": "object",
    "properties": {
        "agent": {"type": "string"},
        "version": {"type": "string"},
        "uptime_seconds": {"type": "number", "minimum": 0},
        "draining": {"type": "boolean"},
        "rollouts": {"type": "object"},
        "slots": {"type": "object"},
        "limits": {"type": "object"},
        "store": {"type": "object"},
    },
    "required": ["agent", "version", "uptime_seconds", "draining"],
}


def _schemas() -> dict[str, JSON]:
    """The components: generated from the Structs, with the bounds of the wire laid over them."""
    _, generated = msgspec.json.schema_components(_STRUCTS, ref_template=_REF_TEMPLATE)
    schemas: dict[str, JSON] = dict(generated)
    request = schemas["RolloutRequest"]
    request["description"] = "What starts a rollout. `null` for an optional field is as if it were absent."
    request["properties"].update(_REQUEST_PROPERTIES)
    request["required"].remove("server_url")
    request["anyOf"] = _REQUEST_CHOICE
    request["examples"] = [_REQUEST_EXAMPLE]
    schemas["CancelRequest"]["properties"]["all"] = {"const": True}
    schemas["CancelRequest"]["oneOf"] = [{"required": [field]} for field in ("ids", "prefix", "all")]
    schemas["CancelRequest"]["examples"] = [{"ids": ["train-17-0042"]}, {"prefix": "train-17-"}, {"all": True}]
    schemas["CancelResponse"]["properties"]["dispositions"]["additionalProperties"] = {
        "enum": ["cancelled_queued", "cancelled_running", "finished", "not_found"]
    }
    schemas["InitResponse"]["properties"]["tools"]["items"] = {
        "anyOf": [_ref("OpenAIFunctionToolSchema"), {"type": "object"}],
        "description": "The very definition that the agent gave, unchanged.",
    }
    for name, schema in schemas["RolloutState"]["properties"].items():
        if name.endswith("_at"):
            schema["format"] = "date-time"
    for name in ("RolloutStatus", "Phase", "ErrorCategory"):
        schemas[name]["type"] = "string"
    return schemas | {"Health": _HEALTH, "ServiceStatus": _SERVICE_STATUS}


# ---------------------------------------------------------------- answers

_ERRORS: dict[int, str] = {
    400: "The body is not JSON, or the request is not HTTP.",
    401: "No key or a wrong one.",
    404: "No such path or rollout.",
    405: "The path exists, the method does not.",
    408: "The client fell silent in the middle of its request.",
    409: "The id or the key is in use for something else: `key_in_use`, `id_in_use` or `body_differs`.",
    410: "The result is no longer held.",
    413: "The body is above the limit.",
    415: "A Content-Type that is not JSON, or an unknown Content-Encoding.",
    422: "Valid JSON that does not fit the schema or a limit, or that the agent refuses.",
    500: "A bug here, or `get_tools()` failed.",
    501: "Metrics need an optional library; the detail names it.",
    503: "Nothing was accepted; the same request may succeed later.",
}
_EVERYWHERE = (400, 401, 404, 405, 408, 413, 415, 500)
"""What any path may answer: a GET may carry a body, and the limits of bodies hold for it too."""

_ERROR_HEADERS = {401: "WWW-Authenticate", 405: "Allow", 503: "Retry-After"}
_HEADERS: dict[str, JSON] = {
    "X-Request-ID": {"description": "The request's own, if it had one, else a new one.", "schema": {"type": "string"}},
    "WWW-Authenticate": {"schema": {"const": "Bearer"}},
    "Allow": {"description": "The methods that the path has.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
}


def _answer(description: str, schema: JSON, *headers: str, media_type: str = "application/json") -> JSON:
    return {
        "description": description,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-ID", *headers)},
        "content": {media_type: {"schema": schema}},
    }


def _error_answers() -> Iterator[tuple[str, JSON]]:
    """The shared answers by component name."""
    for status, description in _ERRORS.items():
        headers = [_ERROR_HEADERS[status]] if status in _ERROR_HEADERS else []
        answer = _answer(description, _ref("ErrorResponse"), *headers)
        if status == HTTPStatus.BAD_REQUEST:  # what is not even HTTP is answered below the application
            answer["content"]["text/plain"] = {"schema": {"type": "string"}}
        yield f"Error{status}", answer


# ---------------------------------------------------------------- operations


class _Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: what a method on a path takes and answers."""

    method: str
    path: str
    name: str
    summary: str
    answers: dict[int, JSON]
    errors: tuple[int, ...] = ()
    body: str | None = None
    parameters: tuple[str, ...] = ()
    more: dict[str, JSON] = {}
    has_twin: bool = True
    needs_key: bool = True

    def document(self, name: str) -> JSON:
        """The Operation Object under that operationId."""
        errors = sorted({*_EVERYWHERE, *self.errors} - self.answers.keys())
        responses = {str(status): answer for status, answer in self.answers.items()}
        for status in errors:
            if self.needs_key or status != HTTPStatus.UNAUTHORIZED:
                responses[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
        document: dict[str, JSON] = {"operationId": name, "summary": self.summary, "responses": responses}
        if self.parameters:
            document["parameters"] = [{"$ref": f"#/components/parameters/{p}"} for p in self.parameters]
        if self.body is not None:
            document["requestBody"] = _body(self.body)
        if not self.needs_key:
            document["security"] = []
        return document | self.more


def _body(schema: str) -> JSON:
    return {"required": True, "content": {"application/json": {"schema": _ref(schema)}}}


def _callback(path: str, field: str, summary: str, body: str) -> JSON:
    return {
        f"{{$request.body#/server_url}}{path}": {
            "post": {
                "summary": summary,
                "description": f"Goes to `{field}` instead, if the request names one.",
                "requestBody": _body(body),
                "responses": {"2XX": {"description": "Taken."}},
            }
        }
    }


_CALLBACKS = {
    "chat": _callback("/v1/chat/completions", "chat_completions_url", "One turn of the LLM.", "CompletionsRequest"),
    "completed": _callback(
        "/v1/rollout/completed", "completion_callback_url", "The one terminal result.", "RolloutResponse"
    ),
}
_LINKS = {
    name: {"operationId": name, "parameters": {"rollout_id": "$response.body#/rollout_id"}}
    for name in ("getRollout", "getResult")
}
_PARAMETERS: dict[str, JSON] = {
    "rollout_id": {
        "name": "rollout_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_ID_LENGTH},
    },
    "wait": {
        "name": "wait",
        "in": "query",
        "description": "How many seconds to wait for the end of the rollout.",
        "schema": {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
    },
}
_HEALTH_ANSWERS = {
    200: _answer("The service takes requests.", _ref("Health")),
    503: _answer("It drains, a background task has died, or the store fails.", _ref("Health")),
}
_OPERATIONS = (
    _Operation(
        method="post",
        path="/init",
        name="initRollout",
        summary="Start a rollout, once: the same request again gets the same answer.",
        answers={202: _answer("Accepted.", _ref("InitResponse")) | {"links": _LINKS}},
        errors=(409, 422, 503),
        body="RolloutRequest",
        more={"callbacks": _CALLBACKS},
    ),
    _Operation(
        method="get",
        path="/status",
        name="getService",
        summary="What the service is and does.",
        answers={200: _answer("The service.", _ref("ServiceStatus"))},
        errors=(503,),
    ),
    _Operation(
        method="get",
        path="/status/{rollout_id}",
        name="getRollout",
        summary="Where a rollout stands.",
        answers={200: _answer("Its state.", _ref("RolloutState"))},
        errors=(422, 503),
        parameters=("rollout_id",),
    ),
    _Operation(
        method="get",
        path="/result/{rollout_id}",
        name="getResult",
        summary="The result of a rollout, for trainers that cannot be called.",
        answers={
            200: _answer("The result, as it is delivered.", _ref("RolloutResponse")),
            202: _answer("It is not final yet.", _ref("RolloutState")),
        },
        errors=(410, 422, 503),
        parameters=("rollout_id", "wait"),
    ),
    _Operation(
        method="post",
        path="/cancel",
        name="cancelRollouts",
        summary="End rollouts by their ids, by a prefix of their ids, or all of them. Idempotent.",
        answers={200: _answer("What became of each.", _ref("CancelResponse"))},
        errors=(422, 503),
        body="CancelRequest",
    ),
    _Operation(
        method="get",
        path="/health",
        name="getHealth",
        summary="Whether the service takes requests.",
        answers=_HEALTH_ANSWERS,
        has_twin=False,
        needs_key=False,
    ),
    _Operation(
        method="get",
        path="/platform/health",
        name="getPlatformHealth",
        summary="Health for those who have the key; 404 where none is configured.",
        answers=_HEALTH_ANSWERS,
        has_twin=False,
    ),
    _Operation(
        method="get",
        path="/metrics",
        name="getMetrics",
        summary="Metrics as Prometheus text.",
        answers={200: _answer("The metrics.", {"type": "string"}, media_type="text/plain")},
        errors=(501,),
        has_twin=False,
    ),
    _Operation(
        method="get",
        path="/openapi.json",
        name="getOpenAPI",
        summary="This document.",
        answers={200: _answer("OpenAPI 3.1.", {"type": "object"})},
    ),
)


# ---------------------------------------------------------------- the document


def _paths() -> dict[str, JSON]:
    paths: dict[str, JSON] = {}
    for operation in _OPERATIONS:
        paths[operation.path] = {operation.method: operation.document(operation.name)}
    for operation in _OPERATIONS:
        if operation.has_twin:
            paths[TWIN_PREFIX + operation.path] = {operation.method: operation.document(f"{operation.name}V1")}
    return paths


def openapi_document(*, requires_key: bool = False, base_path: str = "") -> dict[str, JSON]:
    """The OpenAPI document as a new dict.

    `requires_key`: whether the service has an API key; without one the bearer token is optional. `base_path`: where the
    application is mounted, such as "/any/prefix".
    """
    bearer: JSON = {"bearer": []}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rollout",
            "version": __version__,
            "summary": "Starts LLM agents for an RL trainer and reports exactly one result for each.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": base_path or "/"}],
        "security": [bearer] if requires_key else [{}, bearer],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "responses": dict(_error_answers()),
            "parameters": _PARAMETERS,
            "headers": _HEADERS,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


@functools.lru_cache(maxsize=16)
def openapi_json(*, requires_key: bool = False, base_path: str = "") -> bytes:
    """The document as JSON text, made once for each combination."""
    return msgspec.json.encode(openapi_document(requires_key=requires_key, base_path=base_path))
