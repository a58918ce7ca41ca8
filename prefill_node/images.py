"""The scheduler's view of images: which ones it accepts, and which prompts have theirs ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import zmq

from common.errors import InvalidRequest
from common.messages.generation import ImageSpan

ARRIVAL_SECONDS = 30.0  # from the prompt to its last image; after that the prompt fails and is placed again


class Images(Protocol):
    """Access to images; the implementations are ImageIntake and NoImages."""

    @property
    def busy(self) -> bool:
        """True while decoding is in progress, whose end no socket announces."""
        ...

    @property
    def refused_messages(self) -> int:
        """Invalid messages from the router since the start."""
        ...

    def watch(self, poller: zmq.Poller) -> None: ...

    def check(self, spans: Sequence[ImageSpan], waiting: Sequence[ImageSpan]) -> None:
        """Raise InvalidRequest or Overloaded if a new prompt's images are refused; `waiting`: of waiting prompts."""
        ...

    def expect(self, key: int, spans: Sequence[ImageSpan]) -> None:
        """Create the images of a new prompt. They are kept until its last chunk, or until a plan forgets it."""
        ...

    def receive(self) -> None:
        """Receive the images that have arrived and start to decode them."""
        ...

    def claim(self, key: int) -> bool:
        """Give a prompt's images the pixels or rows that are ready; return whether all of them have some.

        Raises RequestError for an image that cannot be decoded.
        """
        ...

    def arrived(self, key: int) -> bool:
        """Return whether the router has delivered all images of a prompt; some may not be decoded yet."""
        ...

    def close(self) -> None: ...


class NoImages:
    """The images of a text-only model, which has none."""

    busy = False
    refused_messages = 0

    def watch(self, poller: zmq.Poller) -> None:
        pass

    def check(self, spans: Sequence[ImageSpan], waiting: Sequence[ImageSpan]) -> None:
        if spans:
            raise InvalidRequest("this model does not accept images", param="messages")

    def expect(self, key: int, spans: Sequence[ImageSpan]) -> None:
        pass

    def receive(self) -> None:
        pass

    def claim(self, key: int) -> bool:
        return True

    def arrived(self, key: int) -> bool:
        return True

    def close(self) -> None:
        pass
