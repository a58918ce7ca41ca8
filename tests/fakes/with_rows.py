"""Runs a process of the cluster with additional table rows, for things that tests add only by a record.

`python -m tests.fakes.with_rows common.config.transports:TRANSPORTS files=tests.fakes.file_transport.kind:KIND --
decode_node --cluster CLUSTER --name NAME`: tables and rows alternate. A table holds names, or the objects themselves.
"""

from __future__ import annotations

import runpy
import sys

from common.named import named


def add_rows(rows: list[str]) -> None:
    for table, row in zip(rows[::2], rows[1::2], strict=True):
        name, _, record = row.partition("=")
        entries = named(table)
        holds_names = all(isinstance(each, str) for each in entries.values())
        entries[name] = record if holds_names else named(record)


if __name__ == "__main__":
    end = sys.argv.index("--")
    add_rows(sys.argv[1:end])
    module = sys.argv[end + 1]
    del sys.argv[1 : end + 2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
