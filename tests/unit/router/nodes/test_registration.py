"""A node cannot affect clients through its registration: every field is checked against the cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config import load_cluster
from common.errors import HandshakeRefused, InternalError, ProtocolError
from common.messages.generation import OutputToken, TokenLogprob
from common.messages.identity import (
    GraphTotals,
    NodeCounters,
    NodeLoad,
    NodeRef,
    new_incarnation,
)
from common.messages.protocol import CONTROL_PROTOCOL_VERSION
from common.messages.router_inbox import Failed, FirstToken, Heartbeat, Register, TokenRun, Tokens, codec
from common.messages.wire import encode
from router.from_config import registration_rules
from router.nodes.registration import MAX_REGISTER_BYTES, Pattern, RegistrationRules, peer_address

CLUSTER = """
model: {path: nowhere, max_model_len: 4096}
prefill:
  pool_tokens: 8192
  nodes:
    - {name: prefill-0, peer_address: "tcp://127.0.0.1:7001"}
    - {name: prefill-1, peer_address: "tcp://127.0.0.1:0"}
decode: {pool_tokens: 4096, nodes: [{name: decode-0}]}
process: {run_dir: run}
"""


@pytest.fixture
def rules(tmp_path: Path) -> RegistrationRules:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return registration_rules(load_cluster(file, [], {}), max_model_len=4096, vocab_size=1000)


def registration(**changes: Any) -> Register:
    """Return the registration of prefill-0 with changes of the node or of the registration."""
    node = {
        "name": "prefill-0",
        "role": "prefill",
        "incarnation": new_incarnation(),
        "peer_address": "tcp://127.0.0.1:7001",
    }
    rest = {
        "protocol_version": CONTROL_PROTOCOL_VERSION,
        "host": "host",
        "pid": 1,
        "model_fingerprint": "f" * 64,
        "max_model_len": 4096,
        "page_size": 16,
        "total_pages": 512,
        "effective_config": {},
    }
    node |= {key: value for key, value in changes.items() if key in node}
    rest |= {key: value for key, value in changes.items() if key not in node}
    return Register(node=NodeRef(**node), **rest)  # type: ignore[arg-type]


DECODE = {"name": "decode-0", "role": "decode", "peer_address": "", "total_pages": 256, "max_model_len": 4096}


def test_what_the_cluster_file_says_is_admitted(rules: RegistrationRules) -> None:
    for message in (registration(), registration(**DECODE)):
        assert rules.check(message, 500) == message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"name": "prefill-9"},
            "'prefill-9' is not in the router's cluster file, which has decode-0, prefill-0",
        ),
        ({**DECODE, "role": "prefill"}, "decode-0 is a decode node in the cluster file but registered as"),
        ({"role": "decode"}, "prefill-0 is a prefill node in the cluster file"),
        ({"incarnation": "x"}, "not 32 hex digits"),
        ({"page_size": 32}, "kv.page_size is 16"),
        ({"max_model_len": 1}, "accepts requests of up to 1 tokens; the cluster file requires 4096 to 4096"),
        ({"max_model_len": 10**6}, "accepts requests of up to 1000000 tokens"),
        ({**DECODE, "max_model_len": 16}, "the cluster file requires 4096 to 4096"),
        ({"total_pages": 0}, "prefill-0 has 0 pages; the cluster file allows 512 pages (pool_tokens)"),
        ({"total_pages": 10**9}, "prefill-0 has 1000000000 pages"),
        ({"peer_address": "tcp://10.0.0.1:7001"}, "reports that it listens at 'tcp://10.0.0.1:7001'"),
        ({"peer_address": "tcp://127.0.0.1:7002"}, "the cluster file says 'tcp://127.0.0.1:7001'"),
        ({"peer_address": "ipc:///tmp/elsewhere"}, "listens at"),
        ({"peer_address": ""}, "listens at"),
        ({**DECODE, "peer_address": "tcp://127.0.0.1:7001"}, "listens at"),
    ],
)
def test_refusals_are_sentences(rules: RegistrationRules, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HandshakeRefused) as caught:
        rules.check(registration(**changes), 500)
    assert sentence in str(caught.value)


def test_a_registration_has_a_size(rules: RegistrationRules) -> None:
    with pytest.raises(HandshakeRefused, match="bytes"):
        rules.check(registration(), MAX_REGISTER_BYTES + 1)


@pytest.mark.parametrize(
    ("expected", "reported", "told"),
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:41234", "tcp://127.0.0.1:41234"),
        ("tcp://localhost:7000", "tcp://127.0.0.1:7000", "tcp://localhost:7000"),
        ("tcp://[::1]:0", "tcp://[::1]:7000", "tcp://[::1]:7000"),
        # Decode nodes resolve a host name: what the node has bound does not matter.
        ("tcp://node-7:7000", "tcp://10.0.0.7:7000", "tcp://node-7:7000"),
        # Publishers of KV events report what the file says.
        ("tcp://node-7:7000", "tcp://node-7:7000", "tcp://node-7:7000"),
        ("tcp://localhost:7000", "tcp://localhost:7000", "tcp://localhost:7000"),
        ("ipc:///run/p.sock", "ipc:///run/p.sock", "ipc:///run/p.sock"),
    ],
)
def test_decode_nodes_are_told_the_address_of_the_cluster_file(
    expected: str, reported: str, told: str
) -> None:
    assert peer_address("p", expected, reported) == told


@pytest.mark.parametrize(
    ("expected", "reported"),
    [
        ("tcp://127.0.0.1:0", "tcp://10.0.0.1:7000"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:70000"),
        ("tcp://localhost:7000", "tcp://10.0.0.1:7000"),
        ("tcp://node-7:7000", "tcp://10.0.0.7:7001"),
        ("tcp://node-7:7000", "tcp://elsewhere:7000"),
        ("tcp://[::1]:0", "tcp://[::2]:7000"),
        ("tcp://own:7000", "tcp://own:7000"),
    ],
)
def test_another_address_is_refused(expected: str, reported: str) -> None:
    with pytest.raises(HandshakeRefused, match="listens at"):
        peer_address("p", expected, reported)


def test_tokens_are_of_the_vocabulary(rules: RegistrationRules) -> None:
    rules.check_tokens([OutputToken(0), OutputToken(999, TokenLogprob(-1.0, (0, 999), (-1.0, -2.0)))])
    for token in (OutputToken(1000), OutputToken(1, TokenLogprob(-1.0, (1000,), (-1.0,)))):
        with pytest.raises(ProtocolError, match="vocabulary of 1000"):
            rules.check_tokens([token])


NAN, INF = float("nan"), float("inf")


def heartbeat(load: NodeLoad | None = None, **counters: Any) -> Heartbeat:
    return Heartbeat(
        incarnation="i",
        sequence=1,
        state="up",
        loop_age_ms=0,
        as_of=0.0,
        load=load or NodeLoad(),
        counters=NodeCounters(**counters),
    )


def tokens(*runs: TokenRun) -> Tokens:
    return Tokens(runs=list(runs))


@pytest.mark.parametrize(
    "message",
    [
        heartbeat(NodeLoad(queued=-1)),
        heartbeat(NodeLoad(free_pages=2**60)),
        heartbeat(requests=-5),
        heartbeat(avg_spec_accept_length=NAN),
        heartbeat(phase_seconds={"x": INF}),
        heartbeat(phase_seconds={"x" * 1000: 1.0}),
        heartbeat(phase_seconds={str(n): 1.0 for n in range(1000)}),
        heartbeat(graphs=tuple(GraphTotals(phase=str(n), model="m") for n in range(1000))),
        heartbeat(spec_accepted_at=(1,) * 1000),
        msgspec.structs.replace(heartbeat(), as_of=NAN),
        msgspec.structs.replace(heartbeat(), loop_age_ms=-1),
        tokens(TokenRun(1, 0, [OutputToken(-1)])),
        tokens(TokenRun(1, -1, [OutputToken(1)])),
        tokens(TokenRun(1, 0, [OutputToken(1)] * 5000)),
        tokens(TokenRun(1, 0, [OutputToken(1, TokenLogprob(NAN))])),
        tokens(TokenRun(1, 0, [OutputToken(1, TokenLogprob(INF))])),
        tokens(TokenRun(1, 0, [OutputToken(1, TokenLogprob(0.0, (1,) * 100))])),
        tokens(TokenRun(1, 0, [OutputToken(1)], "because")),
        tokens(TokenRun(1, 0, [OutputToken(1)], "stop", {"decode": NAN})),
        FirstToken(room=1, token=OutputToken(1), finish_reason="stop\n", cached_tokens=0),
        FirstToken(room=1, token=OutputToken(1), finish_reason=None, cached_tokens=-1),
        Failed(room=1, code="c" * 1000, message=""),
        Failed(room=1, code="c", message="m" * 10_000),
        registration(host="h" * 1000),
        registration(pid=-1),
        registration(effective_config={str(n): n for n in range(1000)}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_values_that_no_node_sends_are_refused_when_decoded(message: msgspec.Struct) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(encode(message))


def test_a_long_error_is_cut_and_not_refused() -> None:
    assert codec.decode(encode(Failed.of(1, InternalError("m" * 100_000))))


# -- nodes that join by a pattern --------------------------------------------------------------------------------

JOINING = """
model: {path: nowhere, max_model_len: 4096}
prefill:
  pool_tokens: 8192
  nodes:
    - {name: prefill-0, peer_address: "tcp://127.0.0.1:7001"}
    - {name: prefill-*, count: 4, peer_address: "tcp://own:5601"}
