"""The section process of a cluster file."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.config.section import NotNegative, Positive, Section


class Process(Section, frozen=True, kw_only=True):
    """Threads, logs and debugging of every process."""

    # Sockets, pids, logs. auto: 0700 under $XDG_RUNTIME_DIR unless that is /run/user/UID, else under /tmp
    run_dir: str = "auto"
    # IP address of this process's host for other hosts; stands for `own` in addresses of nodes.
    address: str | None = None
    threads: NotNegative = 1  # torch threads per CPU node; 0: torch's default
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_max_mib: Positive = 64  # per log that deploy/up opens; one rotated file is kept
    core_dumps: bool = False  # a core dump holds prompts, answers and keys
    # Steps of every request; auto: events/ in run_dir; or a directory.
    event_log: Annotated[str, Meta(min_length=1)] = "none"
    # How processes on one GPU share it. turns: they take turns. With the others deploy/up starts an MPS server, in
    # which they compute at the same time; decode_first: work of decode nodes goes first; evenly: all work is alike.
    gpu_sharing: Literal["turns", "decode_first", "evenly"] = "turns"
    # NaN and maximum ids in the padding of all graphs before each replay; for tests.
    poison_graphs: bool = False
