"""Fill a model from safetensors files: mapped into memory, copied once into the model's dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ModelError
from common.model_directory import real_path
from common.model_files import read_weight_files
from common.safetensors_header import WeightFile

Progress = Callable[[int, int], None]  # (loaded bytes, bytes in total)

HARMLESS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)  # suffixes; we compute them


def load_weights(
    directory: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    progress: Progress | None = None,
    ignore: tuple[str, ...] = (),
    aside: tuple[str, ...] = (),
    within: tuple[str, ...] = ("",),
) -> None:
    """Copy every checkpoint tensor into the view that bears its name.

    Args:
        tensors: (name in the checkpoint, view to fill): a model's `checkpoint_tensors()`.
        ignore: suffixes of further names that may be present and are not used, such as a tied lm_head.weight.
        aside: prefixes of the names of another part of the model, which is loaded apart or not at all.
        within: prefixes of the names that this model answers for; a file may hold others, of another model.

    Raises:
        ModelError: names what is missing, unexpected or of the wrong shape, or the file that is truncated or
            corrupt.
            Everything is checked against the headers before the first byte is copied.
    """
    views = dict(tensors)
    files = read_weight_files(Path(directory))
    _check(Path(directory), files, views, (*HARMLESS, *ignore), aside, within)
    total = sum(file.num_bytes for file in files)
    loaded = 0
    for file in files:
        devices = {str(view.device) for view in views.values()}
        device = devices.pop() if len(devices) == 1 else "cpu"
        try:
            with safe_open(str(real_path(file.path)), framework="pt", device=device) as source:
                for name, entry in file.tensors.items():
                    if name in views:
                        views[name].copy_(source.get_tensor(name))
                    loaded += entry.end - entry.begin
                    if progress is not None:
                        progress(loaded, total)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file.path} cannot be read as safetensors: {error}") from error


def _check(
    directory: Path,
    files: list[WeightFile],
    views: dict[str, Tensor],
    ignore: tuple[str, ...],
    aside: tuple[str, ...],
    within: tuple[str, ...],
) -> None:
    found = {
        name: entry
        for file in files
        for name, entry in file.tensors.items()
        if name in views or (name.startswith(within) and not name.startswith(aside))
    }
    problems = [
        _sentence("missing tensors", [name for name in views if name not in found]),
        _sentence("unexpected tensors", [n for n in found if n not in views and not n.endswith(ignore)]),
        _sentence(
            "wrongly shaped tensors",
            [
                f"{name} {list(found[name].shape)} instead of {list(view.shape)}"
                for name, view in views.items()
                if name in found and found[name].shape != tuple(view.shape)
            ],
        ),
        _sentence(
            "tensors of unsupported dtype (supported: F32, BF16, F16)",
            [
                f"{n} {found[n].dtype}"
                for n in views
                if n in found and found[n].dtype not in ("F32", "BF16", "F16")
            ],
        ),
    ]
    said = [problem for problem in problems if problem]
    if said:
        raise ModelError(f"the weights in {directory} do not fit its config.json: {'; '.join(said)}")


def _sentence(what: str, names: list[str], shown: int = 5) -> str:
    if not names:
        return ""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{what}: {', '.join(names[:shown])}{more}"


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Say which dtype `name` means; "auto": the checkpoint's, but float32 on the CPU, where bf16 is slow."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    by_name = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in by_name:
        raise ModelError(f"dtype {name!r} is not supported; supported are auto, {', '.join(by_name)}")
    return by_name[name]
