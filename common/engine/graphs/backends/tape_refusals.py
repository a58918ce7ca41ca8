"""The calls that a CUDA graph cannot record: the tape refuses them on the CPU, with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.engine.graphs.backends.base import CaptureError

# Composite operations have no tags, and inference mode dispatches them whole.
SYNCS = frozenset(
    (
        *("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"),
        *(
            "nonzero",
            "nonzero_numpy",
            "argwhere",
            "masked_select",
            "repeat_interleave",
            "bincount",
            "combinations",
        ),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    )
)
HOST_DATA = frozenset(("lift", "lift_fresh", "lift_fresh_copy"))
SCALAR_LIFTS = frozenset(("aten::lift", "aten::lift_fresh"))
RESIZES = frozenset(("resize_", "resize_as_", "set_", "resize"))
MASKED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
METHODS = frozenset(("tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__"))
SYNC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def refuse_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise CaptureError for a call of the dispatcher that a graph cannot hold."""
    name = func.name()
    short = name.partition("::")[2].partition(".")[0]
    if short in MASKED:
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise CaptureError(
                f"{name} with a boolean mask synchronises with the device to count it; use torch.where"
            )
        return
    if short == "repeat_interleave" and kwargs.get("output_size") is not None:
        return
    if short in SYNCS or name == "aten::where" or any(tag in func.tags for tag in SYNC_TAGS):
        raise CaptureError(
            f"{name} waits for the device; keep the value in a tensor, or compute it in plan()"
        )
    if short in HOST_DATA:
        raise CaptureError(
            f"{name}: a tensor made from host data inside a graph; make it before, in a static slot"
        )
    if short in RESIZES:
        raise CaptureError(f"{name} changes the memory of a tensor; a graph's shapes and addresses are fixed")


def refuse_method(func: Any) -> None:
    """Raise CaptureError for a method that reads a tensor's memory on the host."""
    name = getattr(func, "__name__", "")
    if name in METHODS:
        raise CaptureError(f"Tensor.{name} waits for the device; read the tensor after the replay")
