"""Declares tools as requests do: functions with JSON schemas whose names, texts and layout vary."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.tiny_models.tool_calls.catalogue import Argument, Topic, word

CALCULATOR = Topic(
    "calculator",
    ("calculator", "calc", "calculate", "compute", "math", "evaluate", "eval_expression"),
    (
        "Evaluates an arithmetic expression.",
        "Calculates the value of an expression such as 2+3*4.",
        "A calculator",
        "Does arithmetic",
        "Compute a math expression and return the number",
    ),
    (
        Argument(
            ("expression", "expr", "formula", "term", "input"),
            "the arithmetic expression",
            lambda rng: str(rng.randint(0, 9)),
        ),
    ),
    (),
    "{0} is {result}.",
    str,
)
STANDARD_SHARE = 0.45  # share of calculators: the name `calculator` and the argument `expression`
RANDOM_SHARE = 0.2  # share of names that say nothing: only the description tells what the tool is for
OPTIONAL_SHARE = 0.12  # share of tools that have an argument which calls leave out
OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "unit": {"type": "string", "enum": ["metric", "imperial"]},
    "format": {"type": "string", "enum": ["short", "long"]},
    "limit": {"type": "integer", "minimum": 1},
    "verbose": {"type": "boolean", "default": False},
}
TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared tool."""

    topic: Topic
    name: str
    keys: tuple[str, ...]  # names of its arguments
    declaration: dict[str, Any]  # as the field `tools` of a request has it

    def takes(self, arguments: Any) -> bool:
        """Return whether arguments fit the declared schema."""
        return (
            isinstance(arguments, dict)
            and arguments.keys() >= set(self.keys)
            and arguments.keys() <= self.declaration["function"]["parameters"]["properties"].keys()
            and all(
                TYPES[argument.type](arguments[key])
                for key, argument in zip(self.keys, self.topic.arguments, strict=True)
            )
        )


def varied_tool(rng: random.Random, topic: Topic) -> Tool:
    """Declare a tool with a drawn name, description and schema."""
    standard = topic is CALCULATOR and rng.random() < STANDARD_SHARE
    name = topic.tools[0] if standard else rng.choice(topic.tools)
    keys = tuple(argument.keys[0] if standard else rng.choice(argument.keys) for argument in topic.arguments)
    about: str | None = rng.choice(topic.about)
    if not standard and rng.random() < RANDOM_SHARE:
        name = rng.choice((word(rng), f"{word(rng)}_{word(rng)}", f"tool_{rng.randint(0, 99)}"))
    elif rng.random() < 0.15:
        about = None
    if not standard and rng.random() < RANDOM_SHARE:
        keys = tuple(f"{word(rng)}{index or ''}" for index, _ in enumerate(topic.arguments))
    function: dict[str, Any] = {"name": name}
    if about is not None:
        function["description"] = about
    function["parameters"] = _parameters(rng, topic.arguments, keys)
    return Tool(topic, name, keys, {"type": "function", "function": function})


def _parameters(rng: random.Random, arguments: Sequence[Argument], keys: Sequence[str]) -> dict[str, Any]:
    titled, described = rng.random() < 0.15, rng.random() < 0.6
    properties: dict[str, dict[str, Any]] = {}
    for key, argument in zip(keys, arguments, strict=True):
        schema: dict[str, Any] = {"type": argument.type}
        if described:
            schema["description"] = argument.about
        if titled:
            schema = {"title": key.title(), **schema}
        properties[key] = _shuffled(rng, schema)
    optional = rng.random() < OPTIONAL_SHARE
    if optional:
        extra = rng.choice(list(OPTIONAL))
        properties[extra] = dict(OPTIONAL[extra])
    whole: dict[str, Any] = {"type": "object", "properties": properties}
    if optional or rng.random() < 0.9:
        whole["required"] = list(keys)
    if rng.random() < 0.25:
        whole["additionalProperties"] = False
    return _shuffled(rng, whole)


def _shuffled(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.7:
        return schema
    items = list(schema.items())
    rng.shuffle(items)
    return dict(items)
