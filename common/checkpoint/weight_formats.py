"""The formats in which checkpoints store the weights of their products, one record each. No torch.

To add one, write a module with its record, which reads `quantization_config`, a module in `common/engine/formats/`
with its `WeightFormat`, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.checkpoint.json_fields import Raw, shown
from common.errors import ModelError
from common.named import named


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The format in which a checkpoint stores the weights of products; one with settings uses a subclass."""

    method: str = "dense"  # a key of FORMATS

    @property
    def quantization(self) -> str:
        """The value of the config key `model.quantization` that weights were given; "none" if they are as stored."""
        return "none"

    def describe(self) -> str:
        """Return the format for logs and /server_info."""
        return self.method


@dataclass(frozen=True, slots=True)
class FormatRecord:
    """One format."""

    # Reads quantization_config (and where it is); raises ModelError for what is not supported.
    parse: Callable[[Raw, str], StoredWeights]
    # "module:attribute" of (StoredWeights, Placement) -> WeightFormat, imported only by engines.
    engine: str


DENSE = StoredWeights()
DENSE_RECORD = FormatRecord(lambda raw, where: DENSE, "common.engine.formats.dense:dense_format")

# quantization_config.quant_method -> "module:attribute" of its FormatRecord
FORMATS = {
    DENSE.method: "common.checkpoint.weight_formats:DENSE_RECORD",
    "fp8": "common.checkpoint.fp8_record:RECORD",
    "compressed-tensors": "common.checkpoint.compressed_tensors:RECORD",
    "modelopt": "common.checkpoint.modelopt:RECORD",
}


def format_record(method: str) -> FormatRecord:
    """Return the record of a key of FORMATS."""
    record = named(FORMATS[method])
    assert isinstance(record, FormatRecord)
    return record


def stored_weights(raw: Raw, where: str) -> StoredWeights:
    """Read `quantization_config` of config.json; weights are dense without it. Raises ModelError."""
    config = raw.get("quantization_config")
    if config is None:
        return DENSE
    method = config.get("quant_method", "of unknown kind") if isinstance(config, dict) else config
    if isinstance(config, dict) and isinstance(method, str) and method in FORMATS:
        return format_record(method).parse(config, f"{where}: quantization_config")
    said = method if isinstance(method, str) else shown(method)
    quantised = [name for name in FORMATS if name != DENSE.method]
    known = ", ".join(("float32, bfloat16 and float16 weights", *quantised))
    raise ModelError(
        f"{where}: quantization_config: quantization {said[:80]} is not supported; supported are {known}: use such a "
        "checkpoint, or a dense one with model.quantization: fp8"
    )
