"""Values that would have no effect next to the others are refused, unless they equal the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from common.config import Resolved, load_cluster
from common.errors import ConfigError

GPUS = ("prefill.nodes=[{name: p, device: cuda}]", "decode.nodes=[{name: d, device: cuda}]")
OFF = ("prefill.graphs=none", "decode.graphs=none")
REMOTE = "prefill.nodes=[{name: p, peer_address: 'tcp://10.0.0.1:7110'}]"

TURNS = ("router.placement.prefill=round_robin", "router.placement.decode=round_robin")


def load(
    tmp_path: Path, text: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Resolved:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: {path: m}\n" + text)
    return load_cluster(file, overrides, environ or {})


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("speculation.steps=5", "speculation.algorithm is none, which drafts nothing; name an algorithm"),
        ("speculation.topk=2", "speculation.algorithm is none"),
        ("speculation.draft_tokens=4", "speculation.algorithm is none"),
        ("speculation.adaptive=auto", "speculation.algorithm is none"),
        ("speculation.draft_quantization=fp8", "without speculation.draft_model_path there is no draft"),
        (
            "router.images.fetch_timeout=5",
            "without router.images.fetch_hosts no image is fetched; name hosts",
        ),
        ("prefill.memory_fraction=0.5", "these nodes are on the CPU; write prefill.pool_tokens"),
        ("decode.memory_fraction=0.5", "these nodes are on the CPU; write decode.pool_tokens"),
        (
            "transfer.nixl_devices=eth0",
            "this cluster's transport is shm; it is for another transport: leave it out",
        ),
        (
            "transfer.max_inflight_mib=8",
            "this cluster's transport is shm; it is for another transport: leave it out",
        ),
        ("process.poison_graphs=true", "no node has graphs; see prefill.graphs and decode.graphs"),
        ("decode.nodes=[{name: d, bulk_port: 7}]", "transport is shm, for which decode nodes bind no socket"),
        ("model.hidden_states_mib=8", "model.return_hidden_states is false, so no answer has hidden states"),
    ],
)
def test_values_that_nothing_reads_are_refused(tmp_path: Path, override: str, reason: str) -> None:
    """No option is parsed and then ignored."""
    with pytest.raises(ConfigError, match=rf"would have no effect: .*{reason}.* \(from --set\)") as caught:
        load(tmp_path, "", [override])
    assert caught.value.path.startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ((*GPUS, "decode.memory_fraction=0.5", "decode.pool_tokens=64"), "decode.memory_fraction"),
        ((*GPUS, "process.threads=4"), "process.threads"),
        ((*GPUS, *OFF, "process.poison_graphs=true"), "process.poison_graphs"),
        ((*GPUS, "transfer.max_inflight_mib=8"), "transfer.max_inflight_mib"),
        (("prefill.prefix_cache=false", "prefill.host_mib=64"), "prefill.host_mib"),
        (("decode.prefix_cache=false", "decode.host_mib=64"), "decode.host_mib"),
        (("prefill.prefix_cache=false", "prefill.state_snapshots=9"), "prefill.state_snapshots"),
        (
            ("speculation.algorithm=ngram", "speculation.draft_quantization=fp8"),
            "speculation.draft_quantization",
        ),
        (("transfer.transport=tcp", "transfer.nixl_devices=eth0"), "transfer.nixl_devices"),
        ((*TURNS, "router.placement.session_ms=9"), "router.placement.session_ms"),
        ((*TURNS, "router.placement.block_tokens=32"), "router.placement.block_tokens"),
        ((REMOTE, "transfer.nixl_devices=eth0"), "transfer.nixl_devices"),
        (("transfer.transport=shm", "decode.nodes=[{name: d, host: 10.0.0.1}]"), "decode.nodes[0].host"),
    ],
)
def test_what_another_value_leaves_unread_is_refused(
    tmp_path: Path, overrides: Sequence[str], path: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "", overrides)
    assert caught.value.path == path
    assert "would have no effect" in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("speculation.algorithm=ngram", "speculation.steps=5"),
        ("router.images.fetch_hosts=[a.example]", "router.images.fetch_timeout=5"),
        (*GPUS, "decode.memory_fraction=0.5", "prefill.memory_fraction=0.4"),
        ("router.placement.prefill=cache_aware", "router.placement.block_tokens=32"),
        ("process.threads=4",),
        ("process.poison_graphs=true", "prefill.enforce_graphs=true"),
        ("process.poison_graphs=true", "decode.graphs=full"),
        (*GPUS, "process.poison_graphs=true", "prefill.graphs=none"),
        ("transfer.transport=tcp", "transfer.max_inflight_mib=8", "decode.nodes=[{name: d, bulk_port: 7}]"),
        (REMOTE, "decode.nodes=[{name: d, host: 10.0.0.1, bulk_port: 7}]"),
        ("transfer.transport=nixl", "transfer.nixl_devices=eth0", "transfer.max_inflight_mib=8"),
        ("security.isolated_network=true",),
        ("model.return_hidden_states=true", "model.hidden_states_mib=8"),
        ("speculation.steps=3", "transfer.nixl_devices=lo", "process.threads=1"),
        ("decode.nodes=[{name: d, host: localhost}]",),
    ],
)
def test_values_that_are_read_or_equal_the_default_are_accepted(
    tmp_path: Path, overrides: Sequence[str]
) -> None:
    load(tmp_path, "", overrides)


def test_the_refusal_names_the_origin_of_the_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 would .* \(from file:cluster.yaml\)"):
        load(tmp_path, "speculation: {steps: 5}\n")
    with pytest.raises(ConfigError, match=r"7 would .* \(from env:TANDEM_SPECULATION_STEPS\)"):
        load(tmp_path, "", environ={"TANDEM_SPECULATION_STEPS": "7"})
