"""The cluster file: precedence, origins, errors with path and suggestion, the example, the shipped files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Cluster, Resolved, load_cluster
from common.config.cluster_schema import cluster_schema
from common.config.keys import schema_paths
from common.config.schema import (
    DecodeNodeEntry,
    DecodeSection,
    Health,
    Model,
    PrefillNodeEntry,
    PrefillSection,
    Security,
)
from common.config.transport_choice import choose_transport
from common.config.yaml_file import parse_mapping, parse_scalar
from common.errors import ConfigError

CLUSTERS = Path(__file__).parents[3] / "deploy" / "clusters"
MINIMAL = "model: {path: m}\n"
CLUSTER = cluster_schema()  # with the keys of all transports
TRANSFER = type(CLUSTER(model=Model(path="m")).transfer)
KEYS = sorted(path for _, path in schema_paths(CLUSTER))


def load(
    tmp_path: Path,
    text: str = MINIMAL,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return load_cluster(file, overrides, environ or {})


def refusal(
    tmp_path: Path,
    text: str = MINIMAL,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, overrides, environ)
    return caught.value


# -- values and their origins ----------------------------------------------------------------------------------


def test_only_the_model_is_required(tmp_path: Path) -> None:
    assert load(tmp_path).cluster == CLUSTER(model=Model(path="m"))
    assert "model" in str(refusal(tmp_path, "router: {port: 1}\n"))
    assert "path" in str(refusal(tmp_path, "model: {}\n"))


def test_values_have_their_precedence_and_origin(tmp_path: Path) -> None:
    text = "model: {path: m}\nrouter: {port: 1, host: 127.0.0.2, max_attempts: 2}\n"
    environ = {"TANDEM_ROUTER_PORT": "2", "TANDEM_ROUTER_MAX_ATTEMPTS": "4", "PATH": "/bin"}
    resolved = load(tmp_path, text, ["router.port=3"], environ)
    assert resolved.cluster.router.port == 3
    assert resolved.cluster.router.max_attempts == 4
    rows = {path: (value, origin) for path, value, origin in resolved.rows()}
    assert rows["router.port"] == (3, "--set")
    assert rows["router.max_attempts"] == (4, "env:TANDEM_ROUTER_MAX_ATTEMPTS")
    assert rows["router.host"] == ("127.0.0.2", "file:cluster.yaml")
    assert rows["kv.page_size"] == (16, "default")
    assert rows["model.path"] == ("m", "file:cluster.yaml")


def test_rows_hold_every_key_in_the_order_of_the_schema(tmp_path: Path) -> None:
    paths = [re.sub(r"nodes\[.*", "nodes", path) for path, _, _ in load(tmp_path).rows()]
    assert list(dict.fromkeys(paths)) == [path for _, path in schema_paths(CLUSTER)]


def test_the_environment_is_read_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_KV_PAGE_SIZE", "64")
    (tmp_path / "c.yaml").write_text(MINIMAL)
    assert load_cluster(tmp_path / "c.yaml").cluster.kv.page_size == 64


def test_every_key_has_its_own_environment_name() -> None:
    names = [name for name, _ in schema_paths(CLUSTER)]
    assert len(set(names)) == len(names)
    assert "router_placement_prefill" in names


@pytest.mark.parametrize(
    "name", ["TANDEM_TORCH", "TANDEM_PYTHON", "TANDEM_ROUTER_SERVICE_HOST", "ROUTER_PORT"]
)
def test_other_variables_are_ignored(tmp_path: Path, name: str) -> None:
    """deploy/setup has variables of its own, and Kubernetes sets NAME_SERVICE_HOST for each service."""
    assert load(tmp_path, environ={name: "x"}).cluster == CLUSTER(model=Model(path="m"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TANDEM_ROUTER_PROT", "did you mean TANDEM_ROUTER_PORT?"),
        ("TANDEM_PORT", "did you mean TANDEM_ROUTER_PORT?"),
        ("TANDEM_KV_ZZZ", "known are TANDEM_KV_PAGE_SIZE"),
        ("TANDEM_SPECULATON_STEPS", "did you mean TANDEM_SPECULATION_STEPS?"),
        ("TANDEM_MODEL_LOAD_FORMAT", "option of other servers"),
    ],
)
def test_a_mistyped_variable_is_refused(tmp_path: Path, name: str, said: str) -> None:
    error = refusal(tmp_path, environ={name: "8"})
    assert error.path == name
    assert said in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TANDEM_PORT", "tcp://10.0.0.1:8000"),
        ("TANDEM_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("TANDEM_ROUTER_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("TANDEM_ROUTER_SERVICE_PORT_HTTP", "8000"),
        ("TANDEM_BICYCLE", "red"),
    ],
)
def test_variables_of_kubernetes_and_of_other_programs_are_ignored(
    tmp_path: Path, name: str, value: str
) -> None:
    assert load(tmp_path, environ={name: value}).origins == {"model.path": "file:cluster.yaml"}


def test_the_last_set_wins(tmp_path: Path) -> None:
    assert load(tmp_path, overrides=["router.port=1", "router.port=2"]).cluster.router.port == 2


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.served_name=a=b", "a=b"),
        ("model.served_name=[unclosed", "[unclosed"),
        ('model.served_name="7"', "7"),
        ("model.served_name=", None),
        ("model.served_name=null", None),
    ],
)
def test_set_reads_values_as_yaml_does(tmp_path: Path, override: str, value: str | None) -> None:
    assert load(tmp_path, overrides=[override]).cluster.model.served_name == value


@pytest.mark.parametrize("over", ["set", "env"])
def test_a_list_of_nodes_from_outside_the_file(tmp_path: Path, over: str) -> None:
    text = MINIMAL + "prefill: {nodes: [{name: a}, {name: b}]}\n"
    nodes = "[{name: x, device: cpu}]"
    resolved = (
        load(tmp_path, text, [f"prefill.nodes={nodes}"])
        if over == "set"
        else load(tmp_path, text, environ={"TANDEM_PREFILL_NODES": nodes})
    )
    assert [node.name for node in resolved.cluster.prefill.nodes] == ["x"]
    rows = {path: origin for path, _, origin in resolved.rows()}
    assert rows["prefill.nodes[0].name"] == {"set": "--set", "env": "env:TANDEM_PREFILL_NODES"}[over]
    assert rows["prefill.nodes[0].peer_address"] == "default"
    assert "prefill.nodes[1].name" not in rows


def test_relative_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert load(tmp_path, "model: {path: ../models/m}\n").model_path == (tmp_path / "../models/m").resolve()
    assert load(tmp_path, "model: {path: /models/m}\n").model_path == Path("/models/m")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load(tmp_path, "model: {path: ~/m}\n").model_path == Path("/home/somebody/m")
    assert load(tmp_path, MINIMAL).keys_path is None
    assert load(tmp_path, MINIMAL + "security: {keys: k}\n").keys_path == tmp_path.resolve() / "k"


def test_nodes_by_name(tmp_path: Path) -> None:
    cluster = load(tmp_path).cluster
    assert cluster.prefill_node("prefill-0") == PrefillNodeEntry(name="prefill-0")
    assert cluster.decode_node("decode-0") == DecodeNodeEntry(name="decode-0")
    with pytest.raises(ConfigError, match="no node is called 'decode-1'; the file has: decode-0"):
        cluster.decode_node("decode-1")


# -- refused values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "suggestion"),
    [
        ("ruoter: {port: 1}\n", "ruoter", "'router'"),
        ("router: {prot: 1}\n", "router.prot", "'router.port'"),
        (
            "router: {placement: {prefil: round_robin}}\n",
            "router.placement.prefil",
            "'router.placement.prefill'",
        ),
        ("prefill: {nodes: [{name: a}, {nmae: b}]}\n", "prefill.nodes[1].nmae", "'prefill.nodes[1].name'"),
        (
            "decode: {nodes: [{name: a, bulk_prot: 1}]}\n",
            "decode.nodes[0].bulk_prot",
            "'decode.nodes[0].bulk_port'",
        ),
        ("kv: {zzz: 1}\n", "kv.zzz", "known here: kv.page_size"),
    ],
)
def test_unknown_keys(tmp_path: Path, text: str, path: str, suggestion: str) -> None:
    error = refusal(tmp_path, MINIMAL + text)
    assert error.path == path
    assert "unknown key" in str(error)
    assert suggestion in str(error)


@pytest.mark.parametrize("section", [path for path in KEYS if "." in path])
def test_a_misspelt_key_finds_its_neighbour(tmp_path: Path, section: str) -> None:
    """This holds at every place of the schema."""
    *parents, last = section.split(".")
    data: dict[str, Any] = {last + "x": 1}
    for parent in reversed(parents):
        data = {parent: data}
    error = refusal(tmp_path, yaml.safe_dump(data))
    assert error.path == section + "x"
    assert f"did you mean {section!r}?" in str(error)


def test_unknown_keys_in_a_list_from_outside(tmp_path: Path) -> None:
    error = refusal(tmp_path, overrides=["decode.nodes=[{name: a, hosst: x}]"])
    assert error.path == "decode.nodes[0].hosst"
    assert "'decode.nodes[0].host'" in str(error)


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("router.prot=1", "router.prot", "'router.port'"),
        ("router.port", "router.port", "the value is missing; write --set router.port=VALUE"),
        ("port=8115", "port", "unknown key; write router.port=8115"),
        ("graphs=none", "graphs", "write prefill.graphs=none or decode.graphs=none"),
        ("rowter.port=1", "rowter.port", "write router.port=1"),
        ("router=1", "router", "it is a section; set one of its keys: router.host, router.port"),
        ("router.zzz=1", "router.zzz", "router.request_timeout"),
        ("health.zzz=1", "health.zzz", "known here: health.heartbeat_interval"),
        ("decode.max_batch=8", "decode.max_batch", "only prefill.max_batch exists; known here: decode.nodes"),
        (
            "prefill.tensor_parallel=2",
            "prefill.tensor_parallel",
            "a key of each node, as in prefill.nodes=[{name: prefill-0, tensor_parallel: 2}]",
        ),
        (
            "bulk_port=7",
            "bulk_port",
            "a key of each node, as in decode.nodes=[{name: decode-0, bulk_port: 7}]",
        ),
        ("zzz=1", "zzz", "the sections are model, kv, router"),
        ("", "", "KEY=VALUE"),
        ("=1", "", "KEY=VALUE"),
    ],
)
def test_bad_overrides_are_refused_by_name(tmp_path: Path, override: str, path: str, words: str) -> None:
    error = refusal(tmp_path, overrides=[override])
    assert error.path == path
    assert words in str(error)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("model: {path: 1}\n", "model.path"),
        (MINIMAL + "router: {port: http}\n", "router.port"),
        (MINIMAL + "router: {port: true}\n", "router.port"),
        (MINIMAL + "router: {port: 80.5}\n", "router.port"),
        (MINIMAL + "router: {port: 65536}\n", "router.port"),
        (MINIMAL + "router: {port: -1}\n", "router.port"),
        (MINIMAL + "router: 7\n", "router"),
        (MINIMAL + "router: [1]\n", "router"),
        (MINIMAL + "router: {placement: {decode: random}}\n", "router.placement.decode"),
        (MINIMAL + "router: {request_timeout: 0}\n", "router.request_timeout"),
        (MINIMAL + "router: {request_timeout: .inf}\n", "router.request_timeout"),
        (MINIMAL + "router: {request_timeout: .nan}\n", "router.request_timeout"),
        (MINIMAL + "router: {max_attempts: 0}\n", "router.max_attempts"),
        (MINIMAL + "router: {first_token_hold_ms: -1}\n", "router.first_token_hold_ms"),
        (MINIMAL + "router: {first_token_hold_ms: 200.5}\n", "router.first_token_hold_ms"),
        (MINIMAL + "kv: {page_size: 0}\n", "kv.page_size"),
        (MINIMAL + "kv: {page_size: 2048}\n", "kv.page_size"),
        (MINIMAL + "prefill: {nodes: []}\n", "prefill.nodes"),
        (MINIMAL + "prefill: {nodes: {name: a}}\n", "prefill.nodes"),
        (MINIMAL + "prefill: {nodes: [a]}\n", "prefill.nodes[0]"),
        (MINIMAL + "decode: {nodes: [{name: a}, {device: cpu}]}\n", "decode.nodes[1]"),
        (MINIMAL + "decode: {nodes: [{name: 7}]}\n", "decode.nodes[0].name"),
        (MINIMAL + "decode: {backup_mib: -1}\n", "decode.backup_mib"),
        (MINIMAL + "prefill: {chunk_tokens: 100000000}\n", "prefill.chunk_tokens"),
        (MINIMAL + "process: {log_level: loud}\n", "process.log_level"),
        ("model: {path: m, dtype: int8}\n", "model.dtype"),
        ("model: {path: m, max_model_len: 1}\n", "model.max_model_len"),
        ("model: {path: m, served_name: ''}\n", "model.served_name"),
    ],
)
def test_wrong_values_name_their_key(tmp_path: Path, text: str, path: str) -> None:
    error = refusal(tmp_path, text)
    assert error.path == path
    assert str(error).startswith(path + ": ")
    assert "$" not in str(error)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "prefill.graphs=full",
            "Invalid enum value 'full'; write auto, breakable, piecewise, none (from --set)",
        ),
        ("prefill.compiler=triton", "write eager, inductor (from"),
        ("decode.pool_tokens=lots", "write auto, a number (from"),
        (
            "router.placement.decode=random",
            "write round_robin, least_loaded, power_of_two, cache_aware, cache_events (from",
        ),
        ("model.dtype=int8", "write auto, float32, bfloat16, float16 (from"),
        ("transfer.transport=rdma", "write auto, shm, tcp, cuda_ipc, nixl (from"),
    ],
)
def test_an_unknown_word_is_answered_with_the_known_ones(tmp_path: Path, override: str, words: str) -> None:
    assert words in str(refusal(tmp_path, overrides=[override]))


@pytest.mark.parametrize("device", ["tpu", "CPU", "cpu:0", "'cuda:'", "cuda:x", "cuda 0", "meta", "''"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_device_is_refused_by_its_form(tmp_path: Path, role: str, device: str) -> None:
    """It is refused before any process imports torch, whose error names neither key nor node."""
    error = refusal(tmp_path, overrides=[f"{role}.nodes=[{{name: x}}, {{name: y, device: {device}}}]"])
    assert error.path == f"{role}.nodes[1].device"
    assert "write cpu, cuda or cuda:N" in str(error)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:12"])
def test_known_devices(tmp_path: Path, device: str) -> None:
    load(tmp_path, overrides=[f"decode.nodes=[{{name: x, device: {device}}}]"])


@pytest.mark.parametrize(
    ("entry", "devices"),
    [
        ("{name: x}", ("cpu",)),
        ("{name: x, tensor_parallel: 2}", ("cpu", "cpu")),
        ("{name: x, device: cuda}", ("cuda",)),
        ("{name: x, device: cuda, tensor_parallel: 2}", ("cuda:0", "cuda:1")),
        ("{name: x, device: cuda:4, tensor_parallel: 4}", ("cuda:4", "cuda:5", "cuda:6", "cuda:7")),
        ("{name: x, devices: [cuda:3]}", ("cuda:3",)),
        ("{name: x, devices: [cuda:2, cuda:0], tensor_parallel: 2}", ("cuda:2", "cuda:0")),
        ("{name: x, devices: [cuda:0, cuda:0]}", ("cuda:0", "cuda:0")),
        ("{name: x, devices: [cpu, cpu]}", ("cpu", "cpu")),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_devices_of_ranks(tmp_path: Path, role: str, entry: str, devices: tuple[str, ...]) -> None:
    cluster = load(tmp_path, overrides=[f"{role}.nodes=[{entry}]"]).cluster
    (node,) = cluster.prefill.nodes if role == "prefill" else cluster.decode.nodes
    assert node.rank_devices == devices
    assert node.on_gpu == (devices[0] != "cpu")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("entry", "others", "key", "words"),
    [
        ("tensor_parallel: 3", [], "tensor_parallel", "Invalid enum value 3; write 1, 2, 4, 8"),
        ("devices: [cuda:0, gpu]", [], "devices[1]", "'gpu' is not a device; write cpu, cuda or cuda:N"),
        (
            "devices: [cuda:0, cuda:1, cuda:2]",
            [],
            "devices",
            "3 ranks cannot divide a model; name 1, 2, 4, 8 devices",
        ),
        ("devices: [cuda:0, cpu]", [], "devices", "are all on cpu or all on cuda devices"),
        (
            "device: cuda:0, devices: [cuda:0, cuda:1]",
            [],
            "device",
            "devices already names the device of every rank; leave out one of the two",
        ),
        (
            "tensor_parallel: 4, devices: [cuda:0, cuda:1]",
            [],
            "tensor_parallel",
            "4 ranks contradict the 2 names in devices; leave out one of the two",
        ),
        (
            "expert_parallel: true",
            [],
            "expert_parallel",
            "the only rank of a node has all experts; set tensor_parallel or devices too, or leave it out",
        ),
    ],
)
def test_ranks_that_cannot_be_served_are_refused(
    tmp_path: Path, role: str, entry: str, others: list[str], key: str, words: str
) -> None:
    error = refusal(tmp_path, overrides=[f"{role}.nodes=[{{name: w}}, {{name: x, {entry}}}]", *others])
    assert words in str(error)
    assert error.path in (f"{role}.nodes[1].{key}", f"{role}.nodes[].{key}")


def test_ranks_on_gpus_and_nodes_on_cpus_are_refused(tmp_path: Path) -> None:
    cluster = load(tmp_path, overrides=["decode.nodes=[{name: x, devices: [cuda:0, cuda:1]}]"]).cluster
    with pytest.raises(
        ConfigError, match="x is on cuda:0 and prefill-0 on cpu: pages cannot be sent between"
    ):
        choose_transport(cluster)


ADDRESSES = {
    "router.control_address": "router.control_address=",
    "prefill.nodes[0].peer_address": "prefill.nodes=[{name: p, peer_address: '",
}


@pytest.mark.parametrize(
    "address",
    ["foo", "127.0.0.1:7000", "tcp://127.0.0.1", "tcp://127.0.0.1:-1", "tcp://h:70000", "udp://h:1"],
)
@pytest.mark.parametrize("path", ADDRESSES)
def test_an_address_is_refused_by_its_form(tmp_path: Path, path: str, address: str) -> None:
    """An address without a scheme is an error of its own, not one about keys."""
    start = ADDRESSES[path]
    error = refusal(tmp_path, overrides=[start + address + "'}]" * start.endswith("'")])
    assert error.path == path
    assert "write auto, ipc://PATH or tcp://HOST:PORT" in str(error)


@pytest.mark.parametrize("path", ADDRESSES)
def test_an_ipv6_address_without_brackets_is_refused_with_the_remedy(tmp_path: Path, path: str) -> None:
    start = ADDRESSES[path]
    error = refusal(tmp_path, overrides=[start + "tcp://fd00::7:7000" + "'}]" * start.endswith("'")])
    assert error.path == path
    assert "an IPv6 address in brackets" in str(error)


@pytest.mark.parametrize(
    "address", ["auto", "ipc:///run/p q.sock", "tcp://10.0.0.1:7000", "tcp://[::1]:7000"]
)
@pytest.mark.parametrize("path", ADDRESSES)
def test_known_addresses(tmp_path: Path, path: str, address: str) -> None:
    start = ADDRESSES[path]
    load(tmp_path, overrides=[start + address + "'}]" * start.endswith("'")])


@pytest.mark.parametrize(
    ("path", "override"),
    [("router.host", "router.host='{}'"), ("decode.nodes[0].host", "decode.nodes=[{{name: d, host: '{}'}}]")],
)
def test_a_host_without_a_port_is_written_without_brackets(tmp_path: Path, path: str, override: str) -> None:
    """With brackets it would look like a name, and the process would end when it binds."""
    error = refusal(tmp_path, overrides=[override.format("[::1]"), "transfer.transport=tcp"])
    assert error.path == path
    assert "write it without brackets, as ::1" in str(error)
    load(tmp_path, overrides=[override.format("::1"), "transfer.transport=tcp"])


def test_port_0_takes_a_free_port_where_others_are_told_which(tmp_path: Path) -> None:
    """Decode nodes learn the bound address; a node that connects to a router's port 0 would wait for ever."""
    load(tmp_path, overrides=[ADDRESSES["prefill.nodes[0].peer_address"] + "tcp://127.0.0.1:0'}]"])
    error = refusal(tmp_path, overrides=["router.control_address=tcp://127.0.0.1:0"])
    assert error.path == "router.control_address"


