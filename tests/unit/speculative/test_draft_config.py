"""Draft checkpoints at start-up: what fits is read as it is published, the rest is refused with a sentence.

Rows D1-D8 and A4: widths come from the config alone and are held against the real head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.draft_config import DraftAlgorithm, DraftConfig, draft_fingerprint, hidden_size_for, target_width
from common.engine.draft_runner import load_draft
from common.engine.kv_cache.relay_state import DraftRow, DraftShape, RelayState
from common.engine.layers.placement import Placement
from common.engine.model_runner import load_model
from common.errors import ModelError
from common.messages.generation import SamplingParams
from common.model_config import ModelConfig

MODELS = Path(__file__).resolve().parents[3] / "deploy" / "models"
TARGET = MODELS / "tiny-target"
PLACEMENT = Placement(torch.float32, torch.device("cpu"))


def copy_of(tmp_path: Path, name: str, **changes: Any) -> Path:
    directory = tmp_path / name
    shutil.copytree(MODELS / name, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def config_of(path: Path, algorithm: DraftAlgorithm = "eagle3") -> DraftConfig:
    return DraftConfig.load(path, algorithm, ModelConfig.load(TARGET))


def test_the_shipped_heads() -> None:
    """D: widths by the two functions."""
    eagle3 = config_of(MODELS / "tiny-eagle3")
    assert (eagle3.aux_layers, target_width(eagle3), hidden_size_for(eagle3)) == ((2, 4, 7), 768, 256)
    eagle = config_of(MODELS / "tiny-eagle", "eagle")
    assert (eagle.aux_layers, target_width(eagle), hidden_size_for(eagle)) == ((), 256, 256)


@pytest.mark.parametrize(
    ("name", "algorithm", "changes", "sentence"),
    [
        ("tiny-eagle3", "eagle", {}, "is no eagle draft; set speculation.algorithm to eagle3"),
        ("tiny-eagle", "eagle3", {}, "is no eagle3 draft; set speculation.algorithm to eagle"),
        ("tiny-target", "eagle3", {}, "is no eagle3 draft; set speculation.algorithm to standalone"),
        ("tiny-mtp", "eagle3", {}, "is no eagle3 draft; set speculation.algorithm to mtp"),
        ("tiny-eagle3", "mtp", {}, "is no mtp draft; set speculation.algorithm to eagle3"),
        ("tiny-target", "mtp", {}, "is no mtp draft; set speculation.algorithm to standalone"),
        ("tiny-mtp", "mtp", {"vocab_size": 700}, "vocab_size is 700, the target has 704"),
        ("tiny-mtp", "mtp", {"hidden_size": 128}, "hidden_size is 128, the target has 256"),
        ("tiny-mtp", "mtp", {"target_hidden_size": 512}, "target_hidden_size is 512, the target has 256"),
        ("tiny-mtp", "mtp", {"num_nextn_predict_layers": 0}, "must be a positive integer"),
        ("tiny-mtp", "mtp", {"mtp_chain": 1}, "mtp_chain must be true or false"),
        ("tiny-standalone", "standalone", {"vocab_size": 700}, "vocab_size is 700, the target has 704"),
        ("tiny-eagle3", "eagle3", {"vocab_size": 700}, "vocab_size is 700, the target has 704"),
        (
            "tiny-eagle3",
            "eagle3",
            {"target_hidden_size": 512},
            "target_hidden_size is 512, the target has 256",
        ),
        ("tiny-eagle3", "eagle3", {"norm_before_fc": True}, "norm_before_fc is not supported"),
        ("tiny-eagle3", "eagle3", {"num_hidden_layers": 2}, "an EAGLE-3 head has one"),
        (
            "tiny-eagle3",
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 2, 99]}},
            r"aux layers \[4, 2, 99\] are no ascending boundaries of 8 layers",
        ),
        (
            "tiny-eagle3",
            "eagle3",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state false is not supported",
        ),
        ("tiny-eagle3", "eagle3", {"aux_layer_convention": "x"}, "it is boundary, output or auto"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, algorithm: DraftAlgorithm, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """H: the wrong algorithm is an error at start-up, not an accept length of 1.0."""
    with pytest.raises(ModelError, match=sentence):
        config_of(copy_of(tmp_path, name, **changes), algorithm)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"eagle_config": None, "aux_layer_convention": "auto"}, (2, 4, 5)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "aux_layer_convention": "auto"},
            (2, 4, 6),
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, (1, 3)),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [3, 8]}, (3, 8)),
    ],
)
def test_aux_layers(changes: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    """ECOSYSTEM.md: boundaries, unless the file says (or begins with 1 and lets us guess) that outputs are meant."""
    assert config_of(copy_of(tmp_path, "tiny-eagle3", **changes)).aux_layers == layers


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model(TARGET)[0]


def test_weights_that_do_not_fit(target: Any, tmp_path: Path) -> None:
    path = copy_of(tmp_path, "tiny-eagle3")
    config, tensors = config_of(path), load_file(path / "model.safetensors")
    load_draft(path, config, target, PLACEMENT)
    save_file({**tensors, "d2t": tensors["d2t"] + 700}, path / "model.safetensors")
    with pytest.raises(ModelError, match="d2t does not map 256 drafts into the target's vocabulary"):
        load_draft(path, config, target, PLACEMENT)
    save_file({name: value for name, value in tensors.items() if name != "d2t"}, path / "model.safetensors")
    with pytest.raises(ModelError, match="the checkpoint has no d2t"):
        load_draft(path, config, target, PLACEMENT)
    save_file(
        {**tensors, "fc.weight": tensors["fc.weight"][:, :512].contiguous()}, path / "model.safetensors"
    )
    with pytest.raises(ModelError, match="wrongly shaped tensors"):
        load_draft(path, config, target, PLACEMENT)


def test_both_names_of_the_layer(target: Any, tmp_path: Path) -> None:
    path = copy_of(tmp_path, "tiny-eagle3")
    tensors = load_file(path / "model.safetensors")
    named = load_draft(path, config_of(path), target, PLACEMENT)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    save_file(renamed, path / "model.safetensors")
    other = load_draft(path, config_of(path), target, PLACEMENT)
    for one, two in zip(named.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_nodes_with_other_drafting_do_not_match() -> None:
    """The fingerprint is part of the KV layout that both nodes compare before pages move."""
    path = MODELS / "tiny-eagle3"
    config = config_of(path)
    made = {draft_fingerprint(path, config, steps, 1) for steps in (3, 5)}
    made.add(draft_fingerprint(MODELS / "tiny-eagle", config_of(MODELS / "tiny-eagle", "eagle"), 3, 1))
    made.add(draft_fingerprint(path, config, 3, 2))  # trees: other proposals travel
    assert len(made) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_state_travels_bit_by_bit(dtype: torch.dtype) -> None:
    """Record, relay row and retraction carry the same bytes."""
    shape = DraftShape(2, 3, dtype, vocab=9)
    relay = RelayState.allocate(2, 64, torch.device("cpu"), shape)
    hidden = torch.tensor([1.5, -2.25, 1e-3], dtype=dtype)
    row = DraftRow((0.5, 0.25), (7, 8), hidden.view(torch.uint8).numpy().tobytes())
    assert row.fits(shape)
    relay.write_row(1, [1, 2, 3, 4, 5, 4], 1, SamplingParams(max_tokens=1), row)
    assert torch.equal(relay.draft_hidden[1], hidden)
    assert relay.read_draft(1) == row
    for wrong in (DraftRow(), DraftRow((0.5, 0.25), (7, 9), row.hidden), DraftRow((0.5,), (7,), row.hidden)):
        assert not wrong.fits(shape)
    assert DraftRow().fits(DraftShape())
