"""The `clusterctl` program: registers all commands, and prints errors with their exit codes."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from cluster.cli import image, jobs, session, streams
from cluster.cli.console import show_wait
from cluster.cli.doctor import doctor
from cluster.cli.gc import gc
from cluster.cli.help import CONTEXT, HelpCommand, HelpGroup
from cluster.cli.init import init
from cluster.cli.launch import launch, plan
from cluster.cli.signals import EXIT_HANGUP, EXIT_INTERRUPTED, wake_main_thread
from cluster.cli.sync import sync
from cluster.errors import ClusterError, Terminated, UsageError
from cluster.transport import waits

# Commands import their modules when they run, so that `clusterctl --help` and completion are fast.
app = typer.Typer(
    name="clusterctl",
    cls=HelpGroup,
    help="Launch PyTorch training jobs on several nodes, and restart them after failures.",
    epilog="Try it on this machine: clusterctl launch --nodes 2 --gpus 2",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        print(f"clusterctl {version('clusterctl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of the program itself."""


def _add(heading: str, command: Callable[..., None], name: str = "", example: str = "", **how: Any) -> None:
    epilog = f"Example: {example}" if example else None
    app.command(name or None, epilog=epilog, rich_help_panel=heading, **how)(command)


_JOBS = "Run jobs"
_WATCH = "Watch jobs"
_INSIDE = "Work inside a running job"
_MACHINES = "Set up machines"
_add(_JOBS, launch, "", "clusterctl launch --nodes 2 --gpus 2 -- train --epochs 3", cls=HelpCommand)
_BY_HAND = "mkdir -p runs; clusterctl plan -n 2 -b compose -o job.yml; docker compose -f job.yml up"
_add(_JOBS, plan, "", _BY_HAND, cls=HelpCommand)
_add(_JOBS, jobs.attach)
_add(_JOBS, jobs.wait)
_add(_JOBS, jobs.stop)
_add(_WATCH, jobs.ps)
_add(_WATCH, jobs.status)
_add(_WATCH, jobs.logs)
_add(_WATCH, jobs.top, example="clusterctl top digits")
_add(_WATCH, jobs.serve, example="clusterctl serve --port 8000")
_add(_WATCH, session.tensorboard, example="clusterctl tensorboard digits")
_add(_INSIDE, session.exec_, "exec", "clusterctl exec digits --node 1 -- nvidia-smi")
_add(_INSIDE, session.shell, example="clusterctl shell digits --node 1")
_add(_INSIDE, session.cp, example="clusterctl cp digits:last.pt .")
_add(_INSIDE, session.port_forward, example="clusterctl port-forward digits 8888")
_add(_MACHINES, init, example="clusterctl init gpu-a gpu-b gpu-c")
_add(_MACHINES, doctor, example="clusterctl doctor --skip link")
_add(_MACHINES, sync, example="clusterctl sync ./data/coco ./my.yaml")
app.add_typer(image.app, name="image", rich_help_panel=_MACHINES)
_add(_MACHINES, gc, example="clusterctl gc --only gpu-b")
app.command(hidden=True)(jobs.supervise)


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def main() -> None:
    """Run the command line, with a closed pipe as a closed terminal."""
    streams.take()
    code: str | int | None = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    finally:
        streams.flush()
    sys.exit(EXIT_HANGUP if streams.is_closed() and code in (None, 0, EXIT_INTERRUPTED) else code)


def run() -> None:
    """Run the command line. Print a ClusterError as `error:` and `hint:` lines, and exit with its code.

    By default SIGTERM and SIGHUP would end this process alone, and not what it has started.
    """
    wake_main_thread()
    waits.show_with(show_wait)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)
    try:
        app(prog_name="clusterctl")
    except ClusterError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except FileNotFoundError:
        if _in_a_folder():
            raise
        print("error: the current folder has been removed\nhint: cd to a folder that exists", file=sys.stderr)
        sys.exit(UsageError.exit_code)


def _in_a_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 (Path.cwd does the same)
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
