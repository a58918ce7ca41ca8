"""Checks the files of a model directory against SHA-256 sums as written by `sha256sum * > MANIFEST`. No torch.

Every file next to the manifest must be listed, and every listed file must exist and have its sum: an added file can
change what a model does just as a changed one can. Names that begin with a dot and folders are neither written by
that command nor read by tandem.

Files are hashed before they are loaded, not during loading: whoever can write to the directory during a start can
still replace them in between.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from common.checkpoint.model_directory import MIB, opened, read_bytes
from common.errors import ModelError

MAX_MANIFEST_BYTES = 4 * MIB
BLOCK_BYTES = 4 * MIB
WEIGHTS = ".safetensors"
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\]+)")

Progress = Callable[[int, int], None]  # (hashed bytes, bytes in total)


def check_manifests(
    manifests: Iterable[tuple[Path, Path]], weights: bool, progress: Progress | None = None
) -> None:
    """Check each (model directory, manifest). Raises ModelError with the first file that differs.

    Args:
        weights: also hash weight files. A process that does not load them only checks that they are listed and exist.
    """
    for directory, manifest in manifests:
        _check(directory, manifest, weights, progress)


def read_manifest(file: Path) -> Mapping[str, str]:
    """Return file name -> SHA-256 (hex). Raises ModelError with the line."""
    try:
        lines = read_bytes(file, MAX_MANIFEST_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8 text: {error}") from error
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = _LINE.fullmatch(line)
        if found is None or found[2] in (".", ".."):
            raise ModelError(
                f"{file}, line {number}: not a line of sha256sum for a file of the same directory; write the file in "
                "the model directory with `sha256sum * > MANIFEST`"
            )
        if found[2] in sums:
            raise ModelError(f"{file}, line {number}: {found[2]!r} is listed twice")
        sums[found[2]] = found[1]
    if not sums:
        raise ModelError(f"{file} lists no files")
    return sums


def _check(directory: Path, manifest: Path, weights: bool, progress: Progress | None) -> None:
    sums = dict(read_manifest(manifest))
    try:
        own = manifest.resolve().parent == directory.resolve()
        there = {each.name: each.stat().st_size for each in directory.iterdir() if not each.is_dir()}
    except OSError as error:
        raise ModelError(f"cannot read {directory}: {error.strerror or error}") from error
    if own:  # `sha256sum *` also lists an older manifest
        there.pop(manifest.name, None)
        sums.pop(manifest.name, None)
    unlisted = sorted(name for name in there if name not in sums and not name.startswith("."))
    if unlisted:
        raise ModelError(f"{directory / unlisted[0]} is not listed in {manifest}; remove it, or list it")
    missing = sorted(name for name in sums if name not in there)
    if missing:
        raise ModelError(f"{directory / missing[0]} is listed in {manifest} but does not exist")
    read = [name for name in sorted(sums) if weights or not name.endswith(WEIGHTS)]
    done, total = 0, sum(there[name] for name in read)
    for name in read:
        digest = hashlib.sha256()
        with opened(directory / name) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                done += len(block)
                if progress is not None:
                    progress(min(done, total), total)
        if digest.hexdigest() != sums[name]:
            raise ModelError(
                f"{directory / name} has the SHA-256 sum {digest.hexdigest()}, {manifest} lists {sums[name]}: the file "
                "was changed or damaged"
            )
