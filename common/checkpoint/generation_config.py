"""Reads the end tokens and the default sampling from config.json and generation_config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.json_fields import Raw, is_finite, positive, shown
from common.errors import ModelError

MAX_EOS_IDS = 256


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """Sampling values of generation_config.json: defaults for requests that give none, as in vLLM.

    `do_sample` is not read, as in vLLM: a request without a temperature gets the file's, or 1.0.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # max_new_tokens; None: what the context leaves


NO_DEFAULTS = DefaultSampling()


def eos_ids(
    raw: Raw, generation: Raw, vocab: int, directory: Path, default: int | None = None
) -> tuple[int, ...]:
    """Return the ids of tokens that end a text; generation_config.json has precedence. Raises ModelError.

    `default` is the id of a family whose files have no such key, also not null.
    """
    found = generation.get("eos_token_id")
    where = directory / ("config.json" if found is None else "generation_config.json")
    if found is None and "eos_token_id" in raw:
        found = raw["eos_token_id"]
    elif found is None and default is not None and default < vocab:
        found = default
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if len(ids) > MAX_EOS_IDS:
        raise ModelError(f"{where}: eos_token_id has {len(ids)} ids; at most {MAX_EOS_IDS} are supported")
    for value in ids:
        if type(value) is not int or not 0 <= value < vocab:
            raise ModelError(
                f"{where}: eos_token_id {shown(value)} is not a token id below vocab_size {vocab}"
            )
    return tuple(dict.fromkeys(ids))


def default_sampling(generation: Raw, where: str) -> DefaultSampling:
    """Return the sampling values of generation_config.json. Raises ModelError."""

    def number(key: str, low: float, high: float, otherwise: float) -> float:
        value = generation.get(key)
        if value is None:
            return otherwise
        if not is_finite(value) or not low <= value <= high:
            raise ModelError(f"{where}: {key} must be between {low} and {high}, found {shown(value)}")
        return float(value)

    most = generation.get("max_new_tokens")
    return DefaultSampling(
        temperature=number("temperature", 0.0, 1e6, 1.0),
        top_p=number("top_p", 0.0, 1.0, 1.0) or 1.0,  # 0.0 is not a distribution; greedy is temperature 0
        top_k=max(0, int(number("top_k", -1, 1 << 31, 0))),
        min_p=number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=number("repetition_penalty", 0.01, 10.0, 1.0),
        max_tokens=None if most is None else positive(generation, "max_new_tokens", where),
    )
