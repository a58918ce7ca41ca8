"""The point where a compiling backend replaces a model's body during capture; elsewhere the body itself runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from common.engine.attention.backend import AttentionBackend
from common.engine.models.causal_lm import BodyOutput, CausalLM


class BodyHandler(Protocol):
    """Runs bodies in a backend's own way."""

    def run_body(
        self, model: CausalLM, embeds: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> BodyOutput: ...


_active: ContextVar[BodyHandler | None] = ContextVar("body_handler", default=None)


def run_body(model: CausalLM, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
    """Run `model.forward`, or inside `compiling` the handler's version of it."""
    handler = _active.get()
    if handler is None:
        output: BodyOutput = model(embeds, positions, attention)
        return output
    return handler.run_body(model, embeds, positions, attention)


@contextmanager
def compiling(handler: BodyHandler) -> Iterator[None]:
    """Pass bodies to `handler` in this context."""
    token = _active.set(handler)
    try:
        yield
    finally:
        _active.reset(token)
