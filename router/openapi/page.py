"""The page at /docs: all routes with their fields, as plain HTML without scripts."""

from __future__ import annotations

from html import escape
from typing import Any

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>tandem API</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, .method { font-family: ui-monospace, monospace; }
.method { display: inline-block; width: 3.5rem; font-weight: bold; }
details { border-bottom: 1px solid #8886; padding: .4rem 0; }
summary { cursor: pointer; }
table { border-collapse: collapse; margin: .6rem 0 .6rem 1.5rem; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
.optional { opacity: .6; }
</style>
"""


def docs_page(document: dict[str, Any]) -> bytes:
    """Render an OpenAPI document."""
    parts = [
        _HEAD,
        f"<h1>tandem {escape(document['info']['version'])}</h1>\n",
        '<p>The same as data: <a href="openapi.json">openapi.json</a></p>\n',
    ]
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            line = (
                f'<span class="method">{method.upper()}</span><code>{escape(path)}</code> '
                f"{escape(operation['summary'])}"
            )
            parts.append(f"<details><summary>{line}</summary>\n{_tables(operation, schemas)}</details>\n")
    return "".join(parts).encode()


def _tables(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    answer = operation["responses"]["200"].get("content", {})
    text = "".join(
        f"<p>{escape(each['in'])} parameter <code>{escape(each['name'])}</code></p>"
        for each in operation.get("parameters", ())
    )
    for title, content in (("Request", body), ("Answer", answer)):
        for media, described in content.items():
            text += f"<p>{title}: {escape(media)}</p>{_fields(described['schema'], schemas)}"
    return text


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a table of the fields of a struct; nothing for other types."""
    reference = schema.get("$ref") or next(
        (each["$ref"] for each in schema.get("anyOf", ()) if "$ref" in each), None
    )
    if reference is None:
        return ""
    struct = schemas[_name(reference)]
    required = set(struct.get("required", ()))
    rows = "".join(
        f"<tr{'' if name in required else ' class=optional'}><td><code>{escape(name)}</code>"
        f"<td>{escape(_type_of(field))}{'' if name in required else ', optional'}\n"
        for name, field in struct.get("properties", {}).items()
    )
    return f"<table>{rows}</table>"


def _type_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _name(schema["$ref"])
    if "anyOf" in schema:
        return " or ".join(_type_of(each) for each in schema["anyOf"] if each.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any value"))


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]
