"""`clusterctl image`: the same image on every node."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.config import DEFAULT_IMAGE
from cluster.errors import ClusterError, UsageError
from cluster.runtimes.containers import short_id
from cluster.verbs.follow import EXIT_INTERRUPTED
from cluster.verbs.options import AsJson, InventoryFile, InventoryOptions, argument, option, takes_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from cluster.images import Pushed
    from cluster.model import Node

app = typer.Typer(help="Send the job's image to the nodes, and see which one they have.", no_args_is_help=True)

#: Where there is no terminal, a node's progress is a line this often.
_EVERY_S = 10.0


@dataclass
class ImageOptions(InventoryOptions):
    """Options that choose an image and the nodes that should have it."""

    names: Annotated[
        list[str],
        argument(metavar="[NODES]", help="By default all of the inventory."),
    ] = field(default_factory=list)
    image: Annotated[str, option("--image", help=f"By default the inventory's, or {DEFAULT_IMAGE}.")] = ""

    def chosen(self) -> tuple[list[Node], str]:
        """Return the chosen nodes and image."""
        found = self.need(complete=False)
        if found.backend == "slurm" and found.nodes[0].runtime == "apptainer":
            hint = "clusterctl image sif"
            raise UsageError(f"{found.path}: Apptainer takes a SIF file from the cluster's disk", hint)
        known = {node.name: node for node in found.nodes}
        for name in self.names:
            if name not in known:
                raise UsageError(f"no node {name!r}", f"there are: {', '.join(known)}")
        names = dict.fromkeys(self.names or known)
        return [known[name] for name in names], self.image or found.image or DEFAULT_IMAGE


@app.command(epilog="Example: clusterctl image push gpu-b --image trainer:0.1")
@takes_options
def push(*, options: ImageOptions, as_json: AsJson = False) -> None:
    """Give every node the image that this machine has: only the layers that it lacks, compressed.

    Interrupted (Ctrl-C, a lost connection), it goes on from there the next time.
    """
    from rich.console import Console

    from cluster import images

    nodes, image = options.chosen()
    out = Console(highlight=False, stderr=as_json)
    try:
        with _Screen(out) as screen:
            done = images.push(nodes, image, screen)
    except KeyboardInterrupt:
        print("interrupted; what has arrived is kept: clusterctl image push goes on from there", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print(json.dumps({name: asdict(pushed) for name, pushed in done.items()}, indent=1))
        return
    for name, pushed in done.items():
        out.print(_line(name, image, pushed), markup=False, soft_wrap=True)


@app.command()
@takes_options
def ls(*, options: ImageOptions, as_json: AsJson = False) -> None:
    """Show the image's id on every node.

    Exit codes: 0 all nodes have the same, 1 they have not, 5 a node or its engine does not answer.
    """
    from cluster import fanout, images

    nodes, image = options.chosen()
    images.refuse_name(image)
    found = fanout.each(nodes, lambda node: images.engine.image_id(node, image))
    ids = {name: image_id for name, image_id in found.items() if not isinstance(image_id, ClusterError)}
    if as_json:
        print(json.dumps({name: ids.get(name) for name in found}, indent=1))
    else:
        width = max(len(name) for name in found)
        for name in found:
            print(f"{name:<{width}}   {image}   {(short_id(ids[name]) or 'not there') if name in ids else 'no answer'}")
    fanout.together(found)
    if len({*ids.values()}) > 1 or "" in ids.values():
        raise typer.Exit(1)


@app.command(epilog="Example: clusterctl image sif /shared/me/trainer-0.1.sif")
def sif(
    target: Annotated[
        str,
        argument(
            help="The file, on a disk that all nodes have; by default the inventory's image, else beside its run_dir."
        ),
    ] = "",
    image: Annotated[
        str, option("--image", help=f"The Docker image of this machine; by default {DEFAULT_IMAGE}.")
    ] = "",
    inventory: InventoryFile = "",
) -> None:
    """Make the Docker image of this machine one SIF file on a Slurm cluster, for Apptainer.

    The image goes to the login node, which makes the file of it; that takes minutes and twice its room for a while.
    """
    from rich.console import Console

    from cluster.images import sif as sif_file

    found = InventoryOptions(inventory).need()
    login = found.nodes[0]
    if found.backend != "slurm":
        raise UsageError(f"{found.path} is not of a Slurm cluster", "other machines take the image itself: image push")
    image = image or DEFAULT_IMAGE
    name = image.rpartition("/")[2].replace(":", "-") + ".sif"
    target = target or (
        found.image if found.image.endswith(".sif") else str(PurePosixPath(login.run_dir).parent / name)
    )
    if not target.startswith("/"):
        raise UsageError(f"{target}: it must be an absolute path, as the nodes see it", f"for example: /shared/{name}")
    out = Console(highlight=False)
    began = time.monotonic()
    try:
        with _Screen(out) as screen:
            sif_file.make(login, image, target, lambda done, size: screen.sent(login.name, done, size))
    except KeyboardInterrupt:
        print("interrupted; there is no half file", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    out.print(f"{login.name}: {target}, {time.monotonic() - began:.0f} s", markup=False, soft_wrap=True)
    if found.image != target:
        out.print(f"for every job, in {found.path}: image: {target}", markup=False, soft_wrap=True)


def _line(name: str, image: str, pushed: Pushed) -> str:
    """`gpu-b: has trainer:0.1 (99074e3c7b21): 1 of 6 layers, 0.7 MB by zstd (0.01 % of the image), 2.1 s`."""
    from rich.filesize import decimal

    has = f"{name}: has {image} ({short_id(pushed.id)})"
    if not pushed.missing and not pushed.seconds:
        return f"{has} already"
    what = "the whole image" if pushed.whole else f"{pushed.missing} of {pushed.layers} layers"
    share = 100 * pushed.sent / max(1, pushed.size)
    cost = f"{decimal(pushed.sent)} by {pushed.compression} ({share:.2f} % of the image)"
    return f"{has}: {what}, {cost}, {pushed.seconds:.1f} s"


def bring(nodes: Sequence[Node], image: str, out: Console) -> None:
    """Give the nodes the image that this machine has, with a bar on a terminal; raises ClusterError."""
    from cluster import images

    with _Screen(out) as screen:
        for name, pushed in images.push(nodes, image, screen).items():
            screen.note(_line(name, image, pushed))


class _Screen:
    """A bar for every node on a terminal, a line now and then elsewhere."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Screen:
        """Take the last lines of the terminal, where there is one."""
        if self._out.is_terminal:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bars = Progress(*columns, console=self._out, transient=True).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        if self._bars is not None:
            self._bars.__exit__(None, None, None)

    def note(self, text: str) -> None:
        """One line."""
        self._out.print(text, markup=False, soft_wrap=True)

    def sent(self, node: str, done: int, total: int) -> None:
        """Move the node's bar, or say how far it is."""
        with self._lock:
            if self._bars is not None:
                if node not in self._tasks:
                    self._tasks[node] = self._bars.add_task(node)
                self._bars.update(self._tasks[node], completed=done, total=total)
            elif time.monotonic() - self._said.setdefault(node, time.monotonic()) > _EVERY_S:
                self._said[node] = time.monotonic()
                self.note(f"{node}: {done / 1e6:.0f} MB of about {total / 1e6:.0f} MB")
