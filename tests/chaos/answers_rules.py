"""Invariants I1 to I3 as clients see them: no wrong token, no gap or repetition, one terminal event."""

from __future__ import annotations

from tests.chaos.cases import LOGPROB_TOLERANCE
from tests.chaos.history import History
from tests.chaos.load import Exchange
from tests.chaos.violation import Violation

ROUTER_FAULTS = ("kill", "stop", "crash")
MARGIN = 1.0  # seconds after a router's return during which its old connections may still turn out broken


def check(history: History) -> list[Violation]:
    found: list[Violation] = []
    outages = router_outages(history)
    for exchange in history.exchanges:
        found += _wrong_tokens(exchange, history)
        found += _terminal(exchange, outages)
    return found


def router_outages(history: History) -> list[tuple[float, float]]:
    """Return the intervals in which the router was dead, stopped or starting."""
    begun: dict[str, float] = {}
    outages: list[tuple[float, float]] = []
    for note in history.faults:
        if note["event"] == "begin" and note.get("target") == "router" and note["kind"] in ROUTER_FAULTS:
            begun[note["fault"]] = note["t"]
        elif note["event"] == "end" and note["fault"] in begun:
            outages.append((begun.pop(note["fault"]), note["t"] + MARGIN))
    return outages + [(since, float("inf")) for since in begun.values()]


def _wrong_tokens(exchange: Exchange, history: History) -> list[Violation]:
    expected = history.answers[exchange.case]
    got, whole = exchange.tokens, expected["tokens"]
    finish_reason, text = expected["finish_reason"], exchange.text
    if 0 < exchange.limit < len(whole):
        # The last token may be part of a character.
        whole, finish_reason, text = whole[: exchange.limit], "length", text.rstrip("\ufffd")
    who = f"{exchange.request_id} ({exchange.case})"
    if got != whole[: len(got)]:
        at = next((i for i, (a, b) in enumerate(zip(got, whole, strict=False)) if a != b), len(whole))
        context = f"{who}: token {at} of {len(whole)} is {got[at : at + 4]}, known {whole[at : at + 4]}"
        if got[at : at + 3] == whole[at + 1 : at + 4] and len(got[at:]) >= 3:
            return [Violation("I2", f"{context}: a token is missing")]
        if at and got[at : at + 3] == whole[at - 1 : at + 2] and len(got[at:]) >= 3:
            return [Violation("I2", f"{context}: a token is repeated")]
        return [Violation("I1", context)]
    if not expected["text"].startswith(text):
        return [Violation("I1", f"{who}: the text is not a beginning of the known text")]
    for at, (value, known) in enumerate(zip(exchange.logprobs, expected["logprobs"], strict=False)):
        if abs(value - known) > LOGPROB_TOLERANCE:
            return [Violation("I1", f"{who}: the logprob of token {at} is {value}, known {known}")]
    cut = len(whole) < len(expected["tokens"])
    if exchange.done and (len(got) != len(whole) or (not cut and exchange.text != expected["text"])):
        return [Violation("I1", f"{who}: complete with {len(got)} of {len(whole)} tokens")]
    if exchange.done and exchange.finish_reason != finish_reason:
        return [Violation("I1", f"{who}: ended with {exchange.finish_reason}, known {finish_reason}")]
    return []


def _terminal(exchange: Exchange, outages: list[tuple[float, float]]) -> list[Violation]:
    who = f"{exchange.request_id} ({exchange.case})"
    found = []
    if exchange.finishes > 1:
        found.append(Violation("I3", f"{who}: {exchange.finishes} events carry a finish_reason"))
    if exchange.after_done:
        found.append(Violation("I3", f"{who}: {exchange.after_done} events follow [DONE]"))
    if exchange.error_code is not None and exchange.done:
        found.append(Violation("I3", f"{who}: both an error and a complete answer"))
    ended = exchange.done or exchange.error_code is not None or exchange.left
    excused = any(since <= exchange.ended and exchange.sent <= until for since, until in outages)
    if not ended and not excused:
        found.append(Violation("I3", f"{who}: no terminal event ({exchange.broken or 'nothing came'})"))
    return found
