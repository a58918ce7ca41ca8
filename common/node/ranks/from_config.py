"""Tells the ranks of a node what they are: they get the cluster file as rank 0 has read it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from common.config import Resolved
from common.config.cluster_schema import cluster_schema
from common.node.ranks.group import RankGroup
from common.node.ranks.processes import RankProcesses
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


def begin_ranks(
    started: RankProcesses | None,
    resolved: Resolved,
    name: str,
    size: int,
    incarnation: str,
    reporter: StartupReporter,
) -> RankGroup | SoleRank:
    """Let the other ranks of the node `name` begin; None: there are no others."""
    assert size == (1 if started is None else started.size), "the processes are those of the node's devices"
    if started is None:
        return SoleRank(reporter)
    start = RankStart(
        cluster=msgspec.Raw(msgspec.msgpack.encode(resolved.cluster)),
        file=str(resolved.file),
        name=name,
        incarnation=incarnation,
    )
    group = RankGroup(name, started, reporter.report)
    works = [msgspec.msgpack.encode(start)] * (group.size - 1)
    cluster = resolved.cluster
    group.begin(works, cluster.process.log_level, cluster.health.start_hang_timeout)
    return group
