"""Which products an ignore list means, compared with the libraries that write such lists."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module

from common.checkpoint.fp8_weights import Fp8Weights
from common.checkpoint.weight_formats import stored_weights
from tests.fakes.fp8_sections import SECTIONS

LISTS = ["modules_to_not_convert", "ignored_layers", "ignore"]
PARTS = ["model", "layers", "0", "1", "10", "mlp", "self_attn", "experts", "shared_expert"]
LAST = ["q_proj", "o_proj", "gate", "gate_proj", "gate_up_proj", "shared_expert_gate", "lm_head", "in_proj_a"]
NAMES = st.tuples(st.lists(st.sampled_from(PARTS), max_size=5), st.sampled_from(LAST)).map(
    lambda drawn: ".".join([*drawn[0], drawn[1]])
)


@st.composite
def names_with_pattern(draw: st.DrawFn) -> tuple[str, str]:
    """Draw the name of a product, and a piece of it or of another one, perhaps as an expression."""
    name = draw(NAMES)
    source = draw(st.sampled_from([name, draw(NAMES)]))
    begin = draw(st.integers(0, len(source) - 1))
    piece = source[begin : draw(st.integers(begin + 1, len(source)))]
    written = draw(
        st.sampled_from(["{}", "{}", "{}", ".*{}", "{}.*", ".*{}.*", "{}$", ".*[.]{}$", "(.*[.])?{}"])
    )
    return name, written.format(piece)


def dense(section: str, key: str, listed: str, name: str) -> bool:
    """Return whether a product is dense in a checkpoint that lists one pattern."""
    plain = {each: value for each, value in SECTIONS[section].items() if each not in LISTS}
    weights = stored_weights({"quantization_config": {**plain, key: [listed]}}, "config.json")
    assert isinstance(weights, Fp8Weights)
    return weights.scheme_of(name) is None


def spelled(name: str) -> list[str]:
    """Return the names of a product in checkpoints with and without other parts than the language model."""
    inner = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    return [name, f"language_model.{name}", inner]


def in_the_middle(name: str, pattern: str) -> bool:
    """Return whether the pattern is a block within the name: earlier versions of transformers leave that dense."""
    return f".{pattern.removesuffix('.')}." in f".{name}."


@settings(max_examples=100)
@given(drawn=names_with_pattern(), key=st.sampled_from(LISTS[:2]))
def test_fine_grained_fp8_matches_as_transformers_does(drawn: tuple[str, str], key: str) -> None:
    product, pattern = drawn
    names = spelled(product)
    wanted = any(not should_convert_module(name, [pattern]) or in_the_middle(name, pattern) for name in names)
    assert dense("tensor-dynamic", key, pattern, product) == wanted


@settings(max_examples=50)
@given(drawn=names_with_pattern(), expression=st.booleans())
def test_compressed_tensors_matches_whole_names_and_beginnings(
    drawn: tuple[str, str], expression: bool
) -> None:
    """As `match_name` in compressed_tensors/utils/match.py."""
    product, pattern = drawn
    found = [
        name for name in spelled(product) if (re.match(pattern, name) if expression else pattern == name)
    ]
    assert dense("channel-dynamic", "ignore", f"re:{pattern}" if expression else pattern, product) == bool(
        found
    )


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        ("gate", "model.layers.0.mlp.shared_expert_gate"),
        ("_proj", "model.layers.0.self_attn.q_proj"),
        (r"model\.layers\.(0|2)", "model.layers.2.mlp.up_proj"),
        (r"re:(?:.*\.)?mlp\.gate$", "model.layers.3.mlp.gate"),
    ],
)
def test_endings_and_expressions_are_read(listed: str, name: str) -> None:
    assert dense("tensor-dynamic", LISTS[0], listed, name)
    assert not dense("tensor-dynamic", LISTS[0], listed, "model.layers.20.mlp.down")
