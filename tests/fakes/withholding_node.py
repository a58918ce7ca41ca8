"""A decode node that withholds from the router all but the first tokens of some requests.

`python -m tests.fakes.withholding_node FILE --cluster CLUSTER --name NAME`. For a request with the id hold-K-... the
router receives the first K tokens and no end, while the node computes all of it. The id is appended to FILE once more
tokens exist. A node that is killed then has died after exactly K tokens, whatever the batches and drafts were.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from common.messages.router_inbox import TokenRun, Tokens
from common.node.router_link import RouterLink
from common.process import run_command
from decode_node.node import DecodeNode

HELD = re.compile(r"hold-(\d+)-")


class Withheld:
    """The rooms that are held, and the number of tokens for each. The first token of a room is the prefill node's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rooms: dict[int, tuple[int, str]] = {}

    def taken(self, room: int, request_id: str) -> None:
        held = HELD.match(request_id)
        if held is not None:
            self._rooms[room] = int(held[1]), request_id

    def let_through(self, run: TokenRun) -> TokenRun | None:
        """Return the part of the run that may be sent."""
        if run.room not in self._rooms:
            return run
        most, request_id = self._rooms[run.room]
        if run.offset + len(run.tokens) > most or run.finish_reason is not None:
            with self._file.open("a") as file:
                file.write(request_id + "\n")
        allowed = run.tokens[: max(most - run.offset, 0)]
        return TokenRun(run.room, run.offset, allowed) if allowed else None


def withhold(file: Path) -> None:
    """Withhold tokens from the router in every decode node of this process."""
    withheld = Withheld(file)
    take, send = DecodeNode.take, RouterLink.send

    def taking(self: DecodeNode, message: Any, router: Any, now: float) -> None:
        withheld.taken(message.room, message.request_id)
        take(self, message, router, now)

    def sending(self: Any, message: Any) -> None:
        if isinstance(message, Tokens):
            runs = [run for each in message.runs if (run := withheld.let_through(each)) is not None]
            message = Tokens(runs=runs)
        send(self, message)

    DecodeNode.take = taking  # type: ignore[method-assign]
    RouterLink.send = sending  # type: ignore[method-assign]


if __name__ == "__main__":
    withhold(Path(sys.argv.pop(1)))
    from decode_node.__main__ import main

    run_command(main, "launch_decode")
