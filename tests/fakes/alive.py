"""Measures memory by counting the tensors that operations return, on any device and without timing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Measures the peak size of all operation results that are still referenced, without the storage of `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {each.untyped_storage()._cdata for each in known}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0  # bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(nbytes for _, nbytes in self._storages.values()))
        return out
