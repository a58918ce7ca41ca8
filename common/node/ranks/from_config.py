"""Starts the ranks of a node, which get the cluster file as rank 0 has read it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from common.config import Resolved
from common.config.cluster_schema import cluster_schema
from common.node.ranks.group import RankGroup
from common.node.ranks.sole_rank import SoleRank
from common.observability.startup import StartupReporter


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """The facts from which a rank builds its part of the node."""

    cluster: msgspec.Raw  # what rank 0 has read from file, environment and command line
    file: str
    name: str  # the node's
    incarnation: str  # the node's

    @property
    def resolved(self) -> Resolved:
        """The cluster file; the origins of its values are known to rank 0 only."""
        return Resolved(msgspec.msgpack.decode(self.cluster, type=cluster_schema()), Path(self.file), {})


def start_ranks(
    module: str, resolved: Resolved, name: str, size: int, incarnation: str, reporter: StartupReporter
) -> RankGroup | SoleRank:
    """Start ranks 1 to `size` - 1 of the node `name`, whose entry module is `module`."""
    if size == 1:
        return SoleRank(reporter)
    start = RankStart(
        cluster=msgspec.Raw(msgspec.msgpack.encode(resolved.cluster)),
        file=str(resolved.file),
        name=name,
        incarnation=incarnation,
    )
    group = RankGroup(name, size, reporter.report)
    group.start(module, [msgspec.msgpack.encode(start)] * (size - 1), resolved.cluster.process.log_level)
    return group
