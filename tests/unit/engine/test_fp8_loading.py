"""Weights that are quantised while they are loaded need little memory beside what the model keeps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from common.checkpoint.experts_config import ExpertsConfig, RouterRule
from common.checkpoint.fp8_weights import CHANNEL, EVERYTHING, Fp8Scheme, Fp8Weights
from common.engine.formats import fp8_pieces
from common.engine.formats.fp8 import Fp8Format
from common.engine.layers.parts import Columns, WeightBlock
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.engine.weights import fill_piece
from tests.fakes.alive import Alive

HIDDEN, INNER = 64, 48
STEM = "model.layers.0.mlp.experts"
ONLINE = Fp8Weights("fp8", ((EVERYTHING, Fp8Scheme(CHANNEL)),), online=True)
MADE = Fp8Format(ONLINE, Placement(torch.bfloat16, torch.device("cpu")))


class Copied:
    """A tensor of a file: a block of it is read into new memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, block: tuple[slice, ...]) -> Tensor:
        return self._tensor[block].clone()


class File:
    """Tensors by name, each of them copied when it is read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name].clone()

    def get_slice(self, name: str) -> Copied:
        return Copied(self.tensors[name])


def peak(pieces: Iterable[Piece], file: File, kept: Iterable[Tensor]) -> int:
    """Return the most bytes that were in use while the pieces were filled, without those that are kept."""
    given = [each for piece in pieces for each in piece.stored_as(file.tensors)]
    with Alive([*file.tensors.values(), *kept]) as alive:
        for piece in given:
            fill_piece(piece, file)
    return alive.most


def experts(count: int) -> ExpertsConfig:
    return ExpertsConfig(count, INNER, RouterRule(2))


def stacks_of(count: int) -> dict[str, Tensor]:
    return {
        f"{STEM}.gate_up_proj": torch.randn(count, 2 * INNER, HIDDEN).bfloat16(),
        f"{STEM}.down_proj": torch.randn(count, HIDDEN, INNER).bfloat16(),
    }


def matrices_of(stacks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same experts as a checkpoint with a matrix for each has them."""
    found: dict[str, Tensor] = {}
    for name, stack in stacks.items():
        stem, last = name.rsplit(".", 1)
        for index, matrix in enumerate(stack):
            halves = zip(("gate_proj", "up_proj"), matrix.chunk(2)) if "gate" in last else [(last, matrix)]
            found |= {f"{stem}.{index}.{part}.weight": each.contiguous() for part, each in halves}
    return found


def test_experts_of_a_stack_are_quantised_one_by_one() -> None:
    """The peak does not grow with their number."""
    peaks = []
    for count in (4, 32):
        made = MADE.make_experts("model.layers.0", HIDDEN, experts(count))
        peaks.append(peak(made.pieces(), File(stacks_of(count)), made.parameters()))
    assert 0 < peaks[1] < 1.5 * peaks[0], "eight times as many"
    assert peaks[1] < 32 * HIDDEN * INNER


@torch.no_grad()
def test_stacks_and_matrices_give_the_same_experts() -> None:
    stacks = stacks_of(4)
    gate_up, down = stacks.values()
    for tensors in (stacks, matrices_of(stacks)):
        made = MADE.make_experts("model.layers.0", HIDDEN, experts(4))
        peak(made.pieces(), File(tensors), made.parameters())
        kept = dict(made.named_parameters())
        for name, values in (("gate_up", gate_up), ("down", down)):
            codes, scales = quantize_rows_reference(values)
            assert torch.equal(kept[name].float(), codes.float())
            assert torch.equal(kept[f"{name}_scales"], scales.squeeze(-1))


@torch.no_grad()
def test_rows_of_a_large_weight_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 1000
    weight = torch.randn(rows, HIDDEN).bfloat16()
    block = WeightBlock("part", rows, 0, rows, Columns(HIDDEN, 0, HIDDEN))
    found = []
    for at_once in (rows * HIDDEN, 64 * HIDDEN, 1):
        monkeypatch.setattr(fp8_pieces, "AT_ONCE", at_once)
        made = MADE.make_linear([block], bias=False)
        most = peak(made.pieces(), File({"part.weight": weight}), made.parameters())
        found.append((most - weight.nbytes, [each.float() for each in made.parameters()]))
    (whole, expected), (parts, of_parts), (lines, of_lines) = found
    assert lines < parts < whole / 10
    for one, other, third in zip(expected, of_parts, of_lines, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
