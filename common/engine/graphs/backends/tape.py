"""Graphs without a GPU: a tape of the calls that pass the dispatcher, which replay runs again on the same storages.

It behaves like a CUDA graph. Scalars and addresses are baked in; host computation between two calls is not recorded;
a host synchronisation, a copy from host data and a change of shape are refused during capture. Registered ops
(`torch.ops.tandem.*`) are one call each, whatever their CPU implementation does.

A tensor made during the capture is a temporary of each replay; if it is still referenced when the segment ends, it
moves to static memory and every replay copies its value there. All recordings of one recorder share that memory, as
CUDA graphs share a pool: an output is overwritten once another graph of the runner replays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.engine.graphs.backends.base import CaptureError
from common.engine.graphs.backends.tape_memory import (
    TapeMemory,
    is_whole,
    storage_of,
    tensors_in,
    writable,
)
from common.engine.graphs.backends.tape_refusals import SCALAR_LIFTS, refuse_call, refuse_method


@dataclass(slots=True, eq=False)
class _Call:
    """One recorded call: its static arguments, and the positions of temporaries among them."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    binds: tuple[tuple[int, int], ...]  # (position, temporary)
    list_binds: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # (position, ((item, temporary), ...))
    named_binds: tuple[tuple[str, int], ...]
    results: tuple[int | None, ...]  # the temporary of each result; None: not a new tensor
    single: bool  # the result is one tensor, not a sequence of tensors
    frees: tuple[int, ...] = ()  # temporaries that no later call reads


class TapeSegment:
    """Recorded calls; calling the segment replays them."""

    def __init__(self, calls: Sequence[_Call], size: int, exports: Sequence[tuple[int, Tensor]]) -> None:
        self.calls = calls
        self._size = size
        self.exports = exports

    def reads(self) -> Iterator[Tensor]:
        """Yield the static tensors that some call takes."""
        for call in self.calls:
            yield from tensors_in((*call.args, *call.kwargs.values()))

    def keep(self, used: set[int]) -> None:
        """Copy out only exports whose storage is in `used`."""
        self.exports = [(index, tensor) for index, tensor in self.exports if storage_of(tensor) in used]
        _plan_frees(self.calls, {index for index, _ in self.exports})

    @torch.inference_mode()
    def __call__(self) -> None:
        values: list[Any] = [None] * self._size
        for call in self.calls:
            args: Any = call.args
            if call.binds or call.list_binds:
                args = list(args)
                for position, index in call.binds:
                    args[position] = values[index]
                for position, items in call.list_binds:
                    filled = list(args[position])
                    for item, index in items:
                        filled[item] = values[index]
                    args[position] = filled
            kwargs = call.kwargs
            if call.named_binds:
                kwargs = {**kwargs, **{name: values[index] for name, index in call.named_binds}}
            result = call.function(*args, **kwargs)
            for made, value in zip(call.results, (result,) if call.single else result or ()):
                if made is not None:
                    values[made] = value
            for index in call.frees:
                values[index] = None
        for index, tensor in self.exports:
            value = values[index]
            if value.shape != tensor.shape:
                raise CaptureError(
                    f"a result changed its shape: {tuple(tensor.shape)} to {tuple(value.shape)}"
                )
            writable(tensor).copy_(writable(value, tensor))


class TapeRecorder:
    """A `Recorder` on the CPU."""

    name = "tape"
    warm_ups = 0  # no call tunes or compiles

    def __init__(self) -> None:
        self._tape: _Tape | None = None
        self._memory = TapeMemory()
        self._segments: list[TapeSegment] = []  # recorded in the current session
        self._taken: list[Tensor] = []  # handles of the session

    @contextmanager
    def session(self) -> Iterator[None]:
        self._memory.restart()
        self._segments, self._taken = [], []
        with torch.inference_mode():
            yield
        used = {storage_of(tensor) for segment in self._segments for tensor in segment.reads()}
        used |= {storage_of(tensor) for tensor in self._taken}
        for segment in self._segments:
            segment.keep(used)

    def begin(self) -> None:
        if self._tape is not None:
            raise CaptureError("a capture inside a capture")
        self._tape = _Tape()
        self._tape.__enter__()

    def resume(self, like: Tensor) -> Tensor:
        bridge = like.clone()
        self._memory.adopt([bridge])
        self.begin()
        return bridge

    def end(self) -> TapeSegment:
        tape = self._stop()
        assert tape is not None, "end without begin"
        segment = tape.segment(self._memory)
        self._segments.append(segment)
        return segment

    def abort(self) -> None:
        self._stop()

    def handle(self, tensor: Tensor) -> _Held:
        self._taken.append(tensor)
        return _Held(tensor)

    def memory(self) -> int:
        return self._memory.nbytes

    def _stop(self) -> _Tape | None:
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.__exit__(None, None, None)
        return tape


