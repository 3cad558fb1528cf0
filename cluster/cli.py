"""The command line: the verbs, and what every one of them does with an error. What a user sees is printed in verbs/."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster.errors import ClusterError
from cluster.verbs import image, jobs
from cluster.verbs.bench import bench
from cluster.verbs.doctor import doctor
from cluster.verbs.follow import EXIT_INTERRUPTED
from cluster.verbs.gc import gc
from cluster.verbs.init import init
from cluster.verbs.launch import launch, plan
from cluster.verbs.sync import sync

# Imports of what does the work stand in the functions: `clusterctl --help` and completion must answer at once.
app = typer.Typer(
    name="clusterctl",
    help="Start one training job on several nodes, watch it meet and run, and stop it.",
    epilog="A first run on this machine: clusterctl launch --nodes 2 --gpus 2",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
for verb in (jobs.attach, jobs.wait, jobs.stop, jobs.ps, jobs.status, jobs.logs):
    app.command()(verb)
app.command(epilog="Example: clusterctl init gpu-a gpu-b gpu-c")(init)
app.command(epilog="Example: clusterctl doctor --skip link")(doctor)
app.command(epilog="Example: clusterctl bench --nodes 1,2,4 --gpus 2 -- train --data coco.yaml --epochs 2")(bench)
app.command(epilog="Example: clusterctl sync ./data/coco ./my.yaml")(sync)
app.add_typer(image.app, name="image")
app.command(epilog="Example: clusterctl gc --only gpu-b")(gc)


def main() -> None:
    """Run the command line; a ClusterError becomes one `error:` line, one `hint:` line and its exit code."""
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
