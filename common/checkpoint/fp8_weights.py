"""Weights in FP8 (e4m3): which products of a checkpoint have them, with which scales. No torch.

The records of the published forms (`fp8_record.py`, `compressed_tensors.py`, `modelopt.py`) read them from a config;
`ONLINE` is the form of weights that are quantised while they are loaded.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.checkpoint.json_fields import shown
from common.checkpoint.weight_formats import StoredWeights
from common.errors import ModelError

TENSOR, CHANNEL, BLOCK = "tensor", "channel", "block"
BLOCK_SIZE = 128  # rows and columns of a block
EVERYTHING = "Linear"  # the pattern that every product matches
REGEX, GLOB, EXACT, ENDING = "re:", "glob:", "exact:", "ending:"
MAX_PATTERNS, MAX_PATTERN = 65_536, 512
# A pattern with more repetitions, or with a repeated group, may take very long on a name that does not match.
MAX_REPETITIONS = 4
# Beginnings of the language model's names in checkpoints with other parts, and in those without.
NESTED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """The scales of one product's weight and of its inputs.

    Inputs are quantised while serving: by blocks if the weight is, else by rows, or with the checkpoint's scale.
    """

    weights: str  # TENSOR, CHANNEL or BLOCK
    static: bool = False  # inputs are quantised with one scale, which the checkpoint has
    # The suffix of the weight's scales. A tensor's scale may also have the other name.
    scale: str = "weight_scale"

    def __str__(self) -> str:
        of_weights = {TENSOR: "per tensor", CHANNEL: "per channel", BLOCK: "per block"}[self.weights]
        return f"{of_weights}, {'static' if self.static else 'dynamic'} activations"


@dataclass(frozen=True, slots=True)
class Fp8Weights(StoredWeights):
    """The weights of a checkpoint whose products are in FP8, except some that are dense."""

    # (pattern, scheme): the first pattern that a product's name matches decides.
    schemes: tuple[tuple[str, Fp8Scheme], ...] = ()
    # Patterns of products that are dense.
    ignored: tuple[str, ...] = ()
    # The checkpoint is dense, and weights are quantised while they are loaded.
    online: bool = False

    @property
    def quantization(self) -> str:
        return "fp8" if self.online else "none"

    def describe(self) -> str:
        schemes = "; ".join(dict.fromkeys(str(scheme) for _, scheme in self.schemes))
        online = ", quantised at load time" if self.online else ""
        return f"fp8 ({schemes}{online})"

    def scheme_of(self, product: str) -> Fp8Scheme | None:
        """Return the scheme of a product, by its name in a text-only checkpoint without `.weight`; None: dense."""
        if any(matches(pattern, product) for pattern in self.ignored):
            return None
        return next((scheme for pattern, scheme in self.schemes if matches(pattern, product)), None)


# Small products that steer a recurrence, and the LM head, stay dense.
ONLINE = Fp8Weights(
    "fp8",
    ((EVERYTHING, Fp8Scheme(CHANNEL)),),
    ("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba"),
    online=True,
)


def matches(pattern: str, product: str) -> bool:
    """Return whether a product, by its name in a text-only checkpoint, is one that the pattern means.

    A pattern is EVERYTHING, REGEX with an expression that matches from the start of a name, GLOB with wildcards, EXACT
    with a whole name, consecutive parts of a name between dots, or ENDING with such parts or the end of a name.
    """
    if pattern == EVERYTHING:
        return True
    if pattern.startswith(REGEX):
        return any(re.match(pattern.removeprefix(REGEX), name) for name in _spellings(product))
    if pattern.startswith(GLOB):
        wild = pattern.removeprefix(GLOB)
        return any(fnmatch.fnmatchcase(name, wild) for name in _spellings(product))
    if pattern.startswith(EXACT):
        return pattern.removeprefix(EXACT) in _spellings(product)
    parts = pattern.removeprefix(ENDING)
    if parts != pattern and any(name.endswith(parts) for name in _spellings(product)):
        return True
    return any(f".{parts.removesuffix('.')}." in f".{name}." for name in _spellings(product))


def check_kv_scheme(scheme: object, key: str, where: str) -> None:
    """Raise ModelError if a checkpoint was made for keys and values in another format than FP8.

    Args:
        scheme: the config's value of `key`: None, the name of a format, or the description of its numbers.
    """
    if isinstance(scheme, dict):
        scheme = (scheme.get("type"), scheme.get("num_bits"))
    if scheme not in (None, ("float", 8), "FP8", "static"):
        raise ModelError(
            f"{where}: {key} {shown(scheme)} is not supported, only FP8; without the key keys and values are kept as "
            "kv.dtype says"
        )


def checked_patterns(found: object, key: str, where: str) -> tuple[str, ...]:
    """Return a config's list of patterns. Raises ModelError for what could not be matched in a short time."""
    if found is None:
        return ()
    if (
        not isinstance(found, list)
        or len(found) > MAX_PATTERNS
        or not all(isinstance(each, str) and 0 < len(each) <= MAX_PATTERN for each in found)
    ):
        raise ModelError(
            f"{where}: {key} must be a list of at most {MAX_PATTERNS} names, found {shown(found)}"
        )
    for pattern in found:
        if pattern.startswith(REGEX):
            _check_regex(pattern.removeprefix(REGEX), key, where)
    return tuple(found)


def _check_regex(pattern: str, key: str, where: str) -> None:
    # An optional group counts as a repetition, because what it contains may match in two places.
    repetitions = len(re.findall(r"[*+{]|\)\?", pattern.replace("\\", "")))
    if repetitions > MAX_REPETITIONS or re.search(r"\)[*+{]", pattern):
        raise ModelError(
            f"{where}: {key}: the expression {shown(pattern)} has a repeated group or more than {MAX_REPETITIONS} "
            "repetitions, which may take too long; list the names instead"
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{where}: {key}: {shown(pattern)} is not a regular expression: {error}") from error


def _spellings(product: str) -> Iterable[str]:
    """Yield the names that a product has in the checkpoints of models with and without other parts."""
    yield product
    for nested, plain in NESTED:
        if product.startswith(plain):
            yield nested + product.removeprefix(plain)
