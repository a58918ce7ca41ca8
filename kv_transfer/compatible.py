"""Decides whether a decode node can take the pages of a prefill node, and gives the reason if it cannot."""

from __future__ import annotations

from itertools import zip_longest

from common.kv_cache.plane import Plane
from common.kv_cache.pool_layout import PoolLayout

SHOWN = 12  # characters of a fingerprint, enough to tell two apart


def compatible(prefill: PoolLayout, decode: PoolLayout) -> str | None:
    """Return None when pages of `prefill` can be written into `decode`, else the reason that both nodes log.

    Pool sizes, offsets and tensor-parallel sizes may differ; whatever determines the meaning of the bytes may not.
    """
    ours_target, ours_draft = _models(prefill.fingerprint)
    theirs_target, theirs_draft = _models(decode.fingerprint)
    for what, ours, theirs, remedy in (
        (
            "model",
            ours_target,
            theirs_target,
            "serve the same weights in the same format on both (model.path, model.quantization)",
        ),
        (
            "draft model, or how it drafts,",
            ours_draft,
            theirs_draft,
            "set algorithm, draft_model_path, draft_quantization, steps and topk of speculation alike on both",
        ),
        ("page size", prefill.page_size, decode.page_size, "set the same kv.page_size on both"),
    ):
        if ours != theirs:
            shown = [value[:SHOWN] if isinstance(value, str) else value for value in (ours, theirs)]
            return f"{what} differs: prefill node has {shown[0]}, decode node has {shown[1]}; {remedy}"
    for a, b in zip_longest(prefill.spec.planes, decode.spec.planes):
        if a != b:
            return _planes_differ(a, b)
    return None


def _planes_differ(prefill: Plane | None, decode: Plane | None) -> str:
    remedy = "configure the same model and the same drafter on both"
    if prefill is None or decode is None:
        extra, node = (prefill, "prefill") if prefill is not None else (decode, "decode")
        assert extra is not None
        return (
            f"number of KV planes (target + draft) differs: only the {node} node has {extra.where}; {remedy}"
        )
    if prefill.dtype != decode.dtype:
        return (
            f"KV dtype of {prefill.where} differs: prefill node has {prefill.dtype}, decode node has "
            f"{decode.dtype}; set the same model.dtype and kv.dtype on both"
        )
    if prefill.scale != decode.scale:
        return (
            f"KV scale of {prefill.where} differs: prefill node has {prefill.scale}, decode node has "
            f"{decode.scale}; serve the same checkpoint on both (model.path)"
        )
    return f"KV planes differ: prefill node has {_shown(prefill)}, decode node has {_shown(decode)}; {remedy}"


def _shown(plane: Plane) -> str:
    return f"{plane.where} ({plane.kept.value}, {'x'.join(map(str, plane.entry))})"


def _models(fingerprint: str) -> tuple[str, str]:
    """Return the fingerprints of the target and of the draft model; "none" where there is no draft model."""
    target, plus, draft = fingerprint.partition("+")
    return target, draft if plus else "none"
