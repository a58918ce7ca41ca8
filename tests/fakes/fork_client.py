"""Asks a server of `socket_forks` for a fork, which takes the place of this program.

    python -I -S tests/fakes/fork_client.py PATH

It passes on its standard streams, directory, environment and limits, and ends as the fork does. If it is killed, the
server kills the fork. Further arguments have no effect. It imports next to nothing: a router of a test cluster would
otherwise import for half a second.
"""

import _socket
import os
import resource
import sys

LIMITS = range(resource.RLIM_NLIMITS if hasattr(resource, "RLIM_NLIMITS") else 16)


def main(path: str) -> None:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.connect(path)
    limits = " ".join(f"{soft} {hard}" for soft, hard in map(resource.getrlimit, LIMITS))
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    content = "\0".join((os.getcwd(), limits, *variables)).encode(errors="surrogateescape")
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    connection.sendmsg([content], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    with open("/proc/self/comm", "wb") as name:  # by which tests find the fork as a child of the router
        name.write(b"fork " + connection.recv(64))
    code = int(connection.recv(64) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


main(sys.argv[1])