def test_a_wrong_value_names_the_variable_that_it_came_from(tmp_path: Path) -> None:
    """Nobody finds a forgotten variable by reading the file, and Kubernetes sets such variables by itself."""
    error = refusal(tmp_path, environ={"TANDEM_ROUTER_PORT": "tcp://10.0.0.1:8000"})
    assert error.path == "router.port"
    assert "env:TANDEM_ROUTER_PORT" in str(error)
    assert "--set" in str(refusal(tmp_path, overrides=["kv.page_size=x"]))


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        (["decode.pool_tokens=2048"], "decode.pool_tokens", "2048 tokens in pages of 16 hold no request"),
        (["prefill.pool_tokens=4000"], "prefill.pool_tokens", "write at least 4096"),
        (["decode.pool_tokens=4096", "kv.page_size=1000"], "decode.pool_tokens", "to at most 4000"),
        (
            ["model.max_model_len=40000"],
            "prefill.pool_tokens",
            "auto: 32768 tokens in pages of 16 hold no request",
        ),
    ],
)
def test_a_pool_that_holds_no_request_of_the_given_length_is_refused(
    tmp_path: Path, overrides: list[str], path: str, said: str
) -> None:
    error = refusal(tmp_path, overrides=["model.max_model_len=4096", *overrides])
    assert error.path == path
    assert said in str(error)


