"""A speculative algorithm for tests, added by three files and three table rows: every draft repeats the last token."""

from __future__ import annotations

from common.speculation.algorithm import Algorithm

ECHO = Algorithm(name="echo")

ROWS = (
    ("common.speculation.table:ALGORITHMS", "echo=tests.fakes.echo_algorithm.record:ECHO"),
    ("prefill_node.draft_table:PREFILL_DRAFTS", "echo=tests.fakes.echo_algorithm.prefill:no_draft"),
    (
        "decode_node.speculative.drafters.table:DRAFTERS",
        "echo=tests.fakes.echo_algorithm.drafter:make_drafter",
    ),
)


def echo_rounds(answer: list[int], length: int, steps: int) -> int:
    """Return in how many rounds this algorithm emits `length` tokens of `answer`; the first is drawn before them."""
    at = rounds = 0
    while at < length - 1:
        accepted = 0
        while accepted < steps and answer[at + 1 + accepted] == answer[at]:
            accepted += 1
        at += accepted + 1
        rounds += 1
    return rounds