decode: {pool_tokens: 4096, nodes: [{name: decode-*, count: 2}]}
process: {run_dir: run}
"""


@pytest.fixture
def joining(tmp_path: Path) -> RegistrationRules:
    file = tmp_path / "joining.yaml"
    file.write_text(JOINING)
    return registration_rules(load_cluster(file, [], {}), max_model_len=4096, vocab_size=1000)


@pytest.mark.parametrize("host", ["10.1.2.3", "127.0.0.1", "[fd00::7]"])
def test_a_joined_node_says_on_which_host_it_is(joining: RegistrationRules, host: str) -> None:
    message = registration(name="prefill-x2k9p", peer_address=f"tcp://{host}:5601")
    assert joining.check(message, 500) == message
    assert joining.pattern("prefill-x2k9p") == Pattern("prefill-*", 4)
    assert joining.pattern("prefill-0") is None


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.1.2.3:5602",
        "tcp://10.1.2.3:0",
        "tcp://0.0.0.0:5601",
        "tcp://[::]:5601",
        "tcp://169.254.169.254:5601",
        "tcp://224.0.0.1:5601",
        "tcp://metadata.internal:5601",
        "tcp://own:5601",
        "ipc:///run/other.sock",
        "",
    ],
)
def test_a_joined_node_cannot_send_decode_nodes_elsewhere(joining: RegistrationRules, address: str) -> None:
    """Its own address is an IP address that a host can have, on the port of the file."""
    with pytest.raises(HandshakeRefused, match="the cluster file says 'tcp://own:5601'"):
        joining.check(registration(name="prefill-9", peer_address=address), 500)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"name": "prefill-0", "peer_address": "tcp://10.1.2.3:7001"},
            "the cluster file says 'tcp://127.0.0.1",
        ),
        ({**DECODE, "name": "prefill-7"}, "prefill-7 is a prefill node in the cluster file"),
        ({**DECODE, "name": "decode-*"}, "'decode-*' is not in the router's cluster file"),
        ({**DECODE, "name": "decode-"}, "'decode-' is not in the router's cluster file"),
        ({**DECODE, "name": "decode-1", "role": "prefill"}, "decode-1 is a decode node in the cluster file"),
        ({**DECODE, "name": "decode-1", "total_pages": 1}, "decode-1 has 1 pages"),
    ],
)
def test_a_joined_node_keeps_the_rules_of_its_entry(
    joining: RegistrationRules, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(HandshakeRefused) as caught:
        joining.check(registration(**changes), 500)
    assert sentence in str(caught.value)


def test_the_path_of_a_joined_nodes_socket_has_its_name(tmp_path: Path) -> None:
    file = tmp_path / "ipc.yaml"
    file.write_text(JOINING.replace(', peer_address: "tcp://own:5601"', ""))
    rules = registration_rules(load_cluster(file, [], {}), max_model_len=4096, vocab_size=1000)
    own = f"ipc://{tmp_path}/run/prefill-5.sock"
    assert rules.check(registration(name="prefill-5", peer_address=own), 500).node.peer_address == own
    with pytest.raises(HandshakeRefused, match="listens at"):
        rules.check(registration(name="prefill-6", peer_address=own), 500)
