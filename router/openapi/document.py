"""Makes the OpenAPI document from the operations and the schemas of their structs."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from router.http.media_types import EVENTS, JSON
from router.http.messages_errors import is_messages
from router.openapi.answers import ErrorAnswer, MessagesError
from router.openapi.operations import EMPTY, OPERATIONS, Operation

_TEMPLATE = "#/components/schemas/{name}"
_TEXT: dict[str, Any] = {"type": "string"}

_Schemas = dict[Any, dict[str, Any]]  # of each type: a reference for a struct


def openapi_document(version: str) -> dict[str, Any]:
    """Return the document of the public listener's API."""
    types = [ErrorAnswer, MessagesError]
    for operation in OPERATIONS:
        types += [each for each in (operation.body, operation.answer) if each is not None]
    found, components = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tandem", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # a cluster without keys takes requests without one
        "security": [{"key": []}, {}],
    }


def _described(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method}{operation.path}").strip("_"),
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schemas[operation.body]}},
        }
    parameters = [_parameter(name, "path", _TEXT) for name in re.findall(r"\{(\w+)\}", operation.path)]
    if operation.query is not None:
        name, schema = operation.query
        parameters.append(_parameter(name, "query", schema))
    if parameters:
        described["parameters"] = parameters
    answer = {"description": operation.summary, "content": _content(operation, schemas)}
    error = schemas[MessagesError if is_messages(operation.path) else ErrorAnswer]
    errors = {JSON: {"schema": error}}
    if operation.path in ("/flush_cache", "/reset_prefix_cache"):
        # text where the request itself is right: requests are in flight, or a node cannot be reached
        errors[operation.media] = {"schema": _TEXT}
    refused = {"description": "Refused or failed", "content": errors}
    described["responses"] = {"200": answer, "default": refused}
    if operation.unready:
        described["responses"]["503"] = answer
    return described


def _parameter(name: str, where: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _content(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    """Return the media types of an answer, each with its schema."""
    if operation.media == EMPTY:
        return {}
    if operation.media != JSON:
        return {operation.media: {"schema": _TEXT}}
    schema = schemas[operation.answer]
    if operation.listed:
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    content: dict[str, Any] = {JSON: {"schema": schema}}
    if operation.streams:
        content[EVENTS] = {"schema": _TEXT}
    return content
