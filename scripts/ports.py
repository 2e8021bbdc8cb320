"""Find free TCP ports on this machine's loopback address.

A port is free at the moment of asking; the process that then binds it says so if somebody was faster.
"""

from __future__ import annotations

import socket

from scripts.errors import StackError

HOST = "127.0.0.1"


def claim(wanted: int | None) -> int:
    """Return ``wanted`` if it can be bound, any free port for None."""
    if wanted is not None and not 0 < wanted < 65536:
        raise StackError(
            f"port {wanted} is not one; give a number from 1 to 65535, or none for any free port"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does it
        try:
            probe.bind((HOST, wanted or 0))
        except OSError as error:
            raise StackError(
                f"port {wanted} on {HOST} cannot be used ({error.strerror}); name another one, "
                "`make up PORT=8090`, or leave PORT out for any free one"
            ) from error
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether nobody has the port now."""
    try:
        claim(port)
    except StackError:
        return False
    return True
