"""`clusterctl sync`: brings folders to the nodes, and prints one line per node."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import ClusterError, UsageError
from cluster.verbs.options import AsJson, NodeOptions, argument, takes_options

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.files import Report, Synced


@takes_options
def sync(
    *,
    folders: Annotated[list[str], argument(metavar="FOLDER...", help="Folders or files of this machine.")],
    delete: Annotated[bool, typer.Option("--delete", help="Remove files that are only on the nodes.")] = False,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Compare by content: read every file here and on the nodes.")
    ] = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy also a folder that the nodes share: their own disks may be quicker.")
    ] = False,
    inventory: NodeOptions,
    as_json: AsJson = False,
) -> None:
    """Bring folders (data, code, anything) to every node, so that all have the same files.

    rsync sends the files that differ in size or time. After an interruption the same command continues. Each folder is
    copied into the node's data_dir. Jobs see it under the path that it has here. A folder that a node sees under the
    same path (NFS) is not copied.
    """
    from rich.console import Console

    from cluster import fanout, files

    chosen = inventory.need(complete=False)
    nodes = [files.with_data_dir(node) for node in chosen.nodes if node.login]
    if not nodes:
        raise UsageError("nothing to sync to: every node is this machine", "its files are where jobs look for them")
    out, screen = Console(highlight=False), Console(highlight=False, stderr=True)
    files.refuse_missing(folders)
    rows: list[dict[str, Any]] = []
    wrong: dict[str, ClusterError] = {}
    for folder in folders:
        with _progress(screen, quiet=as_json) as report:
            results = files.sync(nodes, folder, delete=delete, checksum=checksum, copy=copy, report=report)
        if not as_json and len(folders) > 1:
            _say(out, f"{folder}:")
        for name, done in results.items():
            if isinstance(done, ClusterError):
                wrong[f"{name} {folder}"] = done
                rows.append({"folder": folder, "node": name, "error": done.message, "hint": done.hint})
                continue
            rows.append({"folder": folder, **asdict(done), "error": ""})
            if not as_json:
                _say(out, f"{name}: {_line(done)}")
            if done.left:
                hint = f"{files.command(folder, delete=True)} removes what is only there"
                wrong[f"{name} {folder}"] = ClusterError(f"{name}: {folder} differs: {done.left}", hint)
        if not as_json:
            for link in files.links_leading_out(folder)[:3]:
                _say(
                    out, f"note: {link} leads out of {folder}; jobs need that, too: clusterctl sync it, and --mount it"
                )
    if as_json:
        print(json.dumps(rows, indent=1))
    fanout.together(wrong)


def _line(done: Synced) -> str:
    from rich.filesize import decimal

    took = f"{done.seconds:.1f} s"
    removed = f", {done.removed} removed" if done.removed else ""
    if done.how == "common":
        return f"a common folder, not copied, {took}"
    if done.how == "same":
        return f"nothing to send{removed}, {took}"
    files = "file" if done.files == 1 else "files"
    return f"{done.files} {files}, {decimal(done.bytes)} sent{removed}, {took}"


def _say(out: Console, text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)


@contextmanager
def _progress(screen: Console, *, quiet: bool) -> Iterator[Report]:
    """One bar per node on a terminal; nothing elsewhere."""
    if quiet or not screen.is_terminal:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    bars: dict[str, TaskID] = {}
    lock = threading.Lock()
    text = TextColumn("{task.description}", markup=False)
    with Progress(
        text, BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn(), console=screen, transient=True
    ) as progress:

        def report(node: str, what: str, now: int, total: int) -> None:
            with lock:
                if node not in bars:
                    bars[node] = progress.add_task("", total=None)
            progress.update(
                bars[node], description=f"{node or 'this machine'}: {what}", completed=now, total=total or None
            )

        yield report
