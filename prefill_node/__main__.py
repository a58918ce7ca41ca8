"""Entry point of a prefill process: `python -m prefill_node --cluster FILE --name NAME`."""

from __future__ import annotations

import functools

from common.config import Resolved
from common.config.gpu_sharing import join_sharing
from common.node.ranks.processes import start_ranks
from common.process import Build, ClusterOption, NameOption, SetOption, StatusOption, run_command, run_node


def _import_build(resolved: Resolved, name: str) -> Build:
    entry = resolved.cluster.prefill_node(name)
    join_sharing(resolved, entry.on_gpu, prefill=True)
    others = start_ranks("prefill_node.rank", entry.rank_devices)
    from prefill_node.build import build

    return functools.partial(build, others=others)


def main(
    cluster: ClusterOption, name: NameOption, set_: SetOption = None, status_fd: StatusOption = None
) -> None:
    """Run a prefill node until SIGTERM asks it to drain."""
    run_node(_import_build, cluster, name, set_, status_fd)


if __name__ == "__main__":
    run_command(main, "launch_prefill")
