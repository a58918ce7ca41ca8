"""Counts what a forward launches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Names of calls that compute or copy: on a GPU a launch each, but for gated_linear, which has two."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not made or any(each.untyped_storage()._cdata not in given for each in made):
            self.names.append(func.name().partition("::")[2])
        return out
