"""A port of this machine for a server that is about to start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from itertools import chain

HOST, EVERYWHERE = "127.0.0.1", ""
ABOVE_SYSTEM, BELOW_CONNECTIONS = 16384, 30000
"""Linux gives ports from 32768 on (net.ipv4.ip_local_port_range) to connections and to servers that ask for
any: one of those may be taken again before the server that it was chosen for has it. Kubernetes gives those
from 30000 on to services of a node."""
TRIES = 100


def free_port(*wanted: int, host: str = HOST) -> int:
    """Return the first of the wanted ports that nobody has at this address, else another one. Raises OSError
    if there is none."""
    others = random.SystemRandom().sample(range(ABOVE_SYSTEM, BELOW_CONNECTIONS), TRIES)
    for port in chain(wanted, others):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(f"no port of {host or socket.gethostname()} is free")
