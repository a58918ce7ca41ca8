"""Algorithms without a draft model."""

from __future__ import annotations

from common.speculation.algorithm import Algorithm

NONE = Algorithm(name="none", drafts=False)
NGRAM = Algorithm(name="ngram")
