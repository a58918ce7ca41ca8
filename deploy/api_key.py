"""`deploy/api_key ID FILE`: make a random 256-bit API key, print it once, and append its hash to the key file.

The file is what `security.api_keys` names; running routers read it again within a second. To revoke a key, remove its
entry.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from common.api_key import MAX_WEIGHT, ApiKey
from common.config.api_keys import read_api_keys
from common.errors import ConfigError

EXIT_REFUSED = 2
PREFIX = "sk-tandem-"
TIME = re.compile(r"[0-9TZ:+ .-]+")
ENTRY = re.compile(r"^( *)- ", re.MULTILINE)
Limit = Annotated[int | None, typer.Option(min=1)]


def main(
    id_: Annotated[str, typer.Argument(metavar="ID", help="Names the key in logs and timelines")],
    file: Annotated[Path, typer.Argument(help="Key file; made with mode 0600 if it does not exist")],
    scope: Annotated[list[str] | None, typer.Option(help="inference (default), admin, or both")] = None,
    expires: Annotated[str | None, typer.Option(help="Date or time in UTC, such as 2027-01-31")] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrency: Limit = None,
    weight: Annotated[
        int | None, typer.Option(min=1, max=MAX_WEIGHT, help="Fair shares, compared with 1 of other keys")
    ] = None,
) -> None:
    """Make an API key."""
    secret = PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, Any] = {
        "id": id_,
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "scopes": scope or ["inference"],
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "weight": weight,
    }
    try:
        append(file, {name: value for name, value in entry.items() if value is not None}, expires)
    except (ConfigError, OSError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_REFUSED) from None
    print(secret)
    print(
        f"This is the key of {id_}; it is shown only now. {file} holds its hash: set security.api_keys to it.",
        file=sys.stderr,
    )


def append(file: Path, entry: dict[str, Any], expires: str | None) -> tuple[ApiKey, ...]:
    """Add an entry; comments in the file stay. The file is replaced as a whole, or not at all. Returns all keys.

    Raises ConfigError where the file cannot be read, or the entry does not fit in it.
    """
    if expires is not None and not TIME.fullmatch(expires):
        raise ConfigError("expires", f"{expires!r} is no date; write 2027-01-31, or 2027-01-31T12:00:00Z")
    line = "- " + msgspec.json.encode(entry).decode()  # JSON is YAML
    if expires is not None:
        line = f"{line[:-1]}, expires: {expires}}}"
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # two at once would lose one of the keys
        text = file.read_text() if file.exists() else ""
        if any(row.strip() and not row.startswith("#") for row in text.splitlines()):
            read_api_keys(file)  # what is broken, or open to others, is not added to
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(_with_line(text, line))
            out.flush()
            os.fsync(out.fileno())
        try:
            keys = read_api_keys(new)
        except ConfigError as error:
            raise ConfigError("", str(error).replace(str(new), f"{file} with the new key")) from error
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
        os.close(directory)
    return keys


def _with_line(text: str, line: str) -> str:
    """Add an entry within the brackets of a list in brackets, else with the indentation of the first entry."""
    bare = text.rstrip()
    if bare.startswith("["):
        inner = bare[1:-1].strip()
        return f"[{inner}{', ' if inner else ''}{line.removeprefix('- ')}]\n"
    first = ENTRY.search(bare)
    line = (first[1] if first else "") + line
    return f"{bare}\n{line}\n" if bare else f"{line}\n"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(main)
    app(prog_name="deploy/api_key")