def test_a_length_that_is_not_configured_follows_the_pool(tmp_path: Path) -> None:
    load(tmp_path, overrides=["decode.pool_tokens=2048"])
    load(tmp_path, overrides=["decode.pool_tokens=4096", "model.max_model_len=4096"])
    on_gpu = ["prefill.nodes=[{name: p, device: cuda}]", "decode.nodes=[{name: d, device: cuda}]"]
    load(tmp_path, overrides=[*on_gpu, "model.max_model_len=1000000"])


def test_a_chat_template_is_relative_to_the_file(tmp_path: Path) -> None:
    assert load(tmp_path).chat_template_path is None
    found = load(tmp_path, "model: {path: m, chat_template: t.jinja}\n")
    assert found.chat_template_path == tmp_path.resolve() / "t.jinja"


def test_an_empty_section_is_refused_as_empty(tmp_path: Path) -> None:
    """This is what remains when all keys of a section are commented out."""
    error = refusal(tmp_path, MINIMAL + "router:\n  # port: 1\n")
    assert error.path == "router"
    assert "empty" in str(error)


def test_an_override_below_what_is_no_section(tmp_path: Path) -> None:
    error = refusal(tmp_path, MINIMAL + "router: 7\n", overrides=["router.port=1"])
    assert error.path == "router.port"


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("decode-0", True),
        ("a", True),
        ("0", True),
        ("a" * 63, True),
        ("a" * 64, False),
        ("", False),
        ("-a", False),
        ("A", False),
        ("a_b", False),
        ("a/b", False),
        ("../a", False),
        ("a\n", False),
        ("a b", False),
        ("é", False),
    ],
)
def test_node_names(tmp_path: Path, name: str, good: bool) -> None:
    """Names become names of files and sockets."""
    text = MINIMAL + yaml.safe_dump({"decode": {"nodes": [{"name": name}]}})
    if good:
        assert load(tmp_path, text).cluster.decode.nodes[0].name == name
    else:
        assert refusal(tmp_path, text).path == "decode.nodes[0].name"


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("prefill: {nodes: [{name: a}, {name: a}]}\n", "prefill.nodes[1].name", "prefill.nodes[0].name"),
        ("decode: {nodes: [{name: prefill-0}]}\n", "decode.nodes[0].name", "prefill.nodes[0].name"),
        ("decode: {nodes: [{name: router}]}\n", "decode.nodes[0].name", "router's"),
    ],
)
def test_names_are_unique_in_the_whole_cluster(tmp_path: Path, text: str, path: str, words: str) -> None:
    error = refusal(tmp_path, MINIMAL + text)
    assert error.path == path
    assert words in str(error)


