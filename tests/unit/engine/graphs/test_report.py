"""What a node logs about its graphs at start-up."""

from __future__ import annotations

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.graphs.report import MAX_REASON, CaptureRow, node_table, start_report
from common.engine.graphs.spec import CaptureSpec, request_shapes
from decode_node.graphs.decode_graph import decode_spec

REQUESTS = (1, 2, 4, 8, 12, 16, 24)
VERIFY = CaptureSpec(
    "target",
    "verify",
    ForwardMode.VERIFY,
    request_shapes((1, 2), 4),
    CaptureHiddenMode.FULL,
    tokens_per_request=4,
)


def row(spec: CaptureSpec, requests: int, variant: str, error: str = "") -> CaptureRow:
    width = spec.tokens_per_request or 1
    hidden = spec.hidden.name
    size = requests * width, requests
    return CaptureRow(spec.phase, spec.model, "cuda", *size, variant, hidden, 0.25, 3 << 20, 0, error)


def test_a_row_of_each_forward() -> None:
    """Failures by graph, with the variant if there are several; `unit` says what shapes count."""
    plain = decode_spec(REQUESTS, ("greedy", "filtered"))
    rows = [row(plain, size, variant) for size in REQUESTS[:-1] for variant in plain.variants]
    rows += [row(plain, 24, "greedy", "CaptureError: " + "x" * 999), row(plain, 24, "filtered")]
    decode = start_report(plain, "full", (), rows, None)
    assert (decode.unit, decode.shapes, decode.captured) == ("requests", REQUESTS, 13)
    assert (decode.seconds, decode.mib) == (3.5, 42.0)
    ((graph, reason),) = decode.failed.items()
    assert (graph, len(reason)) == ("24 greedy", MAX_REASON)
    verify = start_report(
        VERIFY, "full", ("enforced",), [row(VERIFY, size, "plain") for size in (1, 2)], None
    )
    assert (verify.unit, verify.hidden_mode, verify.shapes) == ("requests of 4 tokens", "FULL", (1, 2))
    header, first, second = node_table([decode, verify])
    at = header.index("shapes")
    assert first[at:].startswith("1 2 4 8 12 .. 24 requests  NULL ")
    assert second[at:].startswith("1 2 requests of 4 tokens ")
    at = header.index("state")
    assert (first[at : at + 18], second[at:]) == ("eager: 24 greedy: ", "enforced")
