"""Ports that servers are about to take."""

from __future__ import annotations

import socket

import pytest

from tasks import ports
from tests.ports import free_ports


def test_a_taken_port_is_not_given_and_the_first_free_one_is() -> None:
    first = ports.free_port()
    with socket.create_server((ports.HOST, first)):
        second = ports.free_port()  # not the first, which is taken now
        assert ports.free_port(first, second) == second
        assert ports.free_port(first) not in (first, 0)


def test_a_port_that_is_free_at_one_address_alone_is_not_given_for_all() -> None:
    wanted = ports.free_port(host=ports.EVERYWHERE)
    assert ports.free_port(wanted, host=ports.EVERYWHERE) == wanted
    with socket.create_server((ports.HOST, wanted)):
        assert ports.free_port(wanted, host=ports.EVERYWHERE) != wanted


def test_ports_for_servers_that_start_together_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "BELOW_CONNECTIONS", ports.ABOVE_SYSTEM + ports.TRIES)
    assert len(set(free_ports(30))) == 30


def test_ports_lie_below_those_that_the_system_gives_to_connections() -> None:
    with socket.create_server((ports.HOST, 0)) as given:
        assert max(ports.free_port() for _ in range(20)) < given.getsockname()[1]
