"""`clusterctl image`: copies a container image to the nodes, and compares it between them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from cluster.backends import BACKENDS
from cluster.cli.console import console, print_line
from cluster.cli.options import AsJson, InventoryFile, NodeOptions, takes_options
from cluster.cli.signals import EXIT_INTERRUPTED
from cluster.cli.sync import progress
from cluster.errors import ClusterError, UsageError
from cluster.runtimes import RUNTIMES, short_id
from cluster.spec.request import argument, option

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.images import Pushed
    from cluster.spec.model import Machine

IMAGE = "Container image.  [default: the inventory's, or the one that `make image` builds]"
app = typer.Typer(
    help="Copy the container image to the nodes, and compare it between nodes.", no_args_is_help=True
)


@dataclass(frozen=True)
class ImageOptions(NodeOptions):
    """Options that choose a container image and nodes."""

    names: Annotated[list[str], argument(metavar="[NODES]", help="Nodes by name.  [default: all]")] = field(
        default_factory=list
    )
    image: Annotated[str, option(metavar="IMAGE", help=IMAGE)] = ""

    def chosen(self) -> tuple[list[Machine], str]:
        """Return the chosen nodes and image."""
        from cluster.spec.image import DEFAULT_IMAGE

        loaded = self.need(complete=False)
        BACKENDS[loaded.backend].refuse("image push", BACKENDS)
        kind = RUNTIMES.get(loaded.machines[0].runtime)  # None: not known yet
        if kind and kind.image_is_file:
            why = f"{loaded.path}: {kind.name} runs an image file on the shared disk, so there is nothing to copy"
            raise UsageError(why, kind.image_command())
        known = {node.name: node for node in loaded.machines}
        for name in self.names:
            if name not in known:
                raise UsageError(f"no node {name!r}", f"the nodes are {', '.join(known)}")
        names = dict.fromkeys(self.names or known)
        return [known[name] for name in names], self.image or loaded.image or DEFAULT_IMAGE


@app.command(epilog="Example: clusterctl image push gpu-b --image trainer:0.1")
@takes_options
def push(*, options: ImageOptions, as_json: AsJson = False) -> None:
    """Copy this machine's container image to the nodes.

    Only missing layers are sent, compressed. After an interruption, run the same command again to resume.
    """
    from cluster.transport import parallel

    nodes, image = options.chosen()
    try:
        done = push_to(nodes, image, console(stderr=as_json))
    except KeyboardInterrupt:
        print("interrupted; to resume the transfer: clusterctl image push", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        rows = {}
        for name, pushed in done.items():
            if isinstance(pushed, ClusterError):
                rows[name] = {"error": pushed.message, "hint": pushed.hint}
            else:
                rows[name] = {**asdict(pushed), "error": ""}
        print(json.dumps(rows, indent=1))
    parallel.together(done)


@app.command()
@takes_options
def ls(*, options: ImageOptions, as_json: AsJson = False) -> None:
    """Show the container image's ID on every node.

    Exit codes: 0 all nodes have the same image, 1 they do not, 5 a node or its Docker Engine does not answer.
    """
    from cluster import images
    from cluster.transport import parallel

    nodes, image = options.chosen()
    images.refuse_name(image)
    image_ids = parallel.each(nodes, lambda node: images.engine.inspect(node, image).id)
    ids = {name: image_id for name, image_id in image_ids.items() if not isinstance(image_id, ClusterError)}
    if as_json:
        print(json.dumps({name: ids.get(name) for name in image_ids}, indent=1))
    else:
        width = max(len(name) for name in image_ids)
        for name in image_ids:
            state = (short_id(ids[name]) or "missing") if name in ids else "no answer"
            print_line(console(), f"{name:<{width}}   {image}   {state}")
    parallel.together(image_ids)
    if len({*ids.values()}) > 1 or "" in ids.values():
        raise typer.Exit(1)


@app.command(epilog="Example: clusterctl image sif /shared/me/trainer-0.1.sif")
def sif(
    target: Annotated[
        str,
        argument(help="File on the shared disk.  [default: the inventory's image, or next to its run_dir]"),
    ] = "",
    image: Annotated[
        str,
        option(
            metavar="IMAGE", help="Docker image on this machine.  [default: the one that `make image` builds]"
        ),
    ] = "",
    inventory: InventoryFile = "",
) -> None:
    """Convert the Docker image to a SIF file for Apptainer.

    The login node converts it, which takes minutes and, for a while, three times the image's disk space next to TARGET.
    """
    from cluster.images import apptainer as sif_file
    from cluster.spec.image import DEFAULT_IMAGE

    cluster = NodeOptions(inventory).need()
    login = cluster.machines[0]
    if not BACKENDS[cluster.backend].has_login_node:
        why = f"{cluster.path}: backend {cluster.backend} has no login node, which converts the image"
        raise UsageError(why, "to copy the image to machines: clusterctl image push")
    image = image or DEFAULT_IMAGE
    name = image.rpartition("/")[2].replace(":", "-") + ".sif"
    default = str(PurePosixPath(login.run_dir).parent / name)
    target = target or (cluster.image if cluster.image.endswith(".sif") else default)
    if not target.startswith("/"):
        raise UsageError(f"{target}: not an absolute path", f"for example: /shared/{name}")
    out = console()
    began = time.monotonic()
    try:
        with progress(out) as report:
            sif_file.make(login, image, target, report)
    except KeyboardInterrupt:
        print("interrupted; no file was written", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_line(out, f"{login.name}: {target}, {time.monotonic() - began:.0f} s")
    if cluster.image != target:
        print_line(out, f"to use it in every job, write in {cluster.path}: image: {target}")


def push_to(nodes: Sequence[Machine], image: str, out: Console) -> dict[str, Pushed | ClusterError]:
    """Copy this machine's container image to the nodes and show the progress. Return the result of each node."""
    from cluster import images

    with progress(out) as report:
        done = images.push(nodes, image, lambda text: print_line(out, text), report)
    for name, pushed in done.items():
        if isinstance(pushed, ClusterError):
            continue
        took = " already"
        if pushed.seconds:
            share = 100 * pushed.sent / max(1, pushed.size)
            took = f": {pushed.missing} of {pushed.layers} layers, {decimal(pushed.sent)} ({share:.2f} % of the image)"
            took += f", {pushed.seconds:.1f} s"
        print_line(out, f"{name}: has {image} ({short_id(pushed.id)}){took}")
    return done