@pytest.mark.parametrize("key", ["node_timeout", "router_timeout"])
def test_timeouts_leave_room_for_two_heartbeats(tmp_path: Path, key: str) -> None:
    """Otherwise every healthy node would be lost again and again."""
    error = refusal(tmp_path, MINIMAL + f"health: {{heartbeat_interval: 1, {key}: 1.9}}\n")
    assert error.path == f"health.{key}"
    assert "heartbeat_interval" in str(error)
    load(tmp_path, MINIMAL + f"health: {{heartbeat_interval: 1, {key}: 2}}\n")


def test_a_node_gives_up_its_router_before_the_router_gives_up_the_node(tmp_path: Path) -> None:
    """Otherwise a node that is cut off would go on with requests that run elsewhere by then."""
    error = refusal(tmp_path, MINIMAL + "health: {node_timeout: 1.5}\n")
    assert error.path == "health.router_timeout"
    assert "write at most 1.5" in str(error)
    load(tmp_path, MINIMAL + "health: {node_timeout: 1.5, router_timeout: 1.5}\n")


@pytest.mark.parametrize("timeout", ["0.05", "0.99"])
def test_idle_loops_do_not_count_as_hung(tmp_path: Path, timeout: str) -> None:
    """An idle main loop turns every 100 ms, and less often on a busy host."""
    error = refusal(tmp_path, MINIMAL + f"health: {{loop_timeout: {timeout}}}\n")
    assert error.path == "health.loop_timeout"


