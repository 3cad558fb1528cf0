"""`clusterctl sync`: copies folders to the nodes with rsync."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal

from cluster.backends import BACKENDS
from cluster.cli.console import console, print_line
from cluster.cli.options import AsJson, NodeOptions, flag, takes_options
from cluster.errors import ClusterError, UsageError
from cluster.spec.counts import counted
from cluster.spec.request import argument

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.transport.files import Report, Synced


@takes_options
def sync(
    *,
    folders: Annotated[list[str], argument(metavar="FOLDER...", help="Folders or files on this machine.")],
    delete: Annotated[bool, flag("Delete files that exist only on the nodes.", "--delete")] = False,
    checksum: Annotated[
        bool, flag("Compare files by content; reads every file on both sides.", "--checksum")
    ] = False,
    copy: Annotated[
        bool, flag("Copy a folder even if the nodes share it, for example to faster local disks.", "--copy")
    ] = False,
    inventory: NodeOptions,
    as_json: AsJson = False,
) -> None:
    """Copy folders (data, code, anything) to every node.

    rsync sends the files that differ in size or modification time. After an interruption, run the same command again
    to continue. Each folder is copied into the node's data_dir; jobs see it at its path on this machine. A folder that
    a node sees at the same path (NFS) is not copied.
    """
    from cluster.transport import files, parallel

    chosen = inventory.need(complete=False)
    BACKENDS[chosen.backend].refuse("sync", BACKENDS)
    nodes = [files.with_data_dir(node) for node in chosen.machines if node.login]
    if not nodes:
        raise UsageError(
            "nothing to sync: every node is this machine", "jobs read the files of this machine directly"
        )
    out = console()
    screen = console(stderr=True)
    files.refuse_missing(folders)
    rows: list[dict[str, Any]] = []
    wrong: dict[str, ClusterError] = {}
    for folder in folders:
        with progress(screen, quiet=as_json) as report:
            results = files.sync(nodes, folder, delete=delete, checksum=checksum, copy=copy, report=report)
        if not as_json and len(folders) > 1:
            print_line(out, f"{folder}:")
        for name, done in results.items():
            if isinstance(done, ClusterError):
                wrong[f"{name} {folder}"] = done
                rows.append({"folder": folder, "node": name, "error": done.message, "hint": done.hint})
                continue
            rows.append({"folder": folder, **asdict(done), "error": ""})
            if not as_json:
                print_line(out, f"{name}: {_line(done)}")
            if done.left:
                hint = f"to delete the files that are only on the nodes: {files.command(folder, delete=True)}"
                wrong[f"{name} {folder}"] = ClusterError(f"{name}: {folder} differs: {done.left}", hint)
        if not as_json:
            for link in files.links_leading_out(folder)[:3]:
                print_line(out, f"note: {link} leads out of {folder}; also sync and --mount its target")
    if as_json:
        print(json.dumps(rows, indent=1))
    parallel.together(wrong)


def _line(done: Synced) -> str:
    took = f"{done.seconds:.1f} s"
    removed = f", {done.removed} removed" if done.removed else ""
    if done.how == "common":
        return f"shared folder, not copied, {took}"
    if done.how == "same":
        return f"nothing to send{removed}, {took}"
    return f"{counted(done.files, 'file')}, {decimal(done.bytes)} sent{removed}, {took}"


@contextmanager
def progress(screen: Console, *, quiet: bool = False) -> Iterator[Report]:
    """Show one progress bar per node on a terminal."""
    if quiet or not screen.is_terminal:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    bars: dict[str, TaskID] = {}
    lock = threading.Lock()
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:

        def report(node: str, what: str, now: int, total: int) -> None:
            with lock:
                if node not in bars:
                    bars[node] = progress.add_task("", total=None)
            where = node or "this machine"
            progress.update(bars[node], description=f"{where}: {what}", completed=now, total=total or None)

        yield report
