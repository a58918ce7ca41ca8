"""Error texts for paths and methods that are not served, with a suggestion of what the client may have meant."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

MAX_PATH = 200  # characters of the path in an error text
PREFIX = "/v1"
_WEIGHTS = "exchange of weights while it runs; start the nodes with the other model"
# First part of a path, without /v1 -> what other servers do there.
OTHER_APIS = {
    "embeddings": "embeddings",
    "embed": "embeddings",
    "encode": "embeddings",
    "pooling": "embeddings",
    "images": "image generation",
    "videos": "video generation",
    "audio": "speech or transcription",
    "realtime": "speech or transcription",
    "moderations": "moderation",
    "classify": "classification",
    "score": "scoring of pairs",
    "rerank": "reranking",
    "files": "file store",
    "uploads": "file store",
    "vector_stores": "vector store",
    "batches": "batch jobs",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants; keep the conversation at the client",
    "threads": "assistants; keep the conversation at the client",
    "conversations": "conversations; keep them at the client",
    "load_lora_adapter": "LoRA adapters",
    "load_lora_adapter_from_tensors": "LoRA adapters",
    "unload_lora_adapter": "LoRA adapters",
    "generative_scoring": "scoring of pairs; logprob_token_ids lists the log-probabilities of labels",
    "separate_reasoning": "parsing apart from answers; chats return reasoning_content",
    "parse_function_call": "parsing apart from answers; chats return tool_calls",
    "sleep": _WEIGHTS,
    "wake_up": _WEIGHTS,
    "pause_generation": _WEIGHTS,
    "continue_generation": _WEIGHTS,
    "release_memory_occupation": _WEIGHTS,
    "resume_memory_occupation": _WEIGHTS,
    "init_weights_update_group": _WEIGHTS,
    "update_weights_from_disk": _WEIGHTS,
    "update_weights_from_distributed": _WEIGHTS,
    "update_weights_from_tensor": _WEIGHTS,
    "api": "API of Ollama; set the client up for OpenAI's API with a base URL that ends with /v1",
}

# Routes of OpenAI that a client's settings may have by mistake where the base URL is asked for.
WHOLE_ROUTES = ("/chat/completions", "/completions", "/responses")

# Beginning of a path, without /v1 -> what OpenAI or vLLM does there. The first that fits counts.
BELOW = {
    "/chat/completions/batch": "batches of chats; send each chat in a request of its own",
    "/chat/completions/derender": "parsing apart from answers; chats return what the model means",
    "/completions/derender": "parsing apart from answers; /detokenize returns the text of tokens",
    "/chat/completions/render": "rendering apart from answers; /tokenize returns the tokens of a prompt",
    "/completions/render": "rendering apart from answers; /tokenize returns the tokens of a prompt",
    "/responses/": "stored responses; send the whole conversation with every request",
    "/chat/completions/": "stored answers; send the whole conversation with every request",
}


def not_found(request: web.Request) -> str:
    """Return the text of a 404 for a path that no handler serves."""
    asked = f"there is no route {request.method} {_shown(request.path)}"
    path = request.path.rstrip("/")
    without = path.removeprefix(PREFIX)
    meant = next((each for each in _corrected(path) if _is_served(request.app, each)), None)
    if meant is not None:
        hint = f"{asked}; did you mean {_shown(meant)}?"
        return hint if path.endswith(meant) else f"{hint} The base URL of OpenAI's clients ends with {PREFIX}"
    if (other := _of_other_servers(without)) is not None:
        return f"{_shown(path)} is not served: tandem generates text and has no {other}"
    return f"{asked}; /docs shows all routes"


def _corrected(path: str) -> Iterator[str]:
    """Yield the paths that a client with a wrong base URL may have meant."""
    without = path.removeprefix(PREFIX)
    yield from (PREFIX + path, path, without)
    if (at := path.rfind(f"{PREFIX}/")) > 0:
        yield path[at:]
    for route in WHOLE_ROUTES:
        if without.startswith(route):
            yield PREFIX + without.removeprefix(route)


def not_allowed(request: web.Request, allowed: str) -> str:
    """Return the text of a 405. `allowed` lists the methods as in the Allow header."""
    return f"{_shown(request.path)} accepts {allowed}, not {request.method}"


def _shown(path: str) -> str:
    return path if len(path) <= MAX_PATH else path[:MAX_PATH] + "..."


def _is_served(app: web.Application, path: str) -> bool:
    for resource in app.router.resources():
        info = resource.get_info()
        pattern = info.get("pattern")
        if info.get("path") == path or (pattern is not None and pattern.fullmatch(path)):
            return True
    return False


def _of_other_servers(path: str) -> str | None:
    """Return what other servers of the OpenAI API do at this path; None if nothing is known."""
    below = next((found for beginning, found in BELOW.items() if path.startswith(beginning)), None)
    return OTHER_APIS.get(path.lstrip("/").partition("/")[0]) if below is None else below
