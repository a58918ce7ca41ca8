"""One model with its KV pool and attention backend: runs a batch, for any use of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import module_prefixes
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardOutput
from common.engine.forward.own_head import with_own_head
from common.engine.layers.placement import Placement
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.models.causal_lm import BodyOutput, CausalLM
from common.engine.models.checkpoint_layout import checkpoint_layout
from common.engine.models.model_registry import build_model
from common.engine.models.model_size import check_model_size
from common.engine.state.pool import KvPool
from common.engine.weights import Progress, load_weights, resolve_dtype


class ModelRunner:
    """plan / run over one model. `attention` reads and writes `pool`."""

    def __init__(self, model: CausalLM, pool: KvPool, attention: AttentionBackend) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, input_embeds: Tensor | None = None) -> ForwardOutput:
        """Run T tokens. `input_embeds` [T, H] replaces the embedding of `batch.input_ids`."""
        self.attention.plan(batch)
        embeds = self.model.embed(batch.input_ids) if input_embeds is None else input_embeds
        return self.finish(batch, self.body(embeds, batch.positions))

    def body(self, embeds: Tensor, positions: Tensor) -> BodyOutput:
        """Run only the layers, after `attention.plan`: embeds [T, H], positions as in ForwardBatch."""
        output: BodyOutput = self.model(embeds, positions, self.attention)
        return output

    def finish(self, batch: ForwardBatch, output: BodyOutput) -> ForwardOutput:
        """Apply the LM head to the wanted rows and return the hidden states that the batch asks for.

        Aux hidden states are returned if the model has them.
        """
        wanted = output.last.index_select(0, batch.logits_rows)
        rows = self.model.logit_rows(wanted)
        if batch.hidden_mode is CaptureHiddenMode.NULL:
            return ForwardOutput(rows, last=output.last)
        hidden = output.last if output.aux is None else output.aux
        if batch.hidden_mode is CaptureHiddenMode.LAST:
            hidden = hidden.index_select(0, batch.query_start[1:] - 1)
        return ForwardOutput(rows, hidden, output.last)


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    aux_layers: Sequence[int] = (),
    max_tokens: int | None = None,
    ranks: Ranks = ONE_RANK,
    quantization: str = "none",
) -> tuple[CausalLM, ModelConfig]:
    """Build and fill the model of a Hugging Face directory. Raises ModelError if it cannot be served.

    Args:
        max_tokens: maximum length of a request; None: as long as the model allows.
        ranks: says which share of the model is loaded.
        quantization: as for `ModelConfig.quantized`.
    """
    config = ModelConfig.load(path).for_length(max_tokens).quantized(quantization)
    layout = checkpoint_layout(config, path)
    config, renamed = with_own_head(Path(path), config, layout)
    target = torch.device(device)
    placement = Placement(resolve_dtype(dtype, config.dtype, target), target, ranks)
    check_model_size(Path(path), config, placement.dtype, target)
    model = build_model(config, placement, aux_layers).eval()
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    names = ((piece, layout.language(piece.name)) for piece in model.pieces())
    pieces = (piece._replace(name=renamed.get(name, name)) for piece, name in names)
    modules = module_prefixes(Path(path))
    load_weights(path, pieces, progress, tied, (*layout.vision_prefixes, *modules))
    return model, config
