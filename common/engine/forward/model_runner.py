"""One model, one KV pool, one attention backend: runs a batch, whatever the model is used for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import read_json
from common.checkpoint.mtp_format import module_prefixes
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardOutput
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import BodyOutput, CausalLM
from common.engine.models.checkpoint_layout import checkpoint_layout
from common.engine.models.model_size import check_model_size
from common.engine.models.registry import build_model
from common.engine.state.pool import KvPool
from common.engine.weights import Progress, load_weights, resolve_dtype


class ModelRunner:
    """plan / run over one model. `pool` is the one that `attention` reads and writes."""

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
        """The layers alone, after `attention.plan`: embeds [T, H], positions as in ForwardBatch."""
        output: BodyOutput = self.model(embeds, positions, self.attention)
        return output

    def finish(self, batch: ForwardBatch, output: BodyOutput) -> ForwardOutput:
        """LM head on the wanted rows, and the hidden states asked for: aux ones where the model has them."""
        wanted = output.last.index_select(0, batch.logits_rows)
        logits = self.model.compute_logits(wanted)
        if batch.hidden_mode is CaptureHiddenMode.NULL:
            return ForwardOutput(logits)
        hidden = output.last if output.aux is None else output.aux
        if batch.hidden_mode is CaptureHiddenMode.LAST:
            hidden = hidden.index_select(0, batch.query_start[1:] - 1)
        return ForwardOutput(logits, hidden)


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    aux_layers: Sequence[int] = (),
) -> tuple[CausalLM, ModelConfig]:
    """Build the model of a Hugging Face directory and fill it. `ModelError` says what cannot be served."""
    config = ModelConfig.load(path)
    target = torch.device(device)
    placement = Placement(resolve_dtype(dtype, config.dtype, target), target)
    check_model_size(Path(path), config, placement.dtype, target)
    model = build_model(config, placement, aux_layers).eval()
    ignore = ("lm_head.weight",) if config.tie_word_embeddings else ()
    layout = checkpoint_layout(config, path)
    pieces = (piece._replace(name=layout.language(piece.name)) for piece in model.pieces())
    file = Path(path) / "config.json"
    modules = module_prefixes(read_json(file), str(file))
    load_weights(path, pieces, progress, ignore, (*layout.vision_prefixes, *modules))
    return model, config
