"""Checks what a node claims at registration against the cluster file, before it can affect clients."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from common.errors import HandshakeRefused, ProtocolError
from common.messages.generation import OutputToken, PromptLogprob
from common.messages.identity import Role
from common.messages.protocol import version_mismatch
from common.messages.router_inbox import Register
from common.node_names import OWN, NodeNames

INCARNATION = re.compile(r"[0-9a-f]{32}")
MAX_REGISTER_BYTES = 1 << 20  # config and graph reports of a large model take about 20 KiB
MAX_PAGES = 1 << 31


@dataclass(frozen=True, slots=True)
class ExpectedNode:
    """One entry of the cluster file: a node, or a pattern by which nodes join."""

    role: Role
    # Prefill nodes: from the file, where port 0 means any port, and the host `own` any host; decode nodes: "".
    peer_address: str
    min_model_len: int  # tokens that a request must be allowed to have there
    pages: int | None  # in its pool; None if the node derives it from the memory of its GPU
    count: int | None = None  # how many nodes a pattern may have at the same time; None for a single node
    # The same node as a decode node, if it is movable; the other fields then describe it as a prefill node.
    decoding: ExpectedNode | None = None
    # Addresses of its KV events and of their replay, from the file, where the host may be `own`; None: it has none.
    events: tuple[str, str] | None = None

    def of(self, role: Role) -> ExpectedNode:
        """Return what is expected of the node in this role."""
        return self.decoding if role == "decode" and self.decoding is not None else self


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of the cluster file by which nodes join."""

    text: str
    count: int  # how many there may be at the same time


@dataclass(frozen=True, slots=True)
class RegistrationRules:
    """The rules that every node of this cluster must comply with."""

    nodes: Mapping[str, ExpectedNode]  # by name or pattern
    page_size: int
    max_model_len: int  # as configured, or else the model's
    vocab_size: int

    def check(self, message: Register, nbytes: int) -> Register:
        """Return the registration with the peer address that decode nodes will use. Raises HandshakeRefused."""
        node = message.node
        other_version = version_mismatch(node.name, message.protocol_version)
        if other_version is not None:
            raise HandshakeRefused(other_version)
        entry = NodeNames.of(self.nodes).entry(node.name)
        if entry is None:
            known = ", ".join(sorted(self.nodes)[:20])
            raise HandshakeRefused(
                f"{node.name!r} is not in the router's cluster file, which has {known}; start the router and "
                "the nodes with the same file"
            )
        expected = self.nodes[entry].of(node.role)
        if node.role != expected.role:
            raise HandshakeRefused(
                f"{node.name} is a {expected.role} node in the cluster file but registered as a {node.role} node"
            )
        if not INCARNATION.fullmatch(node.incarnation):
            raise HandshakeRefused(f"{node.name} has an incarnation that is not 32 hex digits")
        if nbytes > MAX_REGISTER_BYTES:
            raise HandshakeRefused(
                f"{node.name} registered with {nbytes} bytes; the limit is {MAX_REGISTER_BYTES}"
            )
        self._check_sizes(node.name, message, expected)
        # The path of an ipc socket holds the name of its node.
        wanted = expected.peer_address.replace(entry, node.name)
        address = peer_address(node.name, wanted, node.peer_address)
        return msgspec.structs.replace(message, node=msgspec.structs.replace(node, peer_address=address))

    def event_addresses(self, node: Register) -> tuple[str, str] | None:
        """Return where a registered node publishes KV events; None if it does not.

        Raises HandshakeRefused if it says something else than the cluster file.
        """
        name, reported = node.node.name, node.effective_config
        entry = NodeNames.of(self.nodes).entry(name)
        expected = None if entry is None else self.nodes[entry].of(node.node.role).events
        if expected is None or "kv_events" not in reported:
            return None
        events, replay = (str(reported.get(key, "")) for key in ("kv_events", "kv_events_replay"))
        return peer_address(name, expected[0], events), peer_address(name, expected[1], replay)

    def pattern(self, name: str) -> Pattern | None:
        """Return the pattern by which a node of this name joins; None if the file lists the name."""
        entry = NodeNames.of(self.nodes).entry(name)
        count = None if entry is None else self.nodes[entry].count
        return None if entry is None or count is None else Pattern(entry, count)

    def movable(self, name: str) -> bool:
        """Return whether the node `name` can change its role."""
        expected = self.nodes.get(name)
        return expected is not None and expected.decoding is not None

    def check_tokens(self, tokens: Sequence[OutputToken]) -> None:
        """Raise ProtocolError for a token outside the vocabulary."""
        for token in tokens:
            logprob = token.logprob
            if token.id >= self.vocab_size or (
                logprob is not None and any(each >= self.vocab_size for each in logprob.top_ids)
            ):
                raise ProtocolError(f"a token is outside the vocabulary of {self.vocab_size} tokens")

    def check_scores(self, tokens: Sequence[PromptLogprob]) -> None:
        """Raise ProtocolError for a token outside the vocabulary."""
        if any(each >= self.vocab_size for token in tokens for each in token.top_ids):
            raise ProtocolError(f"a token is outside the vocabulary of {self.vocab_size} tokens")

    def _check_sizes(self, name: str, message: Register, expected: ExpectedNode) -> None:
        if message.page_size != self.page_size:
            raise HandshakeRefused(
                f"{name} has pages of {message.page_size} tokens, the router's kv.page_size is {self.page_size}: "
                "start both with the same cluster file"
            )
        least, pages = expected.pages or 1, expected.pages or MAX_PAGES
        if not least <= message.total_pages <= pages:
            wanted = f"{pages} pages (pool_tokens)" if expected.pages else f"1 to {MAX_PAGES} pages"
            raise HandshakeRefused(
                f"{name} has {message.total_pages} pages; the cluster file allows {wanted}"
            )
        if not expected.min_model_len <= message.max_model_len <= self.max_model_len:
            raise HandshakeRefused(
                f"{name} accepts requests of up to {message.max_model_len} tokens; the cluster file requires "
                f"{expected.min_model_len} to {self.max_model_len}: give the node more memory, or set "
                "model.max_model_len"
            )


def peer_address(name: str, expected: str, reported: str) -> str:
    """Return the address to which decode nodes connect: the file's, with what only the node knows: its port or host.

    Raises HandshakeRefused if the node reports another address.
    """
    if reported == expected and not expected.startswith("tcp://"):
        return expected
    wrong = HandshakeRefused(
        f"{name} reports that it listens at {reported[:200]!r}; the cluster file says {expected!r}"
    )
    if not (expected.startswith("tcp://") and reported.startswith("tcp://")):
        raise wrong
    host, _, port = expected.removeprefix("tcp://").rpartition(":")
    reported_host, _, reported_port = reported.removeprefix("tcp://").rpartition(":")
    if not reported_port.isdecimal() or not 0 < int(reported_port) <= 65_535:
        raise wrong
    if int(port) not in (0, int(reported_port)) or not _same_host(host, reported_host):
        raise wrong
    return f"tcp://{reported_host if host == OWN else host}:{int(reported_port)}"


def _same_host(expected: str, reported: str) -> bool:
    """Compare an IP address that a node has bound, or the name that it was given, with the file's host.

    A name is not resolved here.
    """
    if reported == expected != OWN:
        return True
    try:
        found = ipaddress.ip_address(reported.strip("[]"))
    except ValueError:
        return False
    if expected == OWN:
        return not (found.is_unspecified or found.is_multicast or found.is_link_local)
    if expected == "localhost":
        return found.is_loopback
    try:
        return found == ipaddress.ip_address(expected.strip("[]"))
    except ValueError:
        return True
