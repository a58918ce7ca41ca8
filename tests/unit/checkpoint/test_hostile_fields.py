"""Every field of every shipped config is replaced by hostile values: a ModelError names the file, or a model loads."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.checkpoint.llava_config import check_llava_processor
from common.checkpoint.model_config import ModelConfig
from common.engine.ops.rotary import inverse_frequencies
from common.errors import ModelError
from common.speculation.directory import load_draft_config
from tests.architecture.source_tree import ROOT

EXAMPLES = 500 if "TANDEM_EXPLORE" in os.environ else 150
MODELS = ROOT / "deploy" / "tiny_models"
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 63, 10**18, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.0, 1e-300, 1e9, 1e300, 1e308, -1.5),
    *(
        "",
        "x",
        "1",
        "0",
        "nan",
        "\ud800",
        "x" * 5000,
        "gelu",
        "yarn",
        "llama3",
        "linear",
        "mrope",
        "torch.float32",
    ),
    *([], [[]], [None], [1], [0, 1, 2], ["x"], [1e9], [10**30], list(range(300)), ["full_attention"] * 2),
    *({}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": ["x"]}, {"type": "llama3", "factor": 0.1}),
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5},
    {"rope_type": "yarn", "factor": 2.0, "mscale": 1e308, "mscale_all_dim": 1e-308},
    *(
        {"rope_type": "yarn", "factor": f, "beta_fast": b, "beta_slow": b}
        for f in (1e-9, 1e6)
        for b in (1e-9, 1e6)
    ),
    *(
        {"rope_type": "llama3", "factor": f, "low_freq_factor": 1e-9, "high_freq_factor": 2e-9}
        for f in (1e-9, 1e6)
    ),
    {"rope_type": "linear", "factor": 1e-300, "rope_theta": 1.0000001},
    {"rope_type": "default", "mrope_section": [1, 2, 10**30]},
    {"shortest_edge": 10**30, "longest_edge": "x", "height": [], "width": -1},
]
NAMES: dict[str, str | None] = {
    "tiny-target": None,
    "tiny-vision": None,
    "tiny-eagle": "eagle",
    "tiny-eagle3": "eagle3",
    "tiny-mtp": "mtp",
    "tiny-standalone": "standalone",
}
# Keys that are read if present, but that no shipped config has.
MORE = {
    *(
        "dtype",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "quantization_config",
    ),
    *(
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "qkv_bias",
        "norm_output",
        "norm_before_fc",
    ),
    *("num_aux_hidden_states", "fc_norm", "speculators_model_type", "transformer_layer_config", "mtp_chain"),
    *("eagle_aux_hidden_state_layer_ids", "num_nextn_predict_layers", "draft_vocab_size", "image_token_id"),
}
QWEN = {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Qwen2_5_VLForConditionalGeneration"}


def places(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys of nested objects."""
    for key, inside in value.items():
        yield (*at, key)
        if isinstance(inside, dict):
            yield from places(inside, (*at, key))


def changed(raw: dict[str, Any], changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(raw))
    for path, value in changes:
        inside = made
        for key in path[:-1]:
            found = inside.get(key)
            inside = found if isinstance(found, dict) else inside.setdefault("unread", {})
        # Hypothesis may draw one object twice: it must not come to contain itself.
        inside[path[-1]] = copy.deepcopy(value)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_hostile_values_in_any_field(name: str, tmp_path: Path) -> None:
    raw = json.loads((MODELS / name / "config.json").read_text())
    paths = [*places(raw), *((key,) for key in sorted(MORE))]
    target = ModelConfig.load(MODELS / "tiny-target")
    architectures = [None, *([each] for each in sorted(QWEN | set(raw["architectures"])))]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.tuples(st.sampled_from(paths), st.sampled_from(HOSTILE)), min_size=1, max_size=4),
        st.sampled_from(architectures),
    )
    def load(changes: list[tuple[tuple[str, ...], Any]], architecture: list[str] | None) -> None:
        made = changed(raw, changes)
        if architecture is not None:
            made["architectures"] = architecture
        (tmp_path / "config.json").write_text(json.dumps(made))
        try:
            algorithm = NAMES[name]
            if algorithm is None:
                config = ModelConfig.load(tmp_path)
            else:
                config = load_draft_config(tmp_path, algorithm, target).model
            assert (
                inverse_frequencies(config.rope, config.rope.rotated_dims(config.head_dim)).isfinite().all()
            )
        except ModelError as error:
            said = str(error)
            assert str(tmp_path) in said
            assert len(said) <= ModelError.MAX_CHARACTERS
            assert "\n" not in said

    load()


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_hostile_values_in_an_image_processor(file: str, tmp_path: Path) -> None:
    raw = json.loads((MODELS / "tiny-vision" / "preprocessor_config.json").read_text())

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.sampled_from(list(places(raw))), st.sampled_from(HOSTILE)), max_size=3))
    def check(changes: list[tuple[tuple[str, ...], Any]]) -> None:
        made = changed(raw, changes)
        whole = made if file.startswith("pre") else {"image_processor": made}
        (tmp_path / file).write_text(json.dumps(whole))
        try:
            check_llava_processor(tmp_path)
        except ModelError as error:
            assert file in str(error)  # noqa: PT017

    check()
