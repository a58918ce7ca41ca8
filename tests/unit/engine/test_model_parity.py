"""Logits of every family equal transformers' in float32, through the paged cache."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
import torch

from common.checkpoint.families import FAMILIES as CONFIG_FAMILIES
from common.checkpoint.mtp_format import MIMO
from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.forward.model_runner import load_model
from common.engine.models.causal_lm import CausalLM
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

TOLERANCE = 1e-4
EXPLORE = "TANDEM_EXPLORE" in os.environ
PROMPTS = (37, 21, 1)
# Of the prompt, into pages and chunks. Which page and chunk sizes meet is a matter of the attention, not of a family.
DIVISIONS = [*product((1, 16, 64), (1, 7, None))] if EXPLORE else [(1, 7), (16, 1), (64, None)]
SEQUENCES = [
    torch.randint(families.VOCAB, (n + 6,), generator=torch.Generator().manual_seed(n)) for n in PROMPTS
]


@pytest.fixture(scope="module", params=families.FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalLM, list[torch.Tensor], Path]:
    """Return (our model, logits of transformers for SEQUENCES, the directory)."""
    model = families.build(request.param)
    path = families.save(model, tmp_path_factory.mktemp("model"))
    return load_model(path)[0], [families.reference_logits(model, ids) for ids in SEQUENCES], path


@pytest.mark.parametrize(("page_size", "chunk"), DIVISIONS)
def test_prompt_in_chunks_then_decode(
    family: tuple[CausalLM, list[torch.Tensor], Path], page_size: int, chunk: int | None
) -> None:
    model, expected, _ = family
    actual = Driver(model, SEQUENCES, page_size, seed=page_size).run_all(chunk, PROMPTS)
    for ours, theirs in zip(actual, expected, strict=True):
        assert theirs.std() > 0.5  # the logits are not trivial
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_every_family_has_a_model_here() -> None:
    """Models that are published with other parts have a second name (test_family_options.py).

    transformers has no MiMo, see test_mtp_published.py.
    """
    text = {name for name in CONFIG_FAMILIES if not name.endswith("ForConditionalGeneration")}
    assert {f"{name}ForCausalLM" for name, _ in families.FAMILIES.values()} | {MIMO} == text


def test_long_prompt_over_query_blocks_and_long_decode(tmp_path: Path) -> None:
    """1,100 tokens, a window of 300 keys and a cached prefix exceed the block and bucket limits of the CPU path."""
    model = families.build("mistral-window", sliding_window=300, max_position_embeddings=2048)
    ids = torch.randint(families.VOCAB, (1100,), generator=torch.Generator().manual_seed(1))
    ours = load_model(families.save(model, tmp_path))[0]
    actual = Driver(ours, [ids], 16).run_all(700, [1090])[0]
    torch.testing.assert_close(actual, families.reference_logits(model, ids), atol=TOLERANCE, rtol=0)


def test_hidden_states_and_aux_layers_equal_transformers(tmp_path: Path) -> None:
    model = families.build("llama")
    path = families.save(model, tmp_path)
    with torch.no_grad():
        theirs = model(SEQUENCES[0][None], output_hidden_states=True).hidden_states
        stream_after_last = []
        handle = model.model.norm.register_forward_pre_hook(
            lambda _m, args: stream_after_last.append(args[0])
        )
        model(SEQUENCES[0][None])
        handle.remove()
    count = len(SEQUENCES[0])

    plain = Driver(load_model(path)[0], SEQUENCES, 16)
    full = plain.run([0], [count], hidden_mode=CaptureHiddenMode.FULL).hidden
    assert full is not None
    torch.testing.assert_close(full, theirs[-1][0], atol=TOLERANCE, rtol=0)

    boundaries = (0, 1, 2)  # entering layer 0, entering layer 1, after the last of two
    aux_driver = Driver(load_model(path, aux_layers=boundaries)[0], SEQUENCES, 16)
    aux = aux_driver.run([0], [count], hidden_mode=CaptureHiddenMode.FULL).hidden
    assert aux is not None
    expected = torch.cat([theirs[0][0], theirs[1][0], stream_after_last[0][0]], dim=-1)
    torch.testing.assert_close(aux, expected, atol=TOLERANCE, rtol=0)


def test_last_hidden_is_the_last_row_of_each_request(tmp_path: Path) -> None:
    model = load_model(families.save(families.build("qwen2"), tmp_path))[0]
    full = Driver(model, SEQUENCES, 16).run([0, 1], [9, 4], hidden_mode=CaptureHiddenMode.FULL).hidden
    last = Driver(model, SEQUENCES, 16).run([0, 1], [9, 4], hidden_mode=CaptureHiddenMode.LAST).hidden
    assert full is not None
    assert last is not None
    assert last.shape == (2, families.BASE["hidden_size"])
    torch.testing.assert_close(last, full[[8, 12]], atol=0, rtol=0)
    assert Driver(model, SEQUENCES, 16).run([0], [3]).hidden is None


def test_no_logits_wanted_and_embeddings_from_outside(tmp_path: Path) -> None:
    model = load_model(families.save(families.build("llama"), tmp_path))[0]
    driver = Driver(model, SEQUENCES, 16)
    batch = driver.batch([0], [8])
    expected = driver.runner(batch).logits
    embeds = model.embed(batch.input_ids)
    batch.input_ids = torch.zeros_like(batch.input_ids)
    torch.testing.assert_close(driver.runner(batch, embeds).logits, expected, atol=0, rtol=0)
    batch.logits_rows = torch.empty(0, dtype=torch.int64)
    assert driver.runner(batch).logits.shape == (0, families.VOCAB)


def test_a_request_is_computed_the_same_in_any_company(tmp_path: Path) -> None:
    """Attention depends only on the request; the size of the matrix products may affect the last bits."""
    model = load_model(families.save(families.build("llama"), tmp_path))[0]
    together = Driver(model, SEQUENCES, 16, seed=1).run_all(7, PROMPTS)
    for index, ids in enumerate(SEQUENCES):
        alone = Driver(model, [ids], 16, seed=2).run_all(7, [PROMPTS[index]])[0]
        torch.testing.assert_close(alone, together[index], atol=2e-5, rtol=0)


def test_decode_and_extend_of_one_token_agree(tmp_path: Path) -> None:
    model = load_model(families.save(families.build("mistral-window"), tmp_path))[0]
    outputs = []
    for mode in ForwardMode:
        driver = Driver(model, SEQUENCES, 16)
        driver.run([0, 1], [30, 20])
        outputs.append(driver.run([0, 1], [1, 1], mode).logits)
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-5, rtol=0)


def test_aux_layers_must_be_boundaries_of_the_model(tmp_path: Path) -> None:
    path = families.save(families.build("llama"), tmp_path)
    for wrong in ((3,), (-1,), (1, 0), (1, 1)):
        with pytest.raises(ValueError, match="aux layers"):
            load_model(path, aux_layers=wrong)
