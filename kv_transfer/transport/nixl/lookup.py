"""Looks up the host of a decode node within a bounded time: the caller is a main loop, and a DNS server may be down."""

from __future__ import annotations

import ipaddress
import threading
from typing import Final

from common.ipc.host_lookup import resolve

LOOKUP_SECONDS: Final = 1.0


def addresses_of(host: str) -> list[str]:
    """Return the IP addresses of a host, at least one. Raises OSError, TimeoutError after LOOKUP_SECONDS included."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _look_up(host)
    return [host]


def _look_up(name: str) -> list[str]:
    found: list[str] = []
    problems: list[OSError] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.extend(resolve(name))
        except OSError as error:
            problems.append(error)
        except UnicodeError as error:
            problems.append(OSError(str(error)))
        done.set()

    try:
        # A daemon, since a process must not wait for a DNS server when it ends.
        threading.Thread(target=run, name="kv-lookup", daemon=True).start()
    except RuntimeError as error:  # too many threads
        raise OSError(str(error)) from error
    if not done.wait(LOOKUP_SECONDS):
        raise TimeoutError(f"the addresses of {name} were not found within {LOOKUP_SECONDS:g} s")
    if problems or not found:
        raise next(iter(problems), OSError(f"{name} has no addresses"))
    return found
