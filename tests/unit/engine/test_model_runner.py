"""A decode step with its sampling, as a graph would record it: no call may synchronize with the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.engine.forward.batch import ForwardMode
from common.engine.forward.model_runner import load_model
from common.engine.sampling.sampler import SamplingBatch, sample
from tests.unit.engine import families
from tests.unit.engine.paged_driver import Driver

HOST_SYNCS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


class Calls(TorchDispatchMode):
    """Records the names of the operations that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition(".")[0])
        if func.name().startswith("aten::index.") and any(
            i.dtype == torch.bool for i in args[1] if i is not None
        ):
            self.names.append("aten::masked_select")
        return func(*args, **(kwargs or {}))


def test_a_decode_step_and_its_sampling_never_wait_for_the_device(tmp_path: Path) -> None:
    model = load_model(families.save(families.build("qwen3-layer-types-bias"), tmp_path))[0]
    driver = Driver(model, [torch.arange(30), torch.arange(20)], 16)
    driver.run([0, 1], [20, 10])
    batch = driver.batch([0, 1], [1, 1], ForwardMode.DECODE)
    sampling = SamplingBatch(
        temperature=torch.tensor([0.0, 0.9]),
        top_p=torch.tensor([1.0, 0.9]),
        top_k=torch.tensor([0, 20], dtype=torch.int32),
        min_p=torch.tensor([0.0, 0.1]),
        seed=torch.tensor([1, 2]),
        position=torch.tensor([21, 11]),
        all_greedy=False,
        any_filter=True,
        num_logprobs=2,
    )
    with Calls() as calls:
        sample(driver.runner(batch).logits, sampling)
    assert calls.names.count("tandem::rotary_kv_write") == 2
    assert calls.names.count("tandem::decode_attention") == 2
    assert not {name.partition("::")[2] for name in calls.names} & set(HOST_SYNCS)
    # An attention operation is one call: what it calls internally does not appear.
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in calls.names
