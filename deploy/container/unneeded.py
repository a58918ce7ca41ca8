"""Prints the installed packages that a served cluster does not need: those that only tests and checks use."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator

PROJECT = "tandem-serving"
EXTRAS = {"nixl"}  # of the project, that the image has: transfer.transport nixl
NAME = re.compile(r"[A-Za-z0-9._-]+")
OF_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(package: str) -> Iterator[str]:
    """Yield the packages that a package wants. Of markers only extras count: what is absent stays absent."""
    for text in importlib.metadata.requires(package) or ():
        extra = OF_EXTRA.search(text)
        name = NAME.match(text)
        if name is not None and (extra is None or (package == PROJECT and extra[1] in EXTRAS)):
            yield canonical(name[0])


def unneeded() -> list[str]:
    installed = {canonical(each.metadata["Name"]) for each in importlib.metadata.distributions()}
    needed: set[str] = set()
    waiting = [PROJECT]
    while waiting:
        name = waiting.pop()
        if name in needed or name not in installed:
            continue
        needed.add(name)
        waiting += required(name)
    return sorted(installed - needed)


if __name__ == "__main__":
    sys.stdout.write("\n".join(unneeded()) + "\n")
