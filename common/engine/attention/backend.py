"""The interface between mixers and whoever knows the batch: attention over pages, or an operation of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from common.engine.forward.batch import ForwardBatch
from common.engine.state.pool import KvPool


class LayerOperation(Protocol):
    """The part of a mixer that joins the tokens of a request, over the planes that its record declares."""

    def __call__(
        self,
        batch: ForwardBatch,
        layer: int,
        planes: Mapping[str, Tensor],
        projected: Tensor,
        weights: Sequence[Tensor],
        eps: float,
        /,
    ) -> Tensor:
        """Return [T, width] for projected [T, P]; reads and writes `planes` of the layer, by name.

        `weights` and `eps` are the mixer's, as it passes them to `AttentionBackend.mix`.

        T may count padding rows past the last token of the batch, which may hold anything: nothing of them may reach a
        plane or another row. Graphs record it, except on batches of mode EXTEND with many tokens: it must not wait for
        the device. Page 0 and state slot 0 belong to padding and have to stay zero. An operation with a state also
        stores the states that `BatchState.saves` names.
        """


class TokenSlots(NamedTuple):
    """The slots of a batch's keys and values. Rows in page 0, and rows past the last slot, are padding of a graph."""

    slots: Tensor  # [T] int64, page * page_size + offset
    page_size: int


class AttentionBackend(Protocol):
    """plan / store / forward. All work on host data happens in `plan`, outside graphs."""

    def plan(self, batch: ForwardBatch) -> None:
        """Take a batch's metadata for the following calls, one store and one forward per layer."""

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        """Normalise and rotate the queries and keys of qkv [T, heads + 2 * kv_heads, D] in place and store keys and
        values.

        They are stored in the batch's `kv_slots` of this layer. Graphs record this call: see `ops/rotary_kv_write`.
        """

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend query [T, heads, D] over the stored keys; return the same shape. Graphs break here.

        key, value: [T, kv_heads, D], already stored; passed for kernels that read new tokens directly.
        """

    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        """Run the operation of a mixer other than attention. Graphs break here.

        Args:
            operation: "module:function" of a `LayerOperation`; a name, since traced graphs hold no functions.
            projected: [T, P], all that the operation reads of the new tokens.
            width: values of each row of the result.
            weights: parameters that the operation reads.
            eps: of its norm, if it has one.
        """

    def token_slots(self) -> TokenSlots | None:
        """Return the slots of the batch's rows; None in a trace, which has no batch."""


# Makes the attention of a model over its pool, whose layers see this many keys (None: all).
# (pool, windows, scale), as for PagedAttention
MakeAttention = Callable[[KvPool, Sequence[int | None], float | None], AttentionBackend]
