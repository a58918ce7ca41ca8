"""The norms of a decoder layer, before and after its two blocks. No torch."""

from __future__ import annotations

from typing import NamedTuple


class LayerNorms(NamedTuple):
    """Names of a layer's norms in the checkpoint; "": there is none.

    A block reads the stream through its input norm, and the stream gets its output through its output norm.
    """

    mixer_input: str = "input_layernorm"
    mixer_output: str = ""
    feed_forward_input: str = "post_attention_layernorm"
    feed_forward_output: str = ""

    @property
    def of_outputs(self) -> bool:
        """True if the outputs of both blocks are normed; otherwise neither is."""
        return bool(self.mixer_output)


PRE_NORM = LayerNorms()
FOUR_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
POST_NORM = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
