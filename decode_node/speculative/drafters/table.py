"""The drafter of each speculative algorithm. Plain decoding has none, and no row."""

from __future__ import annotations

from common.named import named
from decode_node.speculative.drafters.drafter import Drafter, DrafterSetup

# speculation.algorithm -> "module:function" from DrafterSetup to Drafter
DRAFTERS = {
    "ngram": "decode_node.speculative.drafters.ngram:make_drafter",
    "eagle3": "decode_node.speculative.drafters.eagle:make_drafter",
    "eagle": "decode_node.speculative.drafters.eagle:make_drafter",
    "mtp": "decode_node.speculative.drafters.multi_layer:make_drafter",
    "standalone": "decode_node.speculative.drafters.standalone:make_drafter",
}


def make_drafter(algorithm: str, setup: DrafterSetup) -> Drafter:
    drafter: Drafter = named(DRAFTERS[algorithm])(setup)
    return drafter
