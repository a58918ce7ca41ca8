"""Network namespaces as hosts: each node has its own loopback interface, so every byte crosses the proxy.

All addresses in the cluster file are loopback addresses. In the namespace of another node such an address belongs to
the proxy, which forwards the connection: no process notices that it is observed, and no link can bypass the proxy.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

from tests.fakes.network_namespace import enter_network

PREFIX = "tandem"  # tandem-PID-NODE, with the process id of the harness


def missing() -> str | None:
    """Return why namespaces cannot be used on this machine; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (package iproute2)"
    sweep()
    probe = Namespace("probe")
    try:
        probe.create()
    except subprocess.CalledProcessError as error:
        return f"ip netns add failed: {error.stderr.decode(errors='replace').strip()}"
    probe.delete()
    return None


def sweep() -> None:
    """Delete the namespaces of harnesses that were killed."""
    for entry in os.listdir("/run/netns") if os.path.isdir("/run/netns") else []:
        prefix, _, rest = entry.partition("-")
        owner = rest.partition("-")[0]
        if prefix == PREFIX and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            subprocess.run(["ip", "netns", "delete", entry], check=False, capture_output=True)


class Host:
    """A host on which a process runs. This class is the machine itself."""

    name = ""
    path: str | None = None  # of its network namespace; None is that of the harness

    def socket(self) -> socket.socket:
        """Create a TCP socket of this host's network."""
        return socket.socket()

    def delete(self) -> None:
        """Do nothing: the machine itself needs no removal."""


class Namespace(Host):
    """A network namespace that has only a loopback interface."""

    def __init__(self, node: str) -> None:
        self.name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}-{node}"
        self.path = f"/run/netns/{self.name}"
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix=self.name, initializer=enter_network, initargs=(self.path,)
        )

    def create(self) -> None:
        """Create it. Raises CalledProcessError with the tool's output."""
        for arguments in (
            ["ip", "netns", "add", self.name],
            ["ip", "-n", self.name, "link", "set", "lo", "up"],
        ):
            subprocess.run(arguments, check=True, capture_output=True)

    def socket(self) -> socket.socket:
        """Create a socket; it stays in the namespace in which its thread was at that moment."""
        return self._thread.submit(socket.socket).result()

    def delete(self) -> None:
        self._thread.shutdown()
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)
