"""Opens the files of a model directory: regular files inside it, of bounded size. No torch.

A model directory is untrusted input. A name is opened only if it leads to a regular file of the directory itself, or
along the links of a Hugging Face cache (`snapshots/REVISION/NAME -> ../../blobs/HASH`). Other links, devices and
pipes are refused, so that loading a model reads nothing but the model.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import ModelError
from common.observability.start_progress import progressed

SNAPSHOTS, BLOBS = "snapshots", "blobs"  # folders of a Hugging Face cache
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
FETCH_LFS = (
    "is a Git-LFS pointer: the repository was cloned without its large files; run `git lfs pull` in it, or download "
    "the model with `hf download`"
)
MIB = 1 << 20
MAX_TEMPLATE_BYTES = 1 * MIB
MAX_TOKENIZER_BYTES = 128 * MIB  # the largest published ones have some 35 MB
MAX_TOKENIZER_CONFIG_BYTES = 16 * MIB


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of the model directory `path.parent`, or of a folder in it, for reading.

    Raises ModelError, also for errors while reading. Counts as a step of a start.
    """
    # Before the disk is asked, which may not answer: whoever ends the start has to know for which file it waits.
    progressed(f"began to read {path}")
    try:
        # A pipe would block without O_NONBLOCK.
        descriptor = os.open(real_path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ModelError(f"{path} is not a regular file")
            yield file
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def real_path(path: Path) -> Path:
    """Return the real path of a file of the model directory `path.parent`. Raises ModelError if it is outside."""
    try:
        directory = path.parent.resolve(strict=True)
        real = path.resolve(strict=True)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (RuntimeError, ValueError) as error:  # a loop of links, or a zero byte in the name
        raise ModelError(f"cannot read {path}: {error}") from error
    if real.parent == directory or _is_blob(directory, real):
        return real
    raise ModelError(
        f"{path} is a link to {real}, outside the model directory; copy the file into the directory, or give the "
        "directory that contains it"
    )


def _is_blob(directory: Path, real: Path) -> bool:
    """Return whether `directory` is a snapshot of a Hugging Face cache, or a folder in one, and `real` a blob of the
    same model.
    """
    return any(
        each.parent.name == SNAPSHOTS and real.parent == each.parent.parent / BLOBS
        for each in (directory, directory.parent)
    )


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises ModelError."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ModelError(f"{path} has {size} bytes; at most {most} are read")
        content = file.read(most + 1)
    if content.startswith(LFS_POINTER):
        raise ModelError(f"{path} {FETCH_LFS}")
    if len(content) > most:  # it grew while it was read
        raise ModelError(f"{path} has more than the {most} bytes that are read")
    return content


def read_text(path: Path, most: int) -> str:
    """Return the text of a UTF-8 file, as `read_bytes` reads it."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} cannot be read: it is not UTF-8 text ({error})") from error
