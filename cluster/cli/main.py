"""The `clusterctl` program: registers all commands, and prints errors with their exit codes."""

import signal
import sys
from typing import Annotated, NoReturn

import typer

from cluster.cli import image, jobs, session
from cluster.cli.doctor import doctor
from cluster.cli.follow import EXIT_INTERRUPTED
from cluster.cli.gc import gc
from cluster.cli.init import init
from cluster.cli.launch import launch, plan
from cluster.cli.sync import sync
from cluster.errors import ClusterError, Terminated

# Commands import their modules when they run, so that `clusterctl --help` and completion are fast.
# Without rich's panels help takes two thirds of the time: rich imports a Markdown parser for them.
app = typer.Typer(
    name="clusterctl",
    help="Launch a PyTorch training job on several nodes, follow it, restart it after failures, and stop it.",
    epilog="A first run on this machine: clusterctl launch --nodes 2 --gpus 2",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        print(f"clusterctl {version('clusterctl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


app.command(epilog="Example: clusterctl launch --nodes 2 --gpus 2 -- train --epochs 3")(launch)
app.command(
    epilog="Example: mkdir -p runs && clusterctl plan --nodes 2 --gpus 2 --backend compose -o job.yml && "
    "docker compose -f job.yml up"
)(plan)
for command in (jobs.attach, jobs.wait, jobs.stop, jobs.ps, jobs.status, jobs.logs):
    app.command()(command)
app.command(hidden=True)(jobs.supervise)
app.command(epilog="Example: clusterctl top digits")(jobs.top)
app.command(epilog="Example: clusterctl serve --port 8000")(jobs.serve)
app.command("exec", epilog="Example: clusterctl exec digits --node 1 -- nvidia-smi")(session.exec_)
app.command(epilog="Example: clusterctl shell digits 1")(session.shell)
app.command(epilog="Example: clusterctl cp digits:last.pt .")(session.cp)
app.command(epilog="Example: clusterctl port-forward digits 8888")(session.port_forward)
app.command(epilog="Example: clusterctl tensorboard digits")(session.tensorboard)
app.command(epilog="Example: clusterctl init gpu-a gpu-b gpu-c")(init)
app.command(epilog="Example: clusterctl doctor --skip link")(doctor)
app.command(epilog="Example: clusterctl sync ./data/coco ./my.yaml")(sync)
app.add_typer(image.app, name="image")
app.command(epilog="Example: clusterctl gc --only gpu-b")(gc)


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def main() -> None:
    """Run the command line. Print a ClusterError as `error:` and `hint:` lines, and exit with its code.

    By default SIGTERM and SIGHUP would end this process alone, and not what it has started.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)
    try:
        app()
    except ClusterError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
