"""Options of vLLM and SGLang are answered with the corresponding key, or with the information that there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.config import load_cluster
from common.config.cluster_schema import cluster_schema
from common.config.foreign import FOREIGN, foreign_answer
from common.config.keys import cluster_keys, option_answer
from common.errors import ConfigError

KEYS = set(cluster_keys(cluster_schema()).values())
SECTIONS = {key.partition(".")[0] for key in KEYS}
NAMED = re.compile(rf"\b(?:{'|'.join(sorted(SECTIONS))})\.[a-z_.]*[a-z_]\b")
WANTED = {
    "gpu_memory_utilization": "decode.memory_fraction",
    "mem_fraction_static": "prefill.memory_fraction",
    "max_num_seqs": "decode.max_running",
    "kv_cache_dtype": "kv.dtype: fp8",
    "api_key": "deploy/api_key ID FILE",
    "tool_call_parser": "in the format of the model's family; leave it out",
    "trust_remote_code": "never run",
    "block_size": "kv.page_size",
    "chunked_prefill_size": "prefill.chunk_tokens",
    "tp": "tensor_parallel: N",
    "kv_transfer_config": "transfer.transport",
    "speculative_config": "speculation.algorithm",
}


@pytest.mark.parametrize("option", WANTED)
@pytest.mark.parametrize("where", ["{}=1", "model.{}=1", "decode.{}=1"])
def test_an_option_is_answered_wherever_it_stands(tmp_path: Path, option: str, where: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError) as refused:
        load_cluster(file, [where.format(option)], {})
    assert "option of other servers" in str(refused.value)
    assert WANTED[option] in str(refused.value)


def test_options_are_recognised_in_command_line_form() -> None:
    assert foreign_answer("--gpu-memory-utilization") == foreign_answer("gpu_memory_utilization")


def test_every_key_in_an_answer_exists() -> None:
    sections = {key.rpartition(".")[0] for key in KEYS}
    named = {(key, each.names[0]) for each in FOREIGN for key in NAMED.findall(each.answer)}
    assert len(named) > 40
    assert {pair for pair in named if pair[0] not in KEYS | sections} == set()


def test_no_option_is_answered_twice_or_hides_a_key() -> None:
    names = [name for each in FOREIGN for name in each.names]
    assert len(set(names)) == len(names)
    assert not set(names) & {key.rpartition(".")[2] for key in KEYS}


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--gpu-memory-utilization=0.9", "write prefill.memory_fraction and decode.memory_fraction"),
        ("--tp", "write `tensor_parallel: N` in the entry of each node"),
        ("--max-model-len", "set it with --set model.max_model_len=VALUE"),
        ("--max-model-len=4096", "set it with --set model.max_model_len=4096"),
        ("--graphs", "--set prefill.graphs=VALUE or --set decode.graphs=VALUE"),
    ],
)
def test_options_of_a_command_are_answered_with_keys(option: str, answer: str) -> None:
    said = option_answer(cluster_schema(), option)
    assert said is not None
    assert answer in said


@pytest.mark.parametrize("option", ["--detach", "--set", "-h", "model", "--bicycle", "--", ""])
def test_other_arguments_are_passed_to_the_command(option: str) -> None:
    assert option_answer(cluster_schema(), option) is None