# -- YAML ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "line", "first"),
    [
        ("model: {path: m}\nrouter: {port: 1}\nmodel: {path: n}\n", "model", 3, 1),
        ("model:\n  path: m\nrouter:\n  port: 1\n  host: a\n  port: 2\n", "port", 6, 4),
        ("model: {path: m}\ndecode:\n  nodes:\n    - name: a\n      name: b\n", "name", 5, 4),
    ],
)
def test_duplicate_keys_name_both_lines(tmp_path: Path, text: str, key: str, line: int, first: int) -> None:
    error = refusal(tmp_path, text)
    assert error.path == key
    assert f"line {line}: the key appears twice (first on line {first})" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7\n",
        "- model\n",
        "model: {path: m\n",
        "model: !!python/object/apply:os.system ['true']\n",
        "model: !!python/name:os.system ''\n",
        "a: 1\n---\nb: 2\n",
        "model: {path: 2024-13-45}\n",
        "model: {path: !!timestamp soon}\n",
        "model: {path: !!bool maybe}\n",
        "model: {path: !!int x}\n",
        "model: {path: !!int ''}\n",
        "model: !!map [a]\n",
        "model: &a\n  path: m\nrouter:\n  <<: *a\n",
        "\tmodel: m\n",
        "model: \x00\n",
        pytest.param("model: " + "[" * 600 + "\n", id="nested"),
        pytest.param("model: {path: " + "1" * 5000 + "}\n", id="digits"),
    ],
)
def test_what_is_not_a_mapping_of_plain_values(tmp_path: Path, text: str) -> None:
    """It is refused with an error; the loader must not return anything else."""
    refusal(tmp_path, text)


