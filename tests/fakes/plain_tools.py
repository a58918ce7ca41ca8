"""Declares tools of the training data of tiny-tools in the most common form."""

from __future__ import annotations

from deploy.tiny_models.tool_calls.catalogue import Topic
from deploy.tiny_models.tool_calls.declarations import Tool


def plain_tool(topic: Topic) -> Tool:
    """Return the tool with the first name, description and keys of its topic."""
    name, keys = topic.tools[0], tuple(argument.keys[0] for argument in topic.arguments)
    properties = {
        key: {"type": argument.type, "description": argument.about}
        for key, argument in zip(keys, topic.arguments, strict=True)
    }
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    function = {"name": name, "description": topic.about[0], "parameters": parameters}
    return Tool(topic, name, keys, {"type": "function", "function": function})
