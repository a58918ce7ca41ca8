"""Hidden states of a request on their way from a node to the router.

The state of a position is the output of the final norm there, from which the LM head computes the logits of the next
token. Prefill nodes send those of prompt tokens, decode nodes those of output tokens, each before the token that was
drawn from it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequest
from common.messages.generation import SamplingParams
from common.messages.router_inbox import MAX_STATE_BYTES, HiddenStates
from common.node.to_router import ToRouter

StateRows: TypeAlias = npt.NDArray[np.float32]  # [n, H]
FIELD = "return_hidden_states"


def send_states(router: ToRouter, room: int, start: int, states: StateRows) -> None:
    """Send the states of the positions from `start` on, in messages of a bounded size."""
    rows = max(MAX_STATE_BYTES // (4 * states.shape[1]), 1)
    for at in range(0, len(states), rows):
        data = states[at : at + rows].astype("<f4", copy=False).tobytes()
        router.send(HiddenStates(room=room, start=start + at, states=data))


def check_states(sampling: SamplingParams, allowed: bool) -> None:
    """Raise InvalidRequest for a request that asks for hidden states where they are not captured."""
    if sampling.hidden_states_from is not None and not allowed:
        raise InvalidRequest(
            "this node returns no hidden states: set model.return_hidden_states: true in the cluster file",
            param=FIELD,
        )
