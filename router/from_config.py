"""What the router expects of its nodes, from the cluster file."""

from __future__ import annotations

from common.config import Resolved
from common.config.run_directory import peer_address
from common.config.schema import DecodeSection, PrefillSection
from router.registration import ExpectedNode, RegistrationRules


def registration_rules(resolved: Resolved, max_model_len: int, vocab_size: int) -> RegistrationRules:
    """`max_model_len`: of the configuration, or of the model."""
    cluster = resolved.cluster
    page_size = cluster.kv.page_size

    def expected(section: PrefillSection | DecodeSection, device: str) -> tuple[int, int | None]:
        """(least context, pages of the pool). A pool whose size the node works out may be any."""
        tokens: int | None = None
        if section.pool_tokens != "auto":
            tokens = section.pool_tokens
        elif device == "cpu":
            tokens = section.CPU_POOL_TOKENS
        if tokens is None:
            return cluster.model.max_model_len or 1, None
        pages = tokens // page_size
        return min(max_model_len, pages * page_size), pages

    nodes: dict[str, ExpectedNode] = {}
    for prefill in cluster.prefill.nodes:
        least, pages = expected(cluster.prefill, prefill.device)
        address = peer_address(resolved, prefill.name)
        nodes[prefill.name] = ExpectedNode("prefill", address, least, pages)
    for decode in cluster.decode.nodes:
        least, pages = expected(cluster.decode, decode.device)
        nodes[decode.name] = ExpectedNode("decode", "", least, pages)
    return RegistrationRules(nodes, page_size, max_model_len, vocab_size)
