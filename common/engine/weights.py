"""Fills a model from safetensors files, piece by piece: mapped into memory, and copied once to the model's dtype, or to
a GPU by way of pinned buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.checkpoint import kv_scales
from common.checkpoint.dtype_name import dtype_name
from common.checkpoint.model_directory import real_path
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.safetensors_header import FLOATS, WeightFile
from common.engine.layers.piece import Piece
from common.engine.staged_reads import StagedReads
from common.errors import ModelError
from common.observability.start_progress import progressed

STAGED = "cuda"  # the kind of device that is filled by way of pinned buffers
MAX_SHOWN = 5  # names of tensors in one sentence of an error
Progress = Callable[[int, int], None]  # (loaded bytes, bytes in total)

# Suffixes of tensors that the engine computes itself, and of scales that belong to the KV cache.
HARMLESS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", *kv_scales.SUFFIXES)


OWN_DTYPES = {
    torch.int8: ("I8",),
    torch.uint8: ("U8",),
    torch.int64: ("I64", "I32"),
    torch.float8_e4m3fn: ("F8_E4M3",),
}


class TensorSource(Protocol):
    """Tensors by name, such as those of an open safetensors file."""

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> Any:
        """Return what a tuple of slices cuts a block out of, without reading the rest if possible."""
        ...


def load_weights(
    directory: str | Path,
    pieces: Iterable[Piece],
    progress: Progress | None = None,
    ignore: tuple[str, ...] = (),
    aside: tuple[str, ...] = (),
    within: tuple[str, ...] = ("",),
) -> None:
    """Fill every piece from the checkpoint's tensor of the same name.

    Args:
        ignore: suffixes of further names that may be present and are not used, such as a tied lm_head.weight.
        aside: prefixes of another part of the model, which is loaded separately or not at all.
        within: prefixes of the names that belong to this model; a file may contain those of another model.

    Raises:
        ModelError: says what is missing, unexpected or of the wrong shape, or which file is truncated or corrupt.
            Everything is checked against the headers before the first byte is copied.
    """
    files = read_weight_files(Path(directory))
    names = {name for file in files for name in file.tensors}
    wanted: dict[str, list[Piece]] = {}
    for piece in pieces:
        for each in piece.stored_as(names):
            wanted.setdefault(each.name, []).append(each)
    _check(Path(directory), files, wanted, (*HARMLESS, *ignore), aside, within)
    total = sum(file.num_bytes for file in files)
    loaded = 0

    def filled(file: WeightFile, name: str) -> None:
        nonlocal loaded
        entry = file.tensors[name]
        loaded += entry.end - entry.begin
        progressed(f"read {name} of {file.path}")
        if progress is not None:
            progress(loaded, total)

    devices = {piece.into.device for found in wanted.values() for piece in found}
    if len(devices) == 1 and STAGED in {device.type for device in devices}:
        with StagedReads(devices.pop()) as staged:
            for file in files:
                _fill_staged(file, wanted, staged, filled)
        return
    for file in files:
        _fill_mapped(file, wanted, filled)


def _fill_mapped(
    file: WeightFile, wanted: Mapping[str, Sequence[Piece]], filled: Callable[[WeightFile, str], None]
) -> None:
    """Fill all pieces of a file from mapped memory."""
    progressed(f"began to read {file.path}")
    try:
        with safe_open(str(real_path(file.path)), framework="pt", device="cpu") as source:
            for name in file.tensors:
                for piece in wanted.get(name, ()):
                    fill_piece(piece, source)
                filled(file, name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file.path} cannot be read as safetensors: {error}") from error


def _fill_staged(
    file: WeightFile,
    wanted: Mapping[str, Sequence[Piece]],
    staged: StagedReads,
    filled: Callable[[WeightFile, str], None],
) -> None:
    """Fill all pieces of a file on a GPU."""
    here = {name: [piece for piece in wanted.get(name, ()) if not piece.elsewhere] for name in file.tensors}
    reads = [
        (name, (slice(None),) * len(file.tensors[name].shape) if piece.is_whole else piece.block)
        for name, pieces in here.items()
        for piece in pieces
    ]
    with closing(staged.blocks(file, reads)) as blocks:
        for name, pieces in here.items():
            for piece in pieces:
                _fill(piece, next(blocks))
            filled(file, name)


def fill_piece(piece: Piece, source: TensorSource) -> None:
    """Copy one piece, reading only its block. Raises ModelError if its values cannot be used."""
    if piece.elsewhere:
        return
    _fill(
        piece, source.get_tensor(piece.name) if piece.is_whole else source.get_slice(piece.name)[piece.block]
    )


def _fill(piece: Piece, found: Tensor) -> None:
    """Fill a piece with the block that was read."""
    if piece.single:
        found = found.view(())
    if piece.check is not None:
        piece.check(piece.name, found)
    if piece.store is not None:
        piece.store(found)
    else:
        piece.into.copy_(found)
    if piece.plus:
        piece.into.add_(piece.plus)


def _check(
    directory: Path,
    files: list[WeightFile],
    wanted: Mapping[str, Sequence[Piece]],
    ignore: tuple[str, ...],
    aside: tuple[str, ...],
    within: tuple[str, ...],
) -> None:
    found = {
        name: entry
        for file in files
        for name, entry in file.tensors.items()
        if name in wanted or (name.startswith(within) and not name.startswith(aside))
    }
    present = [(piece, found[name]) for name, each in wanted.items() if name in found for piece in each]
    problems = [
        _sentence("missing tensors", [name for name in wanted if name not in found]),
        _sentence("unexpected tensors", [n for n in found if n not in wanted and not n.endswith(ignore)]),
        _sentence(
            "wrongly shaped tensors",
            [
                f"{piece.name} {list(entry.shape)} instead of {list(piece.whole)}"
                for piece, entry in present
                if not piece.fits(entry.shape)
            ],
        ),
        _sentence(
            "tensors of unsupported dtype",
            [
                f"{piece.name} {entry.dtype} (supported: {', '.join(_accepted(piece))})"
                for piece, entry in present
                if entry.dtype not in _accepted(piece)
            ],
        ),
    ]
    differences = [problem for problem in problems if problem]
    if differences:
        raise ModelError(f"the weights in {directory} do not fit its config.json: {'; '.join(differences)}")


def _accepted(piece: Piece) -> tuple[str, ...]:
    """Return the safetensors dtypes that may fill it: any float dtype for float values, else its own."""
    return piece.dtypes or OWN_DTYPES.get(piece.into.dtype, FLOATS)


def _sentence(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"{what}: {', '.join(names[:MAX_SHOWN])}{more}"


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Return the dtype of `name`; "auto" is the checkpoint's, but float32 on the CPU, where bf16 is slow."""
    name = dtype_name(name, checkpoint, device.type)
    by_name = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in by_name:
        raise ModelError(f"dtype {name!r} is not supported; supported are auto, {', '.join(by_name)}")
    return by_name[name]
