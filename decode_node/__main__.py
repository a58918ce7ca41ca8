"""Entry point of a decode process: `python -m decode_node --cluster FILE --name NAME`."""

from __future__ import annotations

import functools

from common.config import Resolved
from common.config.gpu_sharing import join_sharing
from common.node.ranks.processes import start_ranks
from common.process import Build, ClusterOption, NameOption, SetOption, StatusOption, run_command, run_node


def _import_build(resolved: Resolved, name: str) -> Build:
    entry = resolved.cluster.decode_node(name)
    join_sharing(resolved, entry.on_gpu, prefill=False)
    others = start_ranks("decode_node.rank", entry.rank_devices)
    from decode_node.build import build

    return functools.partial(build, others=others)


def main(
    cluster: ClusterOption, name: NameOption, set_: SetOption = None, status_fd: StatusOption = None
) -> None:
    """Run a decode node until SIGTERM asks it to drain."""
    run_node(_import_build, cluster, name, set_, status_fd)


if __name__ == "__main__":
    run_command(main, "launch_decode")