def test_the_path_of_a_cluster_file_is_utf_8(tmp_path: Path) -> None:
    """Logs and the table of processes name it."""
    file = tmp_path / "clust\udce9r.yaml"
    file.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError, match=r"clust\\udce9r\.yaml' is not UTF-8; rename it"):
        load_cluster(file, environ={})


@pytest.mark.parametrize(
    "text", ["{1: 2}\n", "{[1]: 2}\n", "{null: 2}\n", "{2024-01-01: 2}\n", "{{a: 1}: 2}\n"]
)
def test_keys_are_names(tmp_path: Path, text: str) -> None:
    assert "keys are names" in str(refusal(tmp_path, text))


def test_a_structure_that_contains_itself(tmp_path: Path) -> None:
    refusal(tmp_path, "model: &m\n  path: *m\n")
    refusal(tmp_path, "model: {path: m}\nrouter: &r {placement: *r}\n")


def test_aliases_cannot_explode(tmp_path: Path) -> None:
    """If aliases were expanded, nine lines would give a billion values."""
    lines = ["a0: &a0 {x: 1}"] + [
        f"a{i}: &a{i} {{" + ", ".join(f"k{j}: *a{i - 1}" for j in range(9)) + "}" for i in range(1, 10)
    ]
    refusal(tmp_path, "\n".join(lines))
    refusal(tmp_path, "model: {path: {" + ", ".join(lines) + "}}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "model:\n  path: [x\nrouter: {",
            "line 3, column 7: expected ',' or ']', but got ':' (while parsing a flow sequence that begins on line 2)",
        ),
        (
            "model: {path: m}\n\trouter: {}",
            "line 2, column 1: found character '\\t' that cannot start any token",
        ),
        ("model: {path: 2024-13-45}", "month must be in 1..12"),
    ],
)
def test_what_is_not_yaml_is_named_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    error = refusal(tmp_path, text)
    assert f"is not YAML: {words}" in str(error)
    assert len(str(error).splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for file in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"cannot read {file}: ") + "[NI]"):
            load_cluster(file, environ={})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        load_cluster(tmp_path / "binary.yaml", environ={})
    (tmp_path / "large.yaml").write_bytes(b"# " + b"x" * (1 << 20))
    with pytest.raises(ConfigError, match="larger"):
        load_cluster(tmp_path / "large.yaml", environ={})


@given(st.text(max_size=200))
@settings(max_examples=200)
def test_any_text_is_a_mapping_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_mapping(text, "text"), dict)


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_any_text_is_a_value(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_scalar(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("off", "off"), ("no", "no"), ("Yes", "Yes"), ("on", "on"), ("7", 7)],
)
def test_yes_and_off_are_strings(text: str, value: object) -> None:
    """YAML 1.1 reads a node named `no` as false, and the error for `adaptive: off` mentioned booleans."""
    assert parse_scalar(text) == value
    assert parse_mapping(f"name: {text}", "text") == {"name": value}


def test_an_unknown_value_is_answered_with_the_allowed_ones(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: {{path: {tmp_path}}}\nspeculation: {{adaptive: off}}\n")
    with pytest.raises(ConfigError, match="adaptive.*off.*none.*auto|adaptive.*none.*auto"):
        load_cluster(path)


# -- shipped files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "begins", "ends"),
    [
        ("router: {control_address: VALUE}", "router.control_address: 'xxx", "that the others connect to"),
        ("prefill: {graphs: VALUE}", "prefill.graphs: Invalid enum value 'xxx", "breakable, piecewise, none"),
        ("router: {? VALUE : 1}", "router.xxx", "router.otlp_endpoint"),
    ],
)
def test_long_values_are_not_quoted_whole(tmp_path: Path, text: str, begins: str, ends: str) -> None:
    sentence = str(refusal(tmp_path, f"{MINIMAL}{text.replace('VALUE', 700_000 * 'x')}\n"))
    assert sentence.startswith(begins)
    assert sentence.endswith(ends)
    assert len(sentence) <= ConfigError.MAX_CHARACTERS


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_load(path: Path) -> None:
    resolved = load_cluster(path, environ={})
    kind = "hybrid" if "qwen3.5" in path.stem else path.stem.removeprefix("local-")
    model = f"tiny-{kind}" if kind in ("vision", "hybrid", "moe", "tools") else "tiny-target"
    assert resolved.model_path == (CLUSTERS / "../tiny_models" / model).resolve()
    counts = len(resolved.cluster.prefill.nodes), len(resolved.cluster.decode.nodes)
    assert counts == ((2, 2) if path.stem in ("2p2d", "movable") else (1, 1))
    gpus = path.stem.startswith("h200")
    transport = "tcp" if path.stem == "tcp" else "cuda_ipc" if gpus else "shm"
    assert choose_transport(resolved.cluster).name == transport
    # A copy of the file with another model serves that model under its own name.
    assert resolved.cluster.model.served_name is None


