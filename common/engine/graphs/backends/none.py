"""Records nothing: replay runs the callable again on the padded static inputs, as a reference for other backends."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.graphs.backends.base import Output, Recording


class NoGraphs:
    """Pads without graphs, to tell a wrong graph from wrong padding. A spec without shapes does neither."""

    name = "none"
    breaks = True
    compilation = None

    def capture(self, run: Callable[[], Output]) -> Recording[Output]:
        recording = Recording(run(), [])

        def again() -> None:
            recording.output = run()

        recording.steps.append(again)
        return recording
