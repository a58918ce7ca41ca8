"""Key files: NAME.key is public and exists on every host, NAME.key_secret (0600) only on the host of NAME.

The key of a pattern of names like `decode-*` is in decode-ANY.key; all nodes of the pattern have its secret.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import zmq.auth

from common.errors import ConfigError
from common.file_lock import lock
from common.node_names import ANY


def public_file(directory: Path, name: str) -> Path:
    return directory / f"{_stem(name)}.key"


def secret_file(directory: Path, name: str) -> Path:
    return directory / f"{_stem(name)}.key_secret"


def _stem(name: str) -> str:
    """Return the beginning of the file names of a key. No node's name has capitals, so no node has a pattern's file."""
    return name.replace(ANY, "ANY")


def make_key_pairs(directory: Path, names: Iterable[str]) -> list[str]:
    """Make the missing pairs in a directory of mode 0700 and return their names.

    Processes may call this at the same time: each pair is made once. Raises ConfigError with the remedy.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(directory)
        wanted = list(names)
        if not _missing(directory, wanted):
            return []  # without the lock file, since the disk may be read-only
        with _locked(directory):
            missing = _missing(directory, wanted)
            for name in missing:
                _make_pair(directory, name)
    except OSError as error:
        raise ConfigError(
            "", f"cannot make keys in {directory}: {error.strerror}; make it writable for this user"
        ) from error
    return missing


def _refuse_foreign(directory: Path) -> None:
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise ConfigError(
            "", f"{directory} is a link, belongs to another user, or others can write to it; remove it"
        )


def _missing(directory: Path, names: Iterable[str]) -> list[str]:
    """Return the names without a complete pair. The public file of a pair appears last."""
    return [
        n for n in names if not (secret_file(directory, n).exists() and public_file(directory, n).exists())
    ]


def _make_pair(directory: Path, name: str) -> None:
    """Make a pair in a temporary directory first, so that no half-written or readable secret is ever visible."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory) as made:
        public, secret = zmq.auth.create_certificates(made, name)
        os.chmod(secret, 0o600)
        os.replace(secret, secret_file(directory, name))
        os.replace(public, public_file(directory, name))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    path = directory / ".lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)
