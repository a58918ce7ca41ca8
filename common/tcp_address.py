"""Addresses tcp://HOST:PORT; an IPv6 address as the host is in brackets."""

from __future__ import annotations

TCP = "tcp://"


def tcp_address(host: str, port: str) -> str:
    """Return the address of a host that is given without brackets."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def tcp_host(address: str) -> str:
    """Return the host of an address, without brackets; "" for an address of another kind."""
    return address.removeprefix(TCP).rpartition(":")[0].strip("[]") if address.startswith(TCP) else ""
