"""`deploy/api_key ID FILE`: create a random 256-bit API key, print it once, and append its hash to the key file.

`security.api_keys` names that file, and running routers reload it within a second. To revoke a key, remove its entry.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from common.api_key import MAX_WEIGHT, ApiKey
from common.config.api_keys import read_api_keys
from common.errors import ConfigError
from common.file_lock import lock
from common.messages.generation import MAX_PRIORITY
from common.resolved_path import resolved_path
from deploy.command import run_program

EXIT_REFUSED = 2
EXPIRES = "--expires"
PREFIX = "sk-tandem-"
TIME = re.compile(r"[0-9TZ:+ .-]+")
ENTRY = re.compile(r"^( *)- ", re.MULTILINE)
Limit = Annotated[int | None, typer.Option(min=1)]


def main(
    id_: Annotated[str, typer.Argument(metavar="ID", help="Name of the key in logs and timelines")],
    file: Annotated[Path, typer.Argument(help="Key file; created with mode 0600 if it does not exist")],
    scope: Annotated[list[str] | None, typer.Option(help="inference (default), admin, or both")] = None,
    expires: Annotated[
        str | None, typer.Option(EXPIRES, help="Date or time in UTC, such as 2027-01-31; not in the past")
    ] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrency: Limit = None,
    priority: Annotated[
        int | None,
        typer.Option(
            min=-MAX_PRIORITY,
            max=MAX_PRIORITY,
            help="Most urgent priority, that is the lowest number, that its requests may ask for; default 0",
        ),
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_WEIGHT, help="Share of the cluster relative to other keys; default 1"),
    ] = None,
) -> None:
    """Create an API key."""
    secret = PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, Any] = {
        "id": id_,
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "scopes": scope or ["inference"],
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "priority": priority,
        "weight": weight,
    }
    try:
        append(file, {name: value for name, value in entry.items() if value is not None}, expires)
    except (ConfigError, OSError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_REFUSED) from None
    print(secret)
    print(
        f"This is the key of {id_}; it is not shown again. Set security.api_keys to {file}, which holds its hash.",
        file=sys.stderr,
    )


def append(file: Path, entry: dict[str, Any], expires: str | None) -> tuple[ApiKey, ...]:
    """Add an entry, keep the comments of the file, and return all keys.

    The file is replaced atomically; a link that leads to it stays. Raises ConfigError if the file cannot be read, the
    entry is not valid in it, or `expires` is in the past.
    """
    if expires is not None and not TIME.fullmatch(expires):
        raise ConfigError(EXPIRES, f"{expires!r} is not a date; write 2027-01-31 or 2027-01-31T12:00:00Z")
    line = "- " + msgspec.json.encode(entry).decode()  # JSON is a subset of YAML
    if expires is not None:
        line = f"{line[:-1]}, expires: {expires}}}"
    file = resolved_path(file)
    if file.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        lock(directory, file.parent)  # two concurrent runs would lose one of the keys
        text = _text_of(file) if file.exists() else ""
        has_keys = any(row.strip() and not row.startswith("#") for row in text.splitlines())
        # Reading refuses a file that is invalid or that others can read.
        present = read_api_keys(file) if has_keys else ()
        if any(key.id == entry["id"] for key in present):
            raise ConfigError(
                "", f"there is a key with the id {entry['id']}; choose another id, or remove that entry"
            )
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(_with_line(text, line))
            out.flush()
            os.fsync(out.fileno())
        try:
            keys = read_api_keys(new)
        except ConfigError as error:
            raise ConfigError("", str(error).replace(str(new), f"{file} with the new key")) from error
        _refuse_expired(next(key for key in keys if key.id == entry["id"]))
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
        os.close(directory)
    return keys


def _refuse_expired(key: ApiKey) -> None:
    """Raise ConfigError if the router would never accept this key."""
    if key.expires is not None and key.expires <= datetime.now(UTC):
        raise ConfigError(
            EXPIRES,
            f"{key.expires.isoformat()} has passed, so no request could use this key; give a later time, or leave out "
            f"{EXPIRES} for a key that stays valid",
        )


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("", f"is not text: {error}") from error


def _with_line(text: str, line: str) -> str:
    """Insert an entry inside the brackets of a flow list, or with the indentation of a block list."""
    bare = text.rstrip()
    if bare.startswith("["):
        inner = bare[1:-1].strip()
        return f"[{inner}{', ' if inner else ''}{line.removeprefix('- ')}]\n"
    first = ENTRY.search(bare)
    line = (first[1] if first else "") + line
    return f"{bare}\n{line}\n" if bare else f"{line}\n"


if __name__ == "__main__":
    run_program(main, "deploy/api_key")
