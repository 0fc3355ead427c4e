"""Ports for servers that start together."""

from __future__ import annotations

from tasks.ports import free_port


def free_ports(count: int) -> list[int]:
    """Return as many free ports of this host, each another one."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
