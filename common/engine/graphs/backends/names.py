"""Names of the backends, as the config, the rules and the graph table write them."""

from __future__ import annotations

from typing import Final

NONE: Final = "none"
FULL: Final = "full"  # one graph of the whole forward
BREAKABLE: Final = "breakable"  # graphs between attention layers; prompts only
PIECEWISE: Final = "piecewise"  # breakable, of a compiled model body; prompts of the target only
