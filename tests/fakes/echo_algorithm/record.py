"""A speculative algorithm that only tests have, added by three files and three rows: every draft is the last token."""

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
    """Rounds in which the drafts of this algorithm make `length` tokens of `answer`, the first of them drawn before."""
    at = rounds = 0
    while at < length - 1:
        accepted = 0
        while accepted < steps and answer[at + 1 + accepted] == answer[at]:
            accepted += 1
        at += accepted + 1
        rounds += 1
    return rounds
