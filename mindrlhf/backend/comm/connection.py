"""Sockets between a job's processes: their options, and reading that names who is gone."""

import socket

from mindrlhf.backend.comm.point_to_point import PeerGone
from mindrlhf.errors import UserError


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice that the other host is gone.

    That takes half a minute at the most.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes sends nothing. After 10 s of silence it is probed, and given up after three probes.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def fill(rest: memoryview, connection: socket.socket, source: int | str) -> None:
    """Fill memory with what comes from rank `source`."""
    while rest:
        try:
            count = connection.recv_into(rest)
        except TimeoutError:
            limit = connection.gettimeout()
            raise UserError(f"rank {source} sent nothing for {limit:g} s where a message was due") from None
        except OSError as error:
            raise PeerGone(source) from error
        if count == 0:
            raise PeerGone(source)
        rest = rest[count:]
