"""A process of the cluster with one more row in a table: for what a test adds by its record alone.

`python -m tests.fakes.with_row common.config.transports:TRANSPORTS files=tests.fakes.file_transport.kind:KIND
decode_node --cluster CLUSTER --name NAME`.
"""

from __future__ import annotations

import runpy
import sys

from common.named import named

if __name__ == "__main__":
    table, row, module = (sys.argv.pop(1) for _ in range(3))
    name, _, record = row.partition("=")
    named(table)[name] = record
    runpy.run_module(module, run_name="__main__", alter_sys=True)
