"""Products that a checkpoint in FP8 has in a dense form although its config.json does not list them. No torch.

Tools that quantise a model often leave its MTP modules as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from common.checkpoint.fp8_weights import EXACT, Fp8Weights
from common.checkpoint.safetensors_header import FLOATS, TensorEntry
from common.checkpoint.weight_formats import StoredWeights

WEIGHT, SCALES = ".weight", (".weight_scale", ".weight_scale_inv")
EXPERTS = ".experts."  # before the name of a stack of all experts of a layer


def with_unlisted(
    weights: StoredWeights, tensors: Mapping[str, TensorEntry], within: tuple[str, ...]
) -> StoredWeights:
    """Return the format with the products under the prefixes `within` that the file has as floats without scales."""
    if not isinstance(weights, Fp8Weights) or weights.online:
        return weights
    dense: list[str] = []
    for name, entry in tensors.items():
        if entry.dtype not in FLOATS or not name.startswith(within):
            continue
        product = name.removesuffix(WEIGHT)
        if (
            product != name
            and len(entry.shape) == 2
            and not any(product + each in tensors for each in SCALES)
        ):
            dense.append(EXACT + product)
        elif len(entry.shape) == 3 and EXPERTS in name:
            # The pattern means all products whose names begin so.
            dense.append(name[: name.rindex(EXPERTS)] + EXPERTS.rstrip("."))
    return replace(weights, ignored=(*weights.ignored, *dict.fromkeys(dense)))
