"""Reads one .bin file of torch.save and writes a safetensors file: the child process of `deploy/convert`.

    python -m deploy.pickled_weights BIN SAFETENSORS MEMORY_BYTES OUTPUT_BYTES CPU_SECONDS

A .bin file is a pickle, which is a program. `weights_only=True` executes none of it but a list of constructors that
torch allows. In case it executes more, this process is confined: it has no network, and limits on memory, CPU time and
output. It is the only module that may call `torch.load` (tests/architecture/test_source_rules.py).

The first line of its output says whether it has no network. If it fails, stderr has one line.
"""

from __future__ import annotations

import ctypes
import errno
import resource
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.resource_limits import lower_limit

if TYPE_CHECKING:
    from torch import Tensor

ISOLATED, SHARED = "no network", "network"
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of sched.h
REFUSED = "Weights only load failed"  # how torch's error begins
WRAPPED = "state_dict"  # some files have the tensors under this key
OPEN_FILES = 256


class Unreadable(Exception):
    """The file cannot be converted. The text says why."""


def main(source: Path, target: Path, memory: int, output: int, seconds: int) -> None:
    """Convert one file. `memory` is added to what the process has after importing torch."""
    # Before torch starts threads: a process with several may not enter another user namespace.
    print(ISOLATED if leave_network() else SHARED, flush=True)
    import torch
    from safetensors.torch import save_file

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(pages * resource.getpagesize() + memory, output, seconds)
    content = torch.load(  # noqa: TID251
        source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source)
    )
    save_file(tensors_of(content, torch.Tensor), target, metadata={"format": "pt"})


def leave_network() -> bool:
    """Move this process to a network namespace without interfaces. Returns False if the system does not permit it."""
    unshare = ctypes.CDLL(None).unshare
    return bool(unshare(NEW_NETWORK) == 0 or unshare(NEW_USER | NEW_NETWORK) == 0)


def limit(memory: int, output: int, seconds: int) -> None:
    """Limit address space, the size of every written file, and CPU time. No core dumps."""
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, output),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        lower_limit(kind, value)


def tensors_of(content: Any, kind: type[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, each with storage of its own. Raises Unreadable for any other content."""
    if isinstance(content, dict) and isinstance(content.get(WRAPPED), dict):
        content = content[WRAPPED]
    if not isinstance(content, dict) or not content:
        raise Unreadable(f"contains a {type(content).__name__}, not the tensors of a model")
    found = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, kind):
            raise Unreadable(f"{str(name)[:200]!r} is a {type(value).__name__}, not a tensor")
        found[name] = value.detach().contiguous().clone()
    return found


def reason_of(error: Exception) -> str:
    """Return one line for whatever the file made torch raise."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if first.startswith(REFUSED):
        return "it contains more than tensors, which is not loaded because it might run code"
    # How torch reads past the end of a file.
    if isinstance(error, EOFError) or (isinstance(error, OSError) and error.errno == errno.EINVAL):
        return "it ends too early: it is not a file of torch.save, or it is truncated"
    return first[:500]


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), *(int(each) for each in sys.argv[3:6]))
    except Exception as error:
        print(reason_of(error), file=sys.stderr)
        sys.exit(1)
