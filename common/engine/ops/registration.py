"""Registers operations that graphs treat as one call, through the dispatcher: `torch.ops.tandem.NAME`.

`torch.library.custom_op` would do the same but wrap every call in a dynamo guard, which costs more than a small
decode kernel on the CPU and loads dynamo at start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., object])

library: Any = torch.library  # partly untyped in torch
# The torch code of operations that change none of their arguments and that a compiler may inline.
REFERENCES: dict[object, Callable[..., object]] = {}


def register_op(
    name: str,
    function: Function,
    mutates: Sequence[str],
    fake: Callable[..., object],
    cpu: Callable[..., object] | None = None,
    cuda: Callable[..., object] | None = None,
    inlined: bool = True,
) -> Function:
    """Register `function` as `tandem::name` for every device; `cpu` and `cuda` replace it on theirs.

    Args:
        mutates: names of the arguments that it writes into; the result must not alias an argument.
        fake: same signature; returns outputs of the right shape without computing (meta tensors, compilers).
        cpu: takes the arguments of `function`, one after the other.
        cuda: launcher of the Triton kernel, which takes them too.
        inlined: compilers may replace a call by `function`; false if its shapes depend on values.

    Returns the dispatcher's entry, with the signature of `function`.
    """
    qualified = f"tandem::{name}"
    library.define(qualified, library.infer_schema(function, mutates_args=mutates))
    library.impl(qualified, "default", function)
    for device, implementation in (("cpu", cpu), ("cuda", cuda)):
        if implementation is not None:
            library.impl(qualified, device, implementation)
    library.register_fake(qualified, fake)
    registered = getattr(torch.ops.tandem, name).default
    if inlined and not mutates:
        REFERENCES[registered] = function
    return cast(Function, registered)
