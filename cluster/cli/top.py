"""Command top: CPU, memory and GPU use of each rank of a running job."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from cluster.cli import options
from cluster.cli.follow import EXIT_INTERRUPTED, console, print_line
from cluster.errors import UsageError
from cluster.store import JobStore


def top(
    job: options.JobName,
    as_json: options.AsJson = False,
    once: Annotated[bool, typer.Option("--once", help="Print one sample, as without a terminal.")] = False,
) -> None:
    """Show CPU, memory and GPU use of each rank of a running job, until Ctrl-C.

    The columns: cores, memory of the rank and its workers, memory in use on the host, use and memory of the GPU, and
    the use over the last samples (of the GPU, else of the cores). The agent on each node samples every 2 s.
    """
    from rich.console import Group
    from rich.live import Live

    from cluster.cli.display import UsageTable, header
    from cluster.supervisor import jobs

    record = JobStore().load(job)
    if record.outcome:
        raise UsageError(f"{job} has ended: {record.outcome}", f"clusterctl status {job}")
    follower, usage, out = jobs.Follower(record), UsageTable(), console()

    def sample() -> None:
        follower.step(time.time())
        usage.add(follower.view)

    def drawn() -> Group:
        speed = f"   {follower.view.progress['images_per_s']:.0f} img/s" if follower.view.progress else ""
        return Group(f"{header(record.plan)}{speed}   {usage.spark('images_per_s')}", usage.table(follower.view))

    sample()
    if as_json:
        nodes = [{"node": node.name, "phase": node.phase, "usage": node.usage} for node in follower.view.nodes]
        print(json.dumps({"job": job, "nodes": nodes, "progress": follower.view.progress}))
    elif once or not out.is_terminal:
        out.print(drawn())
    else:
        try:
            with Live(console=out, get_renderable=drawn, auto_refresh=False, screen=True) as live:
                while any(node.phase not in ("exited", "lost") for node in follower.view.nodes):
                    live.refresh()
                    time.sleep(2)
                    sample()
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        print_line(out, f"{job}: all nodes have ended")
