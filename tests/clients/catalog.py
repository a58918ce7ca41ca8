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


# What the benchmark clients of vLLM and SGLang import; neither is installed with its dependencies. Newer benchmark
# clients of SGLang import kernels and cannot run without a GPU's libraries.
VLLM_IMPORTS = (
    *("cbor2", "psutil", "openai-harmony", "cloudpickle", "pybase64", "cachetools", "py-cpuinfo", "fastapi"),
    *("partial-json-parser", "uvicorn", "xgrammar", "watchfiles", "orjson", "einops", "datasets"),
)
SGLANG_IMPORTS = ("orjson", "psutil", "pybase64", "datasets", "ipython")

CLIENTS = (
    Client("openai (Python)", Python(("openai",)), "python/openai_client.py"),
    Client("openai (JavaScript)", Node(("openai", "zod")), "javascript/openai.mjs"),
    # litellm imports mcp for every request with tools, but does not depend on it
    Client("litellm", Python(("litellm", "mcp")), "python/litellm_client.py"),
    Client("langchain", Python(("langchain", "langchain-openai")), "python/langchain_client.py"),
    Client("llama-index", Python(("llama-index-llms-openai-like",)), "python/llama_index_client.py"),
    Client("instructor", Python(("instructor",)), "python/instructor_client.py"),
    Client("pydantic-ai", Python(("pydantic-ai-slim[openai]",)), "python/pydantic_ai_client.py"),
    Client("dspy", Python(("dspy",)), "python/dspy_client.py"),
    Client("smolagents", Python(("smolagents[openai]",)), "python/smolagents_client.py", seconds=1500),
    Client("openai-agents", Python(("openai-agents",)), "python/openai_agents_client.py"),
    Client("haystack", Python(("haystack-ai",)), "python/haystack_client.py"),
    Client("crewai", Python(("crewai",)), "python/crewai_client.py"),
    Client("inspect", Python(("inspect-ai", "openai")), "python/inspect_client.py"),
    Client("llm", Python(("llm",)), "programs/llm.py"),
    Client("codex", Node(("@openai/codex",)), "programs/codex.py"),
    Client("opencode", Node(("opencode-ai", "zod")), "programs/opencode.py"),
    Client("anthropic (Python)", Python(("anthropic",)), "python/anthropic_client.py"),
    Client("anthropic (JavaScript)", Node(("@anthropic-ai/sdk",)), "javascript/anthropic.mjs"),
    Client(
        "Vercel AI SDK",
        Node(("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod")),
        "javascript/vercel_ai.mjs",
    ),
    Client("aiperf", Python(("aiperf",)), "programs/aiperf.py"),
    Client("guidellm", Python(("guidellm",), shared=True), "programs/guidellm.py"),
    Client("vllm bench", Python(VLLM_IMPORTS, shared=True, alone="vllm"), "programs/vllm_bench.py"),
    Client(
        "sglang bench", Python(SGLANG_IMPORTS, shared=True, alone="sglang==0.5.6"), "programs/sglang_bench.py"
    ),
    Client("lm-eval", Python(("lm-eval[api,hf]",), shared=True), "programs/lm_eval.py", seconds=2400),
    Client("vllm-router", Python(("vllm-router",)), "programs/vllm_router.py"),
    Client("smg", Python(("smg",)), "programs/smg.py"),
)
