"""Multi-token prediction: modules of one decoder layer each, with KV over all positions.

A checkpoint with one module is run like an EAGLE head (models/eagle.py): row t reads the embedding of token t + 1 and
the target's hidden state after token t, has position t, and predicts token t + 2. Later steps append rows that read the
module's own output for the previous row. After verification these rows are computed again from the target's hidden
states.

Several modules have one step each:

Row t of module k (from 0) reads the embedding of token t + 1 + k, has position t, and predicts token t + 2 + k. In
addition to the embedding it reads the target's hidden state after token t or, in a chain, the output of module k - 1
for row t. These states are normed, except those of MiMo-V2's form, which modules read before the target's final norm.

All code around these modules keeps the following invariant. Let L tokens have KV, and token L be drawn. The rows of
module k that read known tokens only are those below L - k. Its rows L - k .. L - 1 read drafts, so their KV is
provisional: they are computed again, with the drawn tokens instead of the drafts, as soon as those are known. For
that, module k needs the hidden state that it reads at position L - k, its last verified input; the k - 1 inputs after
it come from the previous modules, which are computed again themselves. So a request carries exactly one hidden state
for each module but the first, at every cut: between chunks of a prompt, in the hand-over, between rounds, in a
backup. A request shorter than k has none.

Sources: arXiv 2412.19437, 2.2; arXiv 2505.07608.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from common.checkpoint.draft_config import DraftConfig, module_input_for
from common.checkpoint.mtp_format import MtpFormat
from common.engine.attention.backend import AttentionBackend
from common.engine.formats.format_registry import weight_format
from common.engine.layers.activations import Activations
from common.engine.layers.linear import Embedding, Linear
from common.engine.layers.norm import RmsNorm, model_norm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.layers.rotary import Rotary
from common.engine.models.causal_lm import CausalLM
from common.engine.models.decoder import DecoderLayer
from common.engine.models.eagle import DraftModule, DraftOutput

# A module's own parts. In published files they are copies of the target's, if they exist at all.
EMBEDDING, HEAD = "embed_tokens", "shared_head.head"


class MtpModule(DraftModule):
    """A `SplitHead` that shares the target's embedding and LM head, or has its own.

    Args:
        index: among the modules. Its layer has the planes of this index.
        own: it has its own, since it is of another width than the target.
        first: the first module, if this one shares its norms and its projection.
    """

    enorm: RmsNorm
    hnorm: RmsNorm
    norm: RmsNorm
    eh_proj: Linear

    def __init__(
        self,
        draft: DraftConfig,
        index: int,
        target: CausalLM,
        placement: Placement,
        own: bool = False,
        first: MtpModule | None = None,
    ) -> None:
        super().__init__()
        assert draft.mtp is not None
        config = draft.model
        size, read = config.hidden_size, module_input_for(draft, index)
        self.placement = placement
        names, prefix, weights = draft.mtp, draft.mtp.prefix(index), weight_format(config, placement)
        self._format: MtpFormat = names
        self._passes_output = names.chain or draft.repeats
        self._own, self._shares = own, first is not None
        self._config, self._prefix, self._weights = config, prefix, weights
        self.embed_tokens, self.lm_head = target.embed_tokens, target.lm_head
        if own:
            self.embed_tokens, self.lm_head = self.own_embedding(), self.own_head()
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        self.layer = DecoderLayer(names.layer_prefix(index), config, index, weights)
        if first is not None:
            self.enorm, self.hnorm, self.norm = first.enorm, first.hnorm, first.norm
            self.eh_proj = first.eh_proj
            return
        self.enorm = model_norm(f"{prefix}.{names.embed_norm}", size, config, placement)
        self.hnorm = model_norm(f"{prefix}.{names.hidden_norm}", read, config, placement)
        self.eh_proj = weights.linear(size + read, {f"{prefix}.{names.projection}": size}, bias=False)
        self.norm = model_norm(f"{prefix}.{names.final_norm}", size, config, placement)

    def own_embedding(self) -> Embedding:
        """Make an uninitialised embedding of its own."""
        config, name = self._config, f"{self._prefix}.{EMBEDDING}"
        return self._weights.embedding(name, config.vocab_size, config.hidden_size)

    def own_head(self) -> Linear:
        """Make an uninitialised LM head of its own."""
        config, name = self._config, f"{self._prefix}.{HEAD}"
        return self._weights.head(name, config.hidden_size, config.vocab_size)

    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        """Run the layer. `hidden` of the output is the input of the next step, see the head of this file."""
        inputs = self.enorm(embeds), self.hnorm(hidden)
        both = torch.cat(inputs if self._format.embedding_first else inputs[::-1], dim=-1)
        stream = self.eh_proj.product(Activations(both))
        normed = Activations(self.layer.input_layernorm(stream))
        x, stream = self.layer(normed, stream, self.rotary(positions), attention, self.norm)
        last = x.tensor()
        output = stream if self._format.before_norm else last
        return DraftOutput(last, output if self._passes_output else hidden)

    def pieces(self) -> Iterator[Piece]:
        """Yield the checkpoint pieces that it reads, except those that the first module reads for it."""
        if not self._shares:
            yield from self.enorm.pieces()
            yield from self.hnorm.pieces()
            yield from self.eh_proj.pieces()
        for piece in self.layer.pieces():
            yield piece._replace(name=self._format.layer_name(piece.name))
        if not self._shares:
            yield from self.norm.pieces()
        if self._own:
            yield from self.embed_tokens.pieces()
            yield from self.lm_head.pieces()


class MtpModules(nn.Module):
    """The modules of a checkpoint that are used, in the order of the draft steps."""

    def __init__(self, modules: Sequence[MtpModule]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)

    @property
    def heads(self) -> tuple[MtpModule, ...]:
        return tuple(step for step in self.steps if isinstance(step, MtpModule))

    def pieces(self) -> Iterator[Piece]:
        for head in self.heads:
            yield from head.pieces()


def build_mtp(draft: DraftConfig, target: CausalLM, placement: Placement) -> MtpModules:
    """Return uninitialised modules. They share the target's embedding and head if they are as wide as the target."""
    own = draft.model.hidden_size != draft.target_hidden
    assert draft.mtp is not None
    modules: list[MtpModule] = []
    for index in range(draft.model.num_layers):
        first = modules[0] if modules and draft.mtp.shared else None
        modules.append(MtpModule(draft, index, target, placement, own, first))
    return MtpModules(modules)
