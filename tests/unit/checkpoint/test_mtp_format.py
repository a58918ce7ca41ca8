"""Which architectures of config.json have MTP modules."""

from __future__ import annotations

from common.checkpoint.mtp_format import ARCHITECTURES, has_modules


def test_families_with_output_norms_have_no_modules() -> None:
    """No form of a module is published for them, and its layer would miss their norms."""
    assert ARCHITECTURES["Qwen3ForCausalLMNextN"] == "Qwen3ForCausalLM"
    assert not {"Gemma3ForCausalLMNextN", "Olmo2ForCausalLMNextN"} & set(ARCHITECTURES)
    assert has_modules({"architectures": ["Qwen3ForCausalLM"], "num_nextn_predict_layers": 1})
    assert not has_modules({"architectures": ["Gemma3ForCausalLM"], "num_nextn_predict_layers": 1})
