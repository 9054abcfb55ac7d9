"""`/openapi.json`: complete, consistent in itself, and as strict as the service is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequest
from rollout.requests import InitRequest, parse_cancel, parse_init, parse_url
from rollout.server.openapi import TWIN_PREFIX, openapi_document, openapi_json

DOCUMENT = openapi_document()
SCHEMAS = DOCUMENT["components"]["schemas"]
REQUEST = SCHEMAS["RolloutRequest"]
METHODS = {
    "/init": "post",
    "/status": "get",
    "/status/{rollout_id}": "get",
    "/result/{rollout_id}": "get",
    "/cancel": "post",
    "/openapi.json": "get",
}
SINGLE = {"/health": "get", "/platform/health": "get", "/metrics": "get"}
OPERATIONS = [(path, method, op) for path, item in DOCUMENT["paths"].items() for method, op in item.items()]


def walk(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in the document."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def statuses(path: str) -> set[str]:
    """The statuses that the path declares."""
    (operation,) = DOCUMENT["paths"][path].values()
    return set(operation["responses"])


def url_pattern(field: str) -> str:
    """The pattern of a URL field, as Python means it: `$` is the very end."""
    patterns = {str(schema.get("pattern")) for schema in walk(REQUEST["properties"][field])}
    (pattern,) = (text for text in patterns if "://" in text)
    return pattern.removesuffix("$") + r"\Z"


# ---------------------------------------------------------------- the document


def test_every_path_of_the_contract_is_there_and_its_twin() -> None:
    expected = METHODS | {TWIN_PREFIX + path: method for path, method in METHODS.items()} | SINGLE
    assert {path: method for path, method, _ in OPERATIONS} == expected


def test_every_reference_leads_somewhere() -> None:
    for item in walk(DOCUMENT):
        if isinstance(item.get("$ref"), str):
            target: Any = DOCUMENT
            for step in item["$ref"].removeprefix("#/").split("/"):
                target = target[step]
            assert target


def test_operation_ids_are_unique_and_links_name_them() -> None:
    ids = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(ids)) == len(ids)
    links = DOCUMENT["paths"]["/init"]["post"]["responses"]["202"]["links"]
    assert {link["operationId"] for link in links.values()} <= set(ids)


def test_every_component_is_used() -> None:
    used = {item["$ref"] for item in walk(DOCUMENT) if isinstance(item.get("$ref"), str)}
    components = DOCUMENT["components"]
    for kind in ("schemas", "responses", "parameters", "headers"):
        assert {f"#/components/{kind}/{name}" for name in components[kind]} <= used


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/init", {"202", "409", "422", "503"}),
        ("/status", {"200", "503"}),
        ("/status/{rollout_id}", {"200", "404"}),
        ("/result/{rollout_id}", {"200", "202", "404", "410", "422"}),
        ("/cancel", {"200", "422"}),
        ("/health", {"200", "503"}),
        ("/platform/health", {"200", "401", "404", "503"}),
        ("/metrics", {"200", "501"}),
    ],
)
def test_declared_statuses_include_whatever_can_occur(path: str, expected: set[str]) -> None:
    assert statuses(path) >= expected | {"400", "404", "405", "408", "413", "415", "500"}
    assert ("401" in statuses(path)) == (path != "/health")


def test_every_answer_carries_the_request_id_and_errors_their_own_headers() -> None:
    answers = [item for item in walk(DOCUMENT["paths"]) if "content" in item and "headers" in item]
    answers += DOCUMENT["components"]["responses"].values()
    assert all("X-Request-ID" in answer["headers"] for answer in answers)
    errors = DOCUMENT["components"]["responses"]
    assert "Retry-After" in errors["Error503"]["headers"]
    assert "WWW-Authenticate" in errors["Error401"]["headers"]
    assert "Allow" in errors["Error405"]["headers"]


def test_bearer_token_is_optional_without_a_key_and_required_with_one() -> None:
    assert {} in DOCUMENT["security"]
    guarded = openapi_document(requires_key=True)
    assert guarded["security"] == [{"bearer": []}]
    assert guarded["paths"]["/health"]["get"]["security"] == []
    assert "security" not in guarded["paths"]["/init"]["post"]


def test_mounted_application_names_its_prefix() -> None:
    assert DOCUMENT["servers"] == [{"url": "/"}]
    assert openapi_document(base_path="/any/prefix")["servers"] == [{"url": "/any/prefix"}]


def test_text_is_made_once_for_each_combination() -> None:
    assert json.loads(openapi_json()) == json.loads(json.dumps(DOCUMENT))
    assert openapi_json() is openapi_json()
    assert openapi_json(requires_key=True) != openapi_json()


def test_callbacks_are_documented_with_their_bodies() -> None:
    callbacks = DOCUMENT["paths"]["/init"]["post"]["callbacks"]
    assert set(callbacks["chat"]) == {"{$request.body#/server_url}/v1/chat/completions"}
    assert set(callbacks["completed"]) == {"{$request.body#/server_url}/v1/rollout/completed"}


# ---------------------------------------------------------------- as strict as the service


def test_request_has_the_fields_that_are_decoded_and_no_others() -> None:
    assert set(REQUEST["properties"]) == set(InitRequest.__struct_fields__)
    assert set(REQUEST["required"]) == {"rollout_id", "messages", "completion_params"}


def test_examples_are_accepted() -> None:
    for example in REQUEST["examples"]:
        assert parse_init(json.dumps(example).encode(), 1000).rollout_id == example["rollout_id"]
    for example in SCHEMAS["CancelRequest"]["examples"]:
        parse_cancel(json.dumps(example).encode())


def test_null_is_declared_where_it_is_accepted() -> None:
    nullable = {name for name, schema in REQUEST["properties"].items() if {"type": "null"} in schema.get("anyOf", [])}
    body: dict[str, Any] = {"chat_completions_url": "http://h/a", "completion_callback_url": "http://h/b"}
    body |= {"rollout_id": "r", "messages": [], "completion_params": {}}
    for name in nullable - set(body):
        parse_init(json.dumps(body | {name: None}).encode(), 1000)
    for name in set(REQUEST["properties"]) - nullable:
        with pytest.raises(InvalidRequest):
            parse_init(json.dumps(body | {name: None}).encode(), 1000)


@pytest.mark.parametrize(("field", "base"), [("server_url", True), ("chat_completions_url", False)])
def test_every_url_of_the_pattern_is_accepted(field: str, base: bool) -> None:
    @settings(max_examples=15)
    @given(st.from_regex(url_pattern(field), fullmatch=True))
    def check(url: str) -> None:
        parse_url(url, field, base=base)

    check()


@pytest.mark.parametrize(
    ("url", "is_valid"),
    [
        ("http://trainer:8080", True),
        ("https://my_box.ns.svc.cluster.local:65535/x/", True),
        ("http://[2001:db8::1:2]:9000/", True),
        ("http://10.0.0.7/a%20b", True),
        ("ftp://h", False),
        ("http://", False),
        ("http://u:p@h", False),
        ("http://h?x=1", False),
        ("http://h#f", False),
        ("http://h:0", False),
        ("http://h:65536", False),
        ("http://h/a b", False),
    ],
)
def test_pattern_and_service_agree_about_a_url(url: str, is_valid: bool) -> None:
    assert bool(re.match(url_pattern("server_url"), url)) == is_valid
    body = {"rollout_id": "r", "server_url": url, "messages": [], "completion_params": {}}
    try:
        parse_init(json.dumps(body).encode(), 1000)
        accepted = True
    except InvalidRequest:
        accepted = False
    assert accepted == is_valid
