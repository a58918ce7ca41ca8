"""Merges the series of several router processes into one answer to Prometheus.

Each process has its own counters, and one that restarts begins at zero: their sum would fall, which Prometheus takes
for a restart of all. So series of a router carry its name as the label `router`, and queries add them up. Series that
nodes report are the same in every process; those of the process that answers are shown, without the label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FAMILY = "# HELP "  # begins the text of each family
END = "# EOF"  # ends an answer in the OpenMetrics format
# Nodes are called engines in series; the router counts as one for messages that it has refused.
_OF_NODE = re.compile(r'^[^{#\s]+\{(?:[^#]*?,)?engine="(?!router")')
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{?)")


def labelled(text: str, router: str) -> str:
    """Return the series of the router in `text`, each with the label `router`; families without any are left out."""
    return "".join(_labelled(family, router, nodes=False) for family in _families(text))


def labelled_all(text: str, router: str) -> str:
    """Return the whole of `text`, in which the series of the router have the label `router`."""
    end = f"{END}\n" if text.rstrip().endswith(END) else ""
    return "".join(_labelled(family, router, nodes=True) for family in _families(text)) + end


def merged(own: bytes, others: Iterable[bytes]) -> bytes:
    """Return one answer: `own`, with the series of other processes, all labelled, in their families."""
    text = own.decode()
    end = f"{END}\n" if text.rstrip().endswith(END) else ""
    families = {_name(family): family for family in _families(text)}
    for other in others:
        for family in _families(other.decode()):
            name = _name(family)
            if name in families:
                families[name] += "".join(
                    line for line in family.splitlines(True) if not line.startswith("#")
                )
            else:
                families[name] = family
    return ("".join(families.values()) + end).encode()


def _families(text: str) -> list[str]:
    """Return the text of each family, its comments first."""
    body = text.rstrip().removesuffix(END).rstrip("\n")
    _, *parts = f"\n{body}\n".split(f"\n{FAMILY}")
    return [f"{FAMILY}{part.rstrip()}\n" for part in parts]


def _name(family: str) -> str:
    return family.removeprefix(FAMILY).partition(" ")[0].partition("\n")[0]


def _labelled(family: str, router: str, nodes: bool) -> str:
    """Return the family with labels, with or without series of nodes; "" if it has no series then."""
    lines, samples = [], 0
    for line in family.splitlines(True):
        if line.startswith("#"):
            lines.append(line)
        elif not _OF_NODE.match(line):
            lines.append(_SAMPLE.sub(lambda found: _with_label(found, router), line, count=1))
            samples += 1
        elif nodes:
            lines.append(line)
    return "".join(lines) if nodes or samples else ""


def _with_label(found: re.Match[str], router: str) -> str:
    name, brace = found.groups()
    return f'{name}{{router="{router}"{"," if brace else "}"}'