def test_the_default_cluster_speculates() -> None:
    default = load_cluster(CLUSTERS / "local.yaml", environ={}).cluster
    named = load_cluster(CLUSTERS / "local-eagle3.yaml", environ={}).cluster
    plain = load_cluster(CLUSTERS / "local-plain.yaml", environ={}).cluster
    assert default == named
    assert plain.speculation.algorithm == "none"


def test_the_example_holds_every_key_with_its_default() -> None:
    text = (CLUSTERS / "example.yaml").read_text()
    data = yaml.safe_load(text)
    default = CLUSTER(model=Model(path=data["model"]["path"]))
    assert data == msgspec.json.decode(msgspec.json.encode(default))
    assert load_cluster(CLUSTERS / "example.yaml", environ={}).cluster == CLUSTER(
        model=Model(path=data["model"]["path"])
    )


def test_the_example_explains_every_key() -> None:
    """Each key is explained on its own line or in the comment lines directly above it."""
    lines = (CLUSTERS / "example.yaml").read_text().splitlines()
    silent = [
        line
        for above, line in zip(["", *lines], lines)
        if re.match(r"[ -]*[a-z_]+:", line) and "#" not in line and not above.lstrip().startswith("#")
    ]
    assert not silent


def test_the_example_follows_the_order_of_the_schema() -> None:
    data = yaml.safe_load((CLUSTERS / "example.yaml").read_text())
    assert list(data) == [field.name for field in msgspec.structs.fields(CLUSTER)]
    for field in msgspec.structs.fields(CLUSTER):
        assert list(data[field.name]) == [inner.name for inner in msgspec.structs.fields(field.type)]


# -- the choice of the transport ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "host", "expected"),
    [
        ("auto", "127.0.0.1", "shm"),
        ("ipc:///run/x.sock", "localhost", "shm"),
        ("tcp://127.0.0.1:7110", "127.0.0.1", "shm"),
        ("tcp://localhost:7110", "::1", "shm"),
        ("tcp://[::1]:7110", "127.0.0.1", "shm"),
        ("tcp://10.127.0.0.1.example:7110", "127.0.0.1", "tcp"),
        ("tcp://10.0.0.1:7110", "127.0.0.1", "tcp"),
        ("auto", "10.0.0.1", "tcp"),
    ],
)
def test_auto_is_shm_while_all_nodes_are_here(peer: str, host: str, expected: str) -> None:
    cluster = Cluster(
        model=Model(path="m"),
        prefill=PrefillSection(nodes=(PrefillNodeEntry(name="a", peer_address=peer),)),
        decode=DecodeSection(nodes=(DecodeNodeEntry(name="b", host=host),)),
    )
    assert choose_transport(cluster).name == expected


def between_hosts(device: str, **transfer: str) -> Cluster:
    return Cluster(
        model=Model(path="m"),
        prefill=PrefillSection(
            nodes=(PrefillNodeEntry(name="a", device=device, peer_address="tcp://10.0.0.1:7110"),)
        ),
        decode=DecodeSection(nodes=(DecodeNodeEntry(name="b", device=device, host="10.0.0.2"),)),
        transfer=TRANSFER(**transfer),  # type: ignore[arg-type]
    )


def test_gpus_of_two_hosts_take_nixl_where_it_is_allowed() -> None:
    """The file decides; each node checks for itself whether nixl is installed, and refuses to start without it."""
    asked = between_hosts("cuda:0", nixl_devices="mlx5_0:1")
    with pytest.raises(ConfigError, match=r"security\.isolated_network: .*\(mlx5_0:1\) can write into"):
        choose_transport(asked)
    allowed = Security(isolated_network=True)
    assert choose_transport(msgspec.structs.replace(asked, security=allowed)).name == "nixl"
    nowhere = msgspec.structs.replace(between_hosts("cuda:0"), security=allowed)
    with pytest.raises(ConfigError, match=r"transfer\.nixl_devices: lo reaches no other host"):
        choose_transport(nowhere)


def test_cpus_of_two_hosts_use_the_transport_that_authenticates() -> None:
    named = between_hosts("cpu", transport="nixl", nixl_devices="eth0")
    allowed = Security(isolated_network=True)
    assert choose_transport(msgspec.structs.replace(between_hosts("cpu"), security=allowed)).name == "tcp"
    assert choose_transport(msgspec.structs.replace(named, security=allowed)).name == "nixl"


def test_nixl_on_one_host_has_to_be_allowed_too(tmp_path: Path) -> None:
    text = MINIMAL + "transfer: {transport: nixl}\n"
    with pytest.raises(ConfigError, match="this host has no other users"):
        choose_transport(load(tmp_path, text).cluster)
    allowed = load(tmp_path, text + "security: {isolated_network: true}\n").cluster
    assert choose_transport(allowed).name == "nixl"


def test_network_devices_are_names(tmp_path: Path) -> None:
    for devices in ("eth0 -x", "", "a$b"):
        refusal(tmp_path, MINIMAL + f"transfer: {{nixl_devices: {devices!r}}}\n")


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_named_transport_is_taken(tmp_path: Path, name: str) -> None:
    assert (
        choose_transport(load(tmp_path, MINIMAL + f"transfer: {{transport: {name}}}\n").cluster).name == name
    )


