"""One piece of a body, compiled by inductor: our kernels opened up, and a single call to whoever records it.

Inductor sees no further than an operation of `tandem::`, so those that change nothing are replaced by their torch
references: what it makes of a norm, a product and an activation is its own. The result is called through one operation,
since it launches kernels behind the dispatcher's back, where a tape would miss them.

Nothing is read from a cache on disk: inductor's caches of graphs are pickles.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from common.engine.ops.registration import REFERENCES, library

OPTIONS = {
    "compile_threads": 1,  # a node starts no processes of its own
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "triton.cudagraphs": False,  # segments are captured by our recorder
}
_pieces: weakref.WeakValueDictionary[int, CompiledPiece] = weakref.WeakValueDictionary()
_numbers = itertools.count()

library.define("tandem::run_piece", "(int piece, Tensor[] tensors, int[] sizes) -> Tensor[]")
library.impl("tandem::run_piece", "default", lambda piece, *given: _pieces[piece].compute(*given))


class CompiledPiece(nn.Module):
    """Called as the piece that it was made from."""

    def __init__(self, piece: GraphModule) -> None:
        super().__init__()
        outputs = piece.graph.output_node().args[0]
        self._single = isinstance(outputs, Node)
        self._is_size = [isinstance(value, torch.SymInt) for value in given_to(piece)]
        self._compiled = compile_piece(piece)
        self._number = next(_numbers)
        _pieces[self._number] = self

    def forward(self, *args: Any) -> Any:
        tensors = [arg for arg, is_size in zip(args, self._is_size, strict=True) if not is_size]
        sizes = [int(arg) for arg, is_size in zip(args, self._is_size, strict=True) if is_size]
        results = torch.ops.tandem.run_piece.default(self._number, tensors, sizes)
        return results[0] if self._single else tuple(results)

    def compute(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The kernels themselves, for the operation."""
        left: tuple[Any, Any] = iter(tensors), iter(sizes)
        results = self._compiled(*(next(left[is_size]) for is_size in self._is_size))
        return [results] if self._single else list(results)


def compile_piece(piece: GraphModule) -> Callable[..., Any]:
    """By inductor, for any number of tokens. Changes `piece`; the trace that it comes from must be in progress."""
    from torch._functorch import config as functorch_config
    from torch._inductor import compile as inductor

    for node in piece.graph.nodes:
        node.target = REFERENCES.get(node.target, node.target)
    piece.recompile()
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = inductor(piece, given_to(piece), options=dict(OPTIONS))
    return compiled


def given_to(piece: GraphModule) -> list[Any]:
    """What the trace passed: fake tensors, and numbers of tokens as symbols."""
    return [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]


def form(piece: GraphModule) -> str:
    """Equal for pieces that differ in names alone: one compilation serves them all."""
    order = {node: index for index, node in enumerate(piece.graph.nodes)}
    lines = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            if isinstance(value, Tensor):
                value = (value.dtype, value.device, tuple(value.shape), value.stride())
            lines.append(f"given {value}")
        else:
            args, kwargs = (map_arg(each, lambda other: order[other]) for each in (node.args, node.kwargs))
            lines.append(f"{node.op} {node.target} {args} {kwargs}")
    return "\n".join(lines)
