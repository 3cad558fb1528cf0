"""Connection tests between nodes, run as `python3 -c TEXT` on each.

Without arguments it listens on a random port over IPv4 and IPv6, prints the port, and exits at the end of its input.
The kernel accepts the connections. With `ADDRESS PORT...` it connects to all in parallel, and prints a line for each:
the problem, empty on success. It supports Python 3.6, the default of RHEL 8.
"""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor


def listen() -> None:
    """Listen until the input ends, on IPv4 alone on a machine without IPv6."""
    try:
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", 0))
    except OSError:
        listener = socket.socket()
        listener.bind(("", 0))
    listener.listen(256)
    print(listener.getsockname()[1], flush=True)
    sys.stdin.buffer.read()


def dial(address: str, port: str) -> str:
    """Connect, and return the problem."""
    try:
        socket.create_connection((address, int(port)), 5).close()
    except socket.timeout:
        return "no answer within 5 s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    if len(sys.argv) == 1:
        listen()
    else:
        with ThreadPoolExecutor(64) as pool:
            print("\n".join(pool.map(dial, sys.argv[1::2], sys.argv[2::2])))
