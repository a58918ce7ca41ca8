"""The record of tests/fakes/int8_format.py, which parses the config.json of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint.weight_formats import FormatRecord, StoredWeights
from common.errors import ModelError

METHOD = "int8-rows"
ROW = "tests.fakes.int8_record:RECORD"


@dataclass(frozen=True, slots=True)
class Int8Weights(StoredWeights):
    """The quantization_config of a checkpoint."""

    ignored: tuple[str, ...] = ()  # names of products that remain dense


def parse(raw: Mapping[str, Any], where: str) -> Int8Weights:
    if raw.get("activation_bits") != 8:
        raise ModelError(f"{where}: activation_bits must be 8, found {raw.get('activation_bits')!r}")
    return Int8Weights(METHOD, tuple(raw["ignore"]))


RECORD = FormatRecord(parse, "tests.fakes.int8_format:Int8Format")
