"""The drafter of each speculative algorithm. Plain decoding has none and is not listed."""

from __future__ import annotations

from common.named import named
from decode_node.speculative.drafters.drafter import Drafter, DrafterSetup
from decode_node.speculative.drafters.forced_chain import ForcedChain
from decode_node.step_rules import NoTextDrafts, TextDrafts

# speculation.algorithm -> "module:function" from DrafterSetup to Drafter
DRAFTERS = {
    "ngram": "decode_node.speculative.drafters.ngram:make_drafter",
    "eagle3": "decode_node.speculative.drafters.eagle:make_drafter",
    "eagle": "decode_node.speculative.drafters.eagle:make_drafter",
    "mtp": "decode_node.speculative.drafters.mtp:make_drafter",
    "standalone": "decode_node.speculative.drafters.standalone:make_drafter",
}

# speculation.algorithm -> "module:function" from (DrafterSetup, width) to ForcedChain, for steps without a draft phase
# that verify the tokens that grammars force. Without a row usual rounds verify them.
FORCED_CHAINS = {
    "eagle3": "decode_node.speculative.drafters.eagle:make_forced_chain",
    "eagle": "decode_node.speculative.drafters.eagle:make_forced_chain",
    "mtp": "decode_node.speculative.drafters.mtp:make_forced_chain",
    "standalone": "decode_node.speculative.drafters.standalone:make_forced_chain",
}

# speculation.algorithm -> "module:function" from the number of batch rows to TextDrafts, for drafts found in texts
TEXT_DRAFTS = {"ngram": "decode_node.speculative.ngram_texts:make_text_drafts"}


def make_drafter(algorithm: str, setup: DrafterSetup) -> Drafter:
    drafter: Drafter = named(DRAFTERS[algorithm])(setup)
    return drafter


def make_forced_chain(algorithm: str, setup: DrafterSetup, width: int) -> ForcedChain:
    chain: ForcedChain = named(FORCED_CHAINS[algorithm])(setup, width)
    return chain


def make_text_drafts(algorithm: str, max_running: int) -> TextDrafts:
    """Return the host-side drafts of an algorithm; NoTextDrafts if its drafts are computed on the device."""
    if algorithm not in TEXT_DRAFTS:
        return NoTextDrafts()
    drafts: TextDrafts = named(TEXT_DRAFTS[algorithm])(max_running)
    return drafts
