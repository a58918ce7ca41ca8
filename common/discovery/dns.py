"""Finds routers by the addresses of one name, such as a headless Service of Kubernetes: an address per pod."""

from __future__ import annotations

import threading

from common.discovery.slots import RouterSlot, SlotTable
from common.ipc.host_lookup import MAX_ADDRESSES, Resolve, not_found, resolve
from common.node_names import DNS
from common.tcp_address import tcp_address

INTERVAL = 5.0  # seconds between two lookups
SOONEST = 1.0  # the same while some link has no connection


class DnsRouters:
    """Looks a name up again and again in a thread of its own. While it cannot be found, its earlier addresses stay."""

    def __init__(self, address: str, slots: int, resolve: Resolve = resolve) -> None:
        """`address` is dns://NAME:PORT; `slots` is the number of links."""
        self._name, _, self._port = address.removeprefix(DNS).rpartition(":")
        self._resolve = resolve
        self._table = SlotTable(slots)
        self._stopped = threading.Event()
        self._asked = threading.Event()
        self.slots = [RouterSlot(self._table, index, address, self._asked.set) for index in range(slots)]
        # A daemon, since a process must not wait for a DNS server when it ends.
        threading.Thread(target=self._run, name="router-lookup", daemon=True).start()

    def close(self) -> None:
        self._stopped.set()
        self._asked.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._asked.clear()
            try:
                found = self._resolve(self._name)[:MAX_ADDRESSES]
            except (OSError, UnicodeError) as error:
                self._table.problem = not_found(self._name, error)
                found = []
            if found:
                self._table.replace([tcp_address(each, self._port) for each in found])
            if not self._stopped.wait(SOONEST):
                self._asked.wait(INTERVAL - SOONEST)
