"""`deploy/convert DIR`: writes safetensors files from the .bin files of a model directory, next to them.

Many draft heads are published only as `pytorch_model.bin`, which servers refuse: the file is a pickle. Each file is
read in a child process (deploy/pickled_weights.py) without network, with limits on memory, time and output. What the
child wrote is checked like any safetensors file before it gets its name. Servers and `deploy/up` never convert.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated

import typer

from common.checkpoint.model_directory import MIB, real_path
from common.checkpoint.model_files import INDEX, MAX_INDEX_BYTES, MAX_INDEX_VALUES, PICKLED, SINGLE, read_json
from common.checkpoint.safetensors_header import WeightFile, read_header
from common.errors import ModelError
from common.one_thread import ONE_THREAD
from deploy.command import run_program
from deploy.pickled_weights import ISOLATED

PICKLED_INDEX, PICKLED_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
# The child's limits besides those that grow with the file: room for torch's own needs.
BASE_MEMORY, BASE_OUTPUT, BASE_SECONDS = 1 << 30, 16 * MIB, 120
BYTES_PER_SECOND = 20 * MIB
MAX_FILES = 1024
SHOWN_BYTES = 500  # limit for what the child printed
Say = Callable[[str], None]


def main(directory: Annotated[Path, typer.Argument(help="Model directory with .bin files")]) -> None:
    """Convert .bin files to model.safetensors, or to one file for each of them and an index."""
    try:
        convert(directory, lambda line: print(line, flush=True))
    except ModelError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None


def convert(directory: Path, say: Say) -> None:
    """Convert the directory's .bin files. Raises ModelError; it leaves the directory as it was."""
    present = [name for name in (SINGLE, INDEX) if (directory / name).exists()]
    if present:
        raise ModelError(f"{directory} has {present[0]} already; remove it to convert the .bin files again")
    sources = pickled_files(directory)
    partial = [directory / f".{source.stem}.{os.getpid()}.safetensors" for source in sources]
    names = [SINGLE]
    if len(sources) > 1:
        names = [f"model-{at:05}-of-{len(sources):05}.safetensors" for at in range(1, len(sources) + 1)]
    try:
        files = [_converted(source, path, say) for source, path in zip(sources, partial, strict=True)]
        for path, name in zip(partial, names, strict=True):
            path.replace(directory / name)
        if len(files) > 1:
            _write_index(directory, files, names)
    except OSError as error:
        for name in (*names, INDEX):
            (directory / name).unlink(missing_ok=True)
        raise ModelError(f"cannot write to {directory}: {error.strerror or error}") from error
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    say(f"wrote {', '.join(names[:4])}{' ...' if len(names) > 4 else ''} in {directory}")


def pickled_files(directory: Path) -> list[Path]:
    """Return the .bin files of the model: those that its index names, or the only one. Raises ModelError."""
    index = directory / PICKLED_INDEX
    if index.is_file():
        weight_map = read_json(index, MAX_INDEX_BYTES, MAX_INDEX_VALUES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: weight_map must give the name of a file for each tensor")
        names = sorted(set(weight_map.values()))
    elif (directory / PICKLED_SINGLE).is_file():
        names = [PICKLED_SINGLE]
    else:
        try:
            names = sorted(path.name for path in directory.iterdir() if path.suffix == PICKLED)
        except OSError as error:
            raise ModelError(f"cannot read {directory}: {error.strerror or error}") from error
        if len(names) != 1:
            found = ", ".join(names[:4]) or "none"
            raise ModelError(
                f"{directory}: cannot tell which .bin files are the model's (found {found}); they are "
                f"{PICKLED_SINGLE}, those that {PICKLED_INDEX} names, or the only one"
            )
    if not 0 < len(names) <= MAX_FILES:
        raise ModelError(f"{index} names {len(names)} files; 1 to {MAX_FILES} are converted")
    for name in names:
        if Path(name).name != name or not name.endswith(PICKLED):
            raise ModelError(f"{index} names {name!r}; only {PICKLED} files beside it are converted")
        real_path(directory / name)
    return [directory / name for name in names]


def _converted(source: Path, target: Path, say: Say) -> WeightFile:
    """Convert one file in a child process and check what it wrote. Raises ModelError."""
    size = real_path(source).stat().st_size
    seconds = BASE_SECONDS + size // BYTES_PER_SECOND
    limits = (BASE_MEMORY + 3 * size, BASE_OUTPUT + size, seconds)
    command = [sys.executable, "-m", "deploy.pickled_weights", str(real_path(source)), str(target)]
    # Files, not pipes: the child's limit on the size of files bounds what it prints, too.
    with TemporaryFile() as printed, TemporaryFile() as complaints:
        try:
            status = subprocess.run(
                [*command, *map(str, limits)],
                env=os.environ | ONE_THREAD,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=complaints,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"{source} is not converted after {seconds} s: it was given up") from error
        reason, said = _last_line(complaints), _beginning(printed)
    if status:
        raise ModelError(f"{source} cannot be converted: {reason or f'its process ended with {status}'}")
    if not said.startswith(ISOLATED):
        say(f"{source.name}: read in a process with network, since this system permits no network namespace")
    return read_header(target)


def _beginning(printed: IO[bytes]) -> str:
    printed.seek(0)
    return printed.read(SHOWN_BYTES).decode(errors="replace")


def _last_line(printed: IO[bytes]) -> str:
    """Return the end of what was printed, one line of at most SHOWN_BYTES; "" if nothing was."""
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - SHOWN_BYTES))
    lines = printed.read(SHOWN_BYTES).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _write_index(directory: Path, files: list[WeightFile], names: list[str]) -> None:
    weight_map = {tensor: name for file, name in zip(files, names, strict=True) for tensor in file.tensors}
    total = sum(file.num_bytes for file in files)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    run_program(main, "deploy/convert")
