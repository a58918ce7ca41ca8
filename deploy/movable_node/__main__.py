"""Entry point of a movable process: `python -m deploy.movable_node --cluster FILE --name NAME`."""

from __future__ import annotations

from common.config import Resolved
from common.process import Build, ClusterOption, NameOption, SetOption, StatusOption, run_command, run_node


def _import_build(resolved: Resolved, name: str) -> Build:
    from deploy.movable_node.build import build

    return build


def main(
    cluster: ClusterOption, name: NameOption, set_: SetOption = None, status_fd: StatusOption = None
) -> None:
    """Run a movable node until SIGTERM asks it to drain."""
    run_node(_import_build, cluster, name, set_, status_fd)


if __name__ == "__main__":
    run_command(main, "launch_movable")
