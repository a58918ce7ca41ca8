"""Reads a model directory: config.json, rope, drafts, MTP, vision, weight headers and formats; no torch."""
