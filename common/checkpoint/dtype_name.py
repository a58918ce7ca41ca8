"""The dtype in which a node computes."""

from __future__ import annotations


def dtype_name(wanted: str, checkpoint: str, device_type: str) -> str:
    """Return torch's name of the dtype; "auto" is the checkpoint's, but float32 on the CPU, where bf16 is slow."""
    if wanted != "auto":
        return wanted
    return "float32" if device_type == "cpu" else checkpoint
