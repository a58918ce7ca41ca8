"""One piece of a body, compiled by inductor: it inlines tandem's operations and appears as one call to a recorder.

Inductor cannot see into an operation of `tandem::`, so operations without side effects are replaced by their torch
references and inductor writes its own norm, product and activation. The result is called through one operation,
because it launches kernels without the dispatcher, which a tape would miss.

The caches of inductor on disk stay off: its graph caches are pickles.
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
from common.observability.start_progress import progressed

OPTIONS = {
    "compile_threads": 1,  # compile in the node's process, not in others
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "triton.cudagraphs": False,  # segments are captured by our recorder
}
_pieces: weakref.WeakValueDictionary[int, CompiledPiece] = weakref.WeakValueDictionary()
_numbers = itertools.count()

library.define("tandem::run_piece", "(int piece, Tensor[] tensors, int[] sizes) -> Tensor[]")
library.impl("tandem::run_piece", "default", lambda piece, *given: _pieces[piece].compute(*given))


class CompiledPiece(nn.Module):
    """Called like the piece that it was made from."""

    def __init__(self, piece: GraphModule) -> None:
        super().__init__()
        outputs = piece.graph.output_node().args[0]
        self._single = isinstance(outputs, Node)
        self._is_size = [isinstance(value, torch.SymInt) for value in given_to(piece)]
        self._compiled = compile_piece(piece)
        progressed("compiled a piece of the body")
        self._number = next(_numbers)
        _pieces[self._number] = self

    def forward(self, *args: Any) -> Any:
        tensors = [arg for arg, is_size in zip(args, self._is_size, strict=True) if not is_size]
        sizes = [int(arg) for arg, is_size in zip(args, self._is_size, strict=True) if is_size]
        results = torch.ops.tandem.run_piece.default(self._number, tensors, sizes)
        return results[0] if self._single else tuple(results)

    def compute(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Run the compiled kernels; called by the operation."""
        left: tuple[Any, Any] = iter(tensors), iter(sizes)
        results = self._compiled(*(next(left[is_size]) for is_size in self._is_size))
        return [results] if self._single else list(results)


def compile_piece(piece: GraphModule) -> Callable[..., Any]:
    """Compile a piece with inductor for any number of tokens.

    Changes `piece`. The trace that it comes from must still be in progress.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile as inductor

    for node in piece.graph.nodes:
        node.target = REFERENCES.get(node.target, node.target)
    piece.recompile()
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = inductor(piece, given_to(piece), options=dict(OPTIONS))
    return compiled


def given_to(piece: GraphModule) -> list[Any]:
    """Return the arguments of the trace: fake tensors, and numbers of tokens as symbols."""
    return [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]


def form(piece: GraphModule) -> str:
    """Return a text that is equal for pieces that differ only in names, so that one compilation serves them all."""
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
