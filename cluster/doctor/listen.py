"""Listens on ports of this machine, over IPv4 and IPv6, and sends a word to every peer that connects.

This file is a program of its own: `python3 -c TEXT WORD PORT...`; port 0 is one that the kernel chooses. It prints
`port NUMBER` or `busy NUMBER REASON` for each port, then `all`. It exits when its input ends, after 60 s at the latest.
It runs on Python 3.6, the one of RHEL 8.
"""

import os
import socket
import sys
import threading


def listen(port: int) -> socket.socket:
    """Open a listening socket; a machine without IPv6 gets one for IPv4 alone."""
    try:
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    listener.listen(256)
    return listener


def serve(listener: socket.socket, word: str) -> None:
    """Send the word to every peer that connects."""
    while True:
        connection, _ = listener.accept()
        connection.sendall(f"{word}\n".encode())
        connection.close()


def main(word: str, *ports: str) -> None:
    """Listen until the input ends."""
    for port in ports:
        try:
            listener = listen(int(port))
        except OSError as error:
            print("busy", port, error.strerror, flush=True)
            continue
        print("port", listener.getsockname()[1], flush=True)
        threading.Thread(target=serve, args=(listener, word), daemon=True).start()
    print("all", flush=True)
    threading.Timer(60, os._exit, (0,)).start()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
