"""Entry point of a decode process: `python -m decode_node --cluster FILE --name NAME`."""

from __future__ import annotations

from common.process import Build, ClusterOption, NameOption, SetOption, StatusOption, run_command, run_node


def _import_build() -> Build:
    from decode_node.build import build

    return build


def main(
    cluster: ClusterOption, name: NameOption, set_: SetOption = None, status_fd: StatusOption = None
) -> None:
    """Run a decode node until SIGTERM asks it to drain."""
    run_node(_import_build, cluster, name, set_, status_fd)


if __name__ == "__main__":
    run_command(main, "launch_decode")
