"""The clients: how each is installed and which script drives it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.clients.environments import Node, Python


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
        script: file below this folder. `python/` runs in the client's environment, `programs/` runs here and starts
            the client's commands, `javascript/` runs in Node.js.
        seconds: limit for the whole script.
    """

    name: str
    environment: Python | Node
    script: str
    seconds: float = 900.0


CLIENTS = (
    Client("openai (Python)", Python(("openai",)), "python/openai_client.py"),
    Client("openai (JavaScript)", Node(("openai", "zod")), "javascript/openai.mjs"),
    # litellm imports mcp for every request with tools, but does not depend on it
    Client("litellm", Python(("litellm", "mcp")), "python/litellm_client.py"),
    Client("langchain", Python(("langchain", "langchain-openai")), "python/langchain_client.py"),
    Client("llama-index", Python(("llama-index-llms-openai-like",)), "python/llama_index_client.py"),
    Client("instructor", Python(("instructor",)), "python/instructor_client.py"),
    Client("pydantic-ai", Python(("pydantic-ai-slim[openai]",)), "python/pydantic_ai_client.py"),
)
