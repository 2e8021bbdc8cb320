"""A busy port is said in a sentence that names another way."""

from __future__ import annotations

import socket

import pytest

from scripts import ports
from scripts.errors import StackError


def test_a_busy_port_is_refused_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind((ports.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not ports.is_free(port)
        with pytest.raises(StackError, match=rf"port {port} .*already in use.*make up PORT="):
            ports.claim(port)
    assert ports.claim(port) == port


def test_any_free_port_can_be_bound() -> None:
    with socket.socket() as mine:
        mine.bind((ports.HOST, ports.claim(None)))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(StackError, match="not one"):
        ports.claim(port)
