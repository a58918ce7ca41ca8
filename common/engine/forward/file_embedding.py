"""Takes the embedding of a draft's file, unless it is a copy of the target's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from common.engine.layers.linear import Embedding
from common.engine.models.causal_lm import CausalLM
from common.engine.weights import load_weights
from common.errors import ModelError


class EmbeddingOwner(Protocol):
    """A draft as wide as the target, which shares its embedding or has one of its own."""

    embed_tokens: Embedding

    def own_embedding(self) -> Embedding:
        """Make an uninitialised embedding of its own."""
        ...


@torch.no_grad()
def take_embedding(
    path: Path, head: EmbeddingOwner, target: CausalLM, published: Callable[[str], str] = str
) -> None:
    """Use the embedding of the file unless it is a copy of the target's. Raises ModelError.

    `published` returns the file's name of a tensor.
    """
    own = head.own_embedding()
    (ours,), (theirs,) = own.pieces(), target.embed_tokens.pieces()
    ours = ours._replace(name=published(ours.name))
    load_weights(path, [ours], within=(ours.name,))
    if torch.equal(ours.into, theirs.into):
        return
    if target.config.vision is not None:
        raise ModelError(
            f"{path}: {ours.name} is not the target's embedding, so this draft cannot read the images that the target "
            "embeds; use a checkpoint that shares it"
        )
    head.embed_tokens = own
