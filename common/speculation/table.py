"""The table of speculative algorithms.

To add one, write a record (a module here) with a row in this table, the code that a prefill node runs for it with a
row in prefill_node/draft_table.py, and a drafter with a row in decode_node/speculative/drafters/table.py.
"""

from __future__ import annotations

from common.named import named
from common.speculation.algorithm import Algorithm

# speculation.algorithm -> "module:attribute" of its record
ALGORITHMS = {
    "none": "common.speculation.plain:NONE",
    "ngram": "common.speculation.plain:NGRAM",
    "eagle3": "common.speculation.eagle3:EAGLE3",
    "eagle": "common.speculation.eagle:EAGLE",
    "mtp": "common.speculation.mtp:MTP",
    "standalone": "common.speculation.standalone:STANDALONE",
}


def algorithm(name: str) -> Algorithm:
    record = named(ALGORITHMS[name])
    assert isinstance(record, Algorithm)
    return record


def algorithms() -> list[Algorithm]:
    """Return all records, in the order of the table."""
    return [algorithm(name) for name in ALGORITHMS]
