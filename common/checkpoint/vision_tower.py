"""The interface of a vision config of any family, and what it says of its tower. No torch."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol


class TowerNames(NamedTuple):
    """The names of tensors in published checkpoints of a family."""

    family: str  # for errors
    mark: str  # some tensors of every such checkpoint begin like this
    prefix: str  # before the language model's layers
    head: str  # before lm_head
    parts: tuple[str, ...]  # prefixes of the tower, and of the projector if it has its own


class TowerSize(NamedTuple):
    """The size of a vision part."""

    values: int  # lower bound of its weights: matrices, no biases or norms
    width: int
    inner: int
    layers: int  # those that are built


class VisionConfig(Protocol):
    """The vision part of a model that takes images."""

    # Key of the tables of what serves it: prefill_node/vision_table.py, common/node/encoder_memory.py
    family: ClassVar[str]
    names: ClassVar[TowerNames]

    @property
    def architecture(self) -> str:
        """The name of the model's class in config.json."""
        ...

    @property
    def image_token_id(self) -> int:
        """The placeholder of an image in a tokenized prompt; may be outside the vocabulary."""
        ...

    @property
    def refused_token_ids(self) -> tuple[int, ...]:
        """Placeholders of inputs that are not served."""
        ...

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of the tokens of an image of this many pixels. Raises InvalidRequest."""
        ...

    def tower_size(self, hidden: int) -> TowerSize:
        """Return the size of the tower and the projection to a language model of width `hidden`."""
        ...