@dataclass(frozen=True, slots=True)
class _Held:
    """The tensor itself: the CPU allocator has no pool that would keep the memory."""

    tensor: Tensor

    def open(self) -> Tensor:
        return self.tensor


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records calls while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._index: dict[int, int] = {}  # id of a living tensor made here -> temporary
        self._refs: list[weakref.ref[Tensor]] = []  # per temporary
        self._pinned: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (static tensor, alias of its memory)
        self._methods = _MethodGuard()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, loads dynamo (seconds, and memory) at the first recorded call

    def __enter__(self) -> _Tape:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._methods.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._methods.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._methods.assigning and func.name() in SCALAR_LIFTS):
            refuse_call(func, args, kwargs)
        with self._methods.suspended():
            result = func(*args, **kwargs)
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = list(tensors_in((*args, *kwargs.values())))
        made = [tensor for tensor in tensors_in((result,)) if not any(tensor is other for other in given)]
        if not func._schema.is_mutable:
            static = {storage_of(tensor) for tensor in given if id(tensor) not in self._index}
            if all(storage_of(tensor) in static for tensor in made) and (made or _has_tensors(result)):
                return  # views of static memory are static; a returned argument is not new
        binds, list_binds = [], []
        plain: list[Any] = []
        for position, arg in enumerate(args):
            if isinstance(arg, Tensor) and id(arg) in self._index:
                binds.append((position, self._index[id(arg)]))
                plain.append(None)
            elif isinstance(arg, (list, tuple)) and any(isinstance(item, Tensor) for item in arg):
                items = [(i, self._index[id(t)]) for i, t in enumerate(arg) if id(t) in self._index]
                if items:
                    list_binds.append((position, tuple(items)))
                plain.append([None if id(item) in self._index else self._pin(item) for item in arg])
            else:
                plain.append(self._pin(arg))
        named = tuple(
            (name, self._index[id(value)]) for name, value in kwargs.items() if id(value) in self._index
        )
        taken = {name for name, _ in named}
        static_kwargs = {name: self._pin(value) for name, value in kwargs.items() if name not in taken}
        is_made = {id(tensor) for tensor in made}
        results = tuple(self._new(t) if id(t) in is_made else None for t in tensors_in((result,)))
        single = isinstance(result, Tensor)
        self._calls.append(
            _Call(
                func._op, tuple(plain), static_kwargs, tuple(binds), tuple(list_binds), named, results, single
            )
        )

    def _new(self, tensor: Tensor) -> int:
        index, key = len(self._refs), id(tensor)
        known = self._index
        self._refs.append(weakref.ref(tensor, lambda _: known.pop(key, None)))
        known[key] = index
        return index

    def _pin(self, arg: Any) -> Any:
        """Return an alias of a static tensor: if its owner replaces the tensor's memory later, the tape is
        unaffected.
        """
        if not isinstance(arg, Tensor):
            return arg
        if id(arg) not in self._pinned:
            self._pinned[id(arg)] = (arg, arg.detach())
        return self._pinned[id(arg)][1]

    def segment(self, memory: TapeMemory) -> TapeSegment:
        """Return the segment, after the mode was left. Tensors that are still referenced become its outputs."""
        groups: dict[int, list[tuple[int, Tensor]]] = {}  # storage -> (temporary, tensor)
        for index, ref in enumerate(self._refs):
            tensor = ref()
            if tensor is not None and self._index.get(id(tensor)) == index:
                groups.setdefault(storage_of(tensor), []).append((index, tensor))
        exports = []
        for group in groups.values():
            whole = [(index, tensor) for index, tensor in group if is_whole(tensor)]
            exports += whole[:1] or group
            memory.adopt([tensor for _, tensor in group])
        return TapeSegment(self._calls, len(self._refs), exports)


class _MethodGuard(TorchFunctionMode):
    """Detects methods such as tolist that read memory without passing the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self._inside_call = False
        self.assigning = False  # in `x[...] = value`, where a plain number is lifted and then filled in

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context inside an op, whose implementation may read CPU memory."""
        before, self._inside_call = self._inside_call, True
        try:
            yield
        finally:
            self._inside_call = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._inside_call:
            return func(*args, **(kwargs or {}))
        refuse_method(func)
        self.assigning = func is Tensor.__setitem__
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.assigning = False


def _plan_frees(calls: Sequence[_Call], kept: set[int]) -> None:
    """Free each temporary after the last call that reads or makes it."""
    seen = set(kept)
    for call in reversed(calls):
        used = {index for _, index in (*call.binds, *call.named_binds)}
        used |= {index for _, items in call.list_binds for _, index in items}
        used |= {index for index in call.results if index is not None}
        call.frees = tuple(used - seen)
        seen |= used


def _has_tensors(result: Any) -> bool:
    return next(tensors_in((result,)), None) is not None