def test_defaults_leave_room_for_heartbeats() -> None:
    health = Health()
    assert 2 * health.heartbeat_interval <= min(health.node_timeout, health.router_timeout)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("{algorithm: eagle3}", "eagle3 needs a draft model; name its directory"),
        ("{algorithm: ngram, draft_model_path: x}", "algorithm ngram has no draft model; remove the path"),
        ("{draft_model_path: x}", "algorithm none has no draft model"),
        ("{algorithm: medusa}", "Invalid enum value 'medusa'"),
        ("{algorithm: NEXTN}", "NEXTN is called mtp here; write mtp"),
        ("{algorithm: EAGLE3}", "EAGLE3 is called eagle3 here; write eagle3"),
        ("{algorithm: mtp}", "mtp needs a draft model; name its directory"),
        ("{algorithm: mtp, draft_model_path: x, topk: 2}", "mtp drafts chains; topk must be 1"),
        ("{algorithm: ngram, topk: 2}", "ngram drafts chains; topk must be 1"),
        ("{algorithm: ngram, draft_tokens: 9}", "a chain of 3 steps is 4 tokens; leave it out"),
        ("{algorithm: eagle3, draft_model_path: x, topk: 2}", "give the size of the tree, 2 to 11 with"),
        (
            "{algorithm: eagle3, draft_model_path: x, topk: 2, draft_tokens: 12}",
            "2 to 11 with steps 3 and topk 2",
        ),
        ("{algorithm: ngram, steps: 0}", "Expected `int` >= 1"),
        ("{steps: 0}", "speculation.steps: Expected `int` >= 1"),
        ("{algorithm: null}", "speculation.algorithm: Expected `str`, got `null`"),
        ("{algorithm: ngram, adaptive: auto}", "speculation.adaptive: chains of a draft model"),
        (
            "{algorithm: eagle, draft_model_path: x, topk: 2, draft_tokens: 5, adaptive: auto}",
            "speculation.adaptive: chains of a draft model",
        ),
    ],
)
def test_speculation_that_cannot_be_is_refused(section: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {{path: x}}\nspeculation: {section}\n")
    with pytest.raises(ConfigError, match=sentence):
        load_cluster(file, environ={})


def test_the_draft_is_relative_to_the_file() -> None:
    resolved = load_cluster(CLUSTERS / "local-eagle3.yaml", environ={})
    assert resolved.draft_path == resolved.model_path.parent / "tiny-eagle3"
    assert load_cluster(CLUSTERS / "local-ngram.yaml", environ={}).draft_path is None


@pytest.mark.parametrize(
    "host", ["https://a.example", "a.example:443", "a.example/x", "10.0.0.1", "localhost", "::1", ""]
)
def test_images_are_fetched_only_from_host_names(tmp_path: Path, host: str) -> None:
    """The allow-list has host names only, because an address would bypass the checked look-up."""
    error = refusal(tmp_path, f'{MINIMAL}router: {{images: {{fetch_hosts: [a.example, "{host}"]}}}}\n')
    assert error.path == "router.images.fetch_hosts[1]"
    assert "not the name of a host" in str(error)


def test_piecewise_graphs_have_a_compiler_and_others_have_none(tmp_path: Path) -> None:
    """`compiler` has no effect on graphs that are not compiled, so it is refused there."""
    section = load(tmp_path, MINIMAL + "prefill: {graphs: piecewise, compiler: inductor}\n").cluster.prefill
    assert (section.graphs, section.compiler) == ("piecewise", "inductor")
    assert load(tmp_path, MINIMAL + "prefill: {graphs: piecewise}\n").cluster.prefill.compiler is None
    for graphs in ("auto", "breakable", "none"):
        error = refusal(tmp_path, MINIMAL + f"prefill: {{graphs: {graphs}, compiler: eager}}\n")
        assert error.path == "prefill.compiler"
        assert f"prefill.graphs is {graphs}; write graphs: piecewise" in str(error)
    with pytest.raises(ConfigError, match="tc_piecewise is called piecewise here; write piecewise"):
        load(tmp_path, MINIMAL + "prefill: {graphs: tc_piecewise}\n")
    with pytest.raises(ConfigError, match="prefill.graphs: Invalid enum value 'full'"):
        load(tmp_path, MINIMAL + "prefill: {graphs: full}\n")


def test_routers_may_be_found_by_a_name(tmp_path: Path) -> None:
    text = MINIMAL + "router: {control_address: 'dns://tandem-router:5600', found_routers: 8}\n"
    assert load(tmp_path, text).cluster.router.found_routers == 8
    several = MINIMAL + "router: {control_address: 'dns://tandem-router:5600', processes: 2}\n"
    assert refusal(tmp_path, several).path == "router.processes"
    for address in ("dns://tandem-router", "dns://:5600", "dns://tandem-router:0"):
        wrong = MINIMAL + yaml.safe_dump({"router": {"control_address": address}})
        assert refusal(tmp_path, wrong).path == "router.control_address"
    slices = "router: {control_address: 'endpointslices://tandem-router:5600', processes: 1}\n"
    assert (
        load(tmp_path, MINIMAL + slices).cluster.router.control_address
        == "endpointslices://tandem-router:5600"
    )
    assert refusal(tmp_path, MINIMAL + slices.replace("s: 1", "s: 2")).path == "router.processes"
    assert refusal(tmp_path, MINIMAL + slices.replace(":5600", "")).path == "router.control_address"
    listed = MINIMAL + "router: {control_address: ['dns://a:1', 'tcp://b:2']}\n"
    assert "routers on several hosts need addresses of the form tcp" in str(refusal(tmp_path, listed))
    peer = MINIMAL + yaml.safe_dump({"prefill": {"nodes": [{"name": "p", "peer_address": "dns://p:5601"}]}})
    assert refusal(tmp_path, peer).path == "prefill.nodes[0].peer_address"
