"""Command serve: pages about all jobs in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.follow import EXIT_INTERRUPTED, console, print_line
from cluster.cli.options import flag
from cluster.errors import UsageError


def serve(
    host: Annotated[str, typer.Option("--host", help="The address to listen on, or 0.0.0.0 for all.")] = "localhost",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="The port; 0 takes a free one.")] = 8265,
    metrics: Annotated[bool, flag("Also /metrics, in Prometheus' text format.", "--metrics")] = False,
) -> None:
    """Show all jobs in a browser, live and read-only, until Ctrl-C.

    From another machine: ssh -L 8265:localhost:8265 THIS-MACHINE. With another --host, the printed URL has a token
    that each browser needs once, and Prometheus as its bearer token; the connection is not encrypted.
    """
    import secrets
    import socket

    from cluster.store import JobStore
    from cluster.web.server import LOOPBACK, Server

    if metrics:
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            raise UsageError("--metrics needs prometheus-client", "pip install 'clusterctl[metrics]'") from None
    token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
    try:
        server = Server((host, port), JobStore(), token, has_metrics=metrics)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}", "another --port, or --port 0") from error
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    query = f"/?token={token}" if token else "/"
    with server:
        print_line(console(), f"http://{shown}:{server.server_address[1]}{query}  (Ctrl-C to end)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
