"""Commands for sessions with a running job: exec, shell, cp, port-forward, tensorboard."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import options
from cluster.cli.console import console, print_line
from cluster.cli.signals import EXIT_INTERRUPTED
from cluster.errors import Terminated, UsageError
from cluster.spec.model import JobRecord, Node
from cluster.spec.request import option
from cluster.store import JobStore

NodeName = Annotated[
    str, option("--node", help="Node by name or number: node-1, or 1.  [default: the first]")
]


def exec_(
    job: options.JobName,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="Command to run, and its arguments.")
    ],
    node: NodeName = "0",
    on_all: Annotated[
        bool, options.flag("Run the command on all nodes at once, without input.", "--all", "-a")
    ] = False,
) -> None:
    """Run a command inside a running job, in a node's container.

    The command has the job's environment variables and starts in its working directory. The exit code is the
    command's; with --all it is the first that is not 0.
    """
    if not on_all:
        raise typer.Exit(_run(job, node, command))
    from cluster.supervisor import session

    record = JobStore().load(job)
    width = max(len(member.name) for member in record.plan.nodes)

    def show(name: str, line: str) -> None:
        print(f"{name:<{width}} | {line}", flush=True)

    raise typer.Exit(session.run_on_all(record, command, show))


def shell(
    job: options.JobName,
    node: NodeName = "0",
) -> None:
    """Open a shell inside a running job, in a node's container.

    The shell is bash if the container has it, otherwise sh. The exit code is the shell's.
    """
    raise typer.Exit(_run(job, node, ["sh", "-c", 'exec "$(command -v bash || echo sh)"']))


def _run(job: str, node: str, argv: Sequence[str]) -> int:
    """Run a command with this process's input and output, on a terminal if both are one."""
    from cluster.supervisor import session

    record, machine = _target(job, node)
    words = session.command(record, machine, argv, tty=sys.stdin.isatty() and sys.stdout.isatty())
    process = subprocess.Popen(words)
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except Terminated:
            process.terminate()
        except KeyboardInterrupt:  # a terminal sends Ctrl-C to both processes
            continue


def cp(
    source: Annotated[
        str,
        typer.Argument(metavar="JOB:PATH", help="PATH is relative to the job's run directory, or absolute."),
    ],
    into: Annotated[
        str, typer.Argument(metavar="[TARGET]", help="Folder on this machine, or the name of the copy.")
    ] = ".",
    node: NodeName = "0",
) -> None:
    """Copy a job's file or folder to this machine, as docker cp does.

    In a folder, the copy keeps its name. A file that exists is replaced, and a folder is merged with the copied one.
    """
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from cluster.supervisor import session

    job, _, path = source.partition(":")
    if not path:
        raise UsageError(f"{source}: expected JOB:PATH", f"for example: clusterctl cp {job}:last.pt .")
    if into.endswith("/") and not Path(into).is_dir():
        raise UsageError(f"{into}: no such folder", f"make it first: mkdir -p {into}")
    record, machine = _target(job, node)
    out = console()
    columns = (TextColumn("{task.description}", markup=False), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task(f"{machine.name}:{path}")
        left_out: list[str] = []
        target = session.copy(
            record,
            machine,
            path,
            Path(into),
            lambda read: progress.update(task, completed=read),
            left_out.append,
        )
    for text in left_out:
        print_line(out, f"not copied: {text}")
    print_line(out, f"copied to {target}")


def port_forward(
    job: options.JobName,
    ports: Annotated[
        str, typer.Argument(metavar="[LOCAL:]REMOTE", help="Port on this machine, and port on the node.")
    ],
    node: NodeName = "0",
) -> None:
    """Forward a local port to a port of a running job until Ctrl-C.

    The program on the node may listen on localhost only.
    """
    local, _, remote = ports.rpartition(":")
    here, there = (int(text) if text.isdigit() else 0 for text in (local or remote, remote))
    if not (0 < here < 65536 and 0 < there < 65536):
        hint = f"for example: clusterctl port-forward {job} 6006"
        raise UsageError(f"{ports}: expected LOCAL:REMOTE or one port", hint)
    record, machine = _target(job, node)
    _forward(record, machine, here, there, f"http://localhost:{{}} is port {remote} of {machine.name}")


def tensorboard(
    job: options.JobName,
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port on this machine.")] = 6006,
    node: NodeName = "0",
) -> None:
    """Show a job's curves in TensorBoard until Ctrl-C.

    TensorBoard runs in the node's container while the job runs, and on this machine after that.
    """
    from cluster.supervisor import session

    record, machine = _target(job, node)
    if record.outcome:
        words = [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            record.plan.run_dir,
            "--port",
            str(port),
        ]
        os.execv(sys.executable, words)
    with session.tensorboard(record, machine) as remote:
        _forward(record, machine, port, remote, f"TensorBoard of {job}: http://localhost:{{}}")


def _target(job: str, node: str) -> tuple[JobRecord, Node]:
    from cluster.supervisor import session

    record = JobStore().load(job)
    return record, session.node_named(record, node)


def _forward(record: JobRecord, node: Node, local: int, remote: int, text: str) -> None:
    """Forward a port until Ctrl-C; `text` is printed with the local port."""
    from cluster.supervisor import session

    out = console()
    with session.forwarded(record, node, local, remote, lambda line: print_line(out, line)) as port:
        print_line(out, f"{text.format(port)} (Ctrl-C to end)")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
