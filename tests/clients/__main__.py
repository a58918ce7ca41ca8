"""`python -m tests.clients [NAME ...]`: run real clients against a local cluster and print what works.

Clients are installed below --keep, each in an environment of its own, and are found there again. NAME is a part of a
client's name. Needs the registries of Python and Node.js packages; Node.js itself comes from the former.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.clients import target
from tests.clients.catalog import CLIENTS
from tests.clients.run import Result, current_commit, run, save, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all clients")
    parser.add_argument("--keep", type=Path, default=Path.home() / ".cache" / "tandem-clients")
    parser.add_argument("--json", type=Path, help="file that receives the results")
    parser.add_argument("--list", action="store_true", help="print the names")
    options = parser.parse_args()
    chosen = [
        each for each in CLIENTS if not options.names or any(name in each.name for name in options.names)
    ]
    if options.list:
        print("\n".join(each.name for each in chosen))
        return 0
    if not chosen:
        parser.error(f"no client is named {options.names}; --list prints the names")
    results: list[Result] = []
    commit = current_commit()
    with tempfile.TemporaryDirectory(prefix="tandem-clients-") as directory:
        cluster = target.start(Path(directory))
        with cluster:
            for client in chosen:
                found = run(client, cluster.url, Path(directory) / "model", options.keep.resolve())
                print(f"{client.name}: {sum(each.passed for each in found)} of {len(found)}", flush=True)
                results += found
    print(table(results))
    if options.json is not None:
        save(results, options.json, commit)
    return 0 if all(each.passed for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
