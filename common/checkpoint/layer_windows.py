"""Reads the sliding windows of config.json: the number of keys that each layer attends to. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoint.json_fields import positive, shown
from common.errors import ModelError

SLIDING, FULL = "sliding_attention", "full_attention"


def windows_from(raw: Mapping[str, Any], window: int, layers: int, where: str) -> tuple[int | None, ...]:
    """Return the windows of Qwen's keys: layer_types, or all layers from max_window_layers on. Raises ModelError."""
    if raw.get("layer_types") is not None:
        return windows_by_type(raw, window, layers, where)
    first = raw.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise ModelError(f"{where}: max_window_layers must be a number of layers, found {shown(first)}")
    return tuple(window if layer >= first else None for layer in range(layers))


def windows_every(
    raw: Mapping[str, Any], window: int, interval: int, layers: int, where: str
) -> tuple[int | None, ...]:
    """Return the windows of Gemma's keys: layer_types, or all layers but each sliding_window_pattern-th.

    Args:
        interval: default of sliding_window_pattern.
    """
    if raw.get("layer_types") is not None:
        return windows_by_type(raw, window, layers, where)
    interval = positive(raw, "sliding_window_pattern", where, interval)
    return tuple(window if (layer + 1) % interval else None for layer in range(layers))


def windows_by_type(raw: Mapping[str, Any], window: int, layers: int, where: str) -> tuple[int | None, ...]:
    """Return a window for each layer that layer_types calls sliding. Raises ModelError."""
    types, known = raw["layer_types"], {SLIDING: window, FULL: None}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise ModelError(f"{where}: layer_types must name {', '.join(known)} for each of {layers} layers")
    return tuple(known[kind] for kind in types)
