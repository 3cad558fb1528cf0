"""`clusterctl init`: looks at machines and writes cluster.yaml."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from cluster.errors import UsageError
from cluster.verbs.options import AsJson, Hostfile, SshConfig, argument

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.discovery import Found
    from cluster.model import Device, Inventory

NO_GPU = "no GPU on any node: device is cpu, jobs will be CPU processes over gloo (--device cuda makes this an error)"


def init(
    hosts: Annotated[
        list[str], argument(metavar="[HOST...]", help="[USER@]HOST[:PORT], or names from ~/.ssh/config.")
    ] = [],  # noqa: B006 (typer reads the default and never changes it)
    hostfile: Hostfile = "",
    ssh_config: SshConfig = "",
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write this file.")] = "cluster.yaml",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="[b]auto[/b]: GPUs where every node has some, CPU where none has; [b]cuda[/b], [b]cpu[/b], "
            "[b]any[/b]: leave it to the program.",
        ),
    ] = "auto",
    runtime: Annotated[
        str,
        typer.Option("--runtime", help="[b]auto[/b]: docker, else podman, else none; or one of these for all nodes."),
    ] = "auto",
    run_dir: Annotated[
        str, typer.Option("--run-dir", help="On the nodes: one folder per job; '~/' is the home there.")
    ] = "~/clusterctl/runs",
    data_dir: Annotated[
        str, typer.Option("--data-dir", help="On the nodes: what `sync` sends; '~/' is the home there.")
    ] = "~/clusterctl/data",
    as_json: AsJson = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the file, for editors.")] = False,
) -> None:
    """Look at machines over SSH and write cluster.yaml.

    Finds GPUs, the container runtime, the address that the machines reach each other at, and free disk. Nothing is
    changed on the machines, and nothing is written unless all of them answer.
    """
    if schema:
        from cluster import keys

        print(json.dumps(keys.schema(), indent=1))
        return
    from cluster import discovery

    asked = _asked(hosts, hostfile, ssh_config)
    for option, value, values in (
        ("--device", device, ("auto", "cuda", "cpu", "any")),
        ("--runtime", runtime, ("auto", "docker", "podman", "none")),
    ):
        if value not in values:
            raise UsageError(f"{option} {value!r}", f"one of: {', '.join(values)}")
    for option, folder in (("--run-dir", run_dir), ("--data-dir", data_dir)):
        if not folder.startswith(("/", "~/")) or "\0" in folder:
            raise UsageError(f"{option} {folder!r}: not an absolute path", f"for example: {option} /data/runs")
    path = Path(output)
    if path.exists() and not force:
        raise UsageError(f"{output} is there already", "--force overwrites it, -o FILE writes another")
    wanted = replace(
        asked,
        device=cast("Device", "cuda" if device == "auto" else device),
        nodes=tuple(
            replace(
                node,
                run_dir=os.path.normpath(run_dir),
                data_dir=os.path.normpath(data_dir),
                runtime="" if runtime == "auto" else runtime,
            )
            for node in asked.nodes
        ),
    )
    out, progress = _console(), _console(stderr=True)
    with progress.status(f"looking at {len(wanted.nodes)} machines"):
        found = discovery.look(wanted)
    chosen = cast("Device", discovery.device(found, device))
    nodes = tuple(replace(each.node, gpus=() if chosen == "cpu" else each.node.gpus) for each in found.values())
    made = replace(wanted, device=chosen, nodes=nodes)
    _write(path, _file(made, found, _typed(hosts, hostfile)))
    if as_json:
        print(json.dumps({"file": output, "device": chosen, "nodes": [_as_json(each) for each in found.values()]}))
        return
    _show(out, found)
    if chosen == "cpu" and device == "auto":
        out.print(NO_GPU, style="bold yellow", soft_wrap=True)
    for name, each in found.items():
        for note in each.notes:
            out.print(f"{name}: {note}", style="yellow", markup=False, soft_wrap=True)
    out.print(f"wrote {output}; next: clusterctl doctor", markup=False, soft_wrap=True)


def _asked(hosts: list[str], hostfile: str, ssh_config: str) -> Inventory:
    from cluster import discovery

    if hosts and hostfile:
        raise UsageError("HOST... and --hostfile exclude each other", "they are two ways to name the machines")
    if not hosts and not hostfile:
        raise UsageError("init: which machines?", "for example: clusterctl init gpu-a ann@gpu-b:2222")
    asked = discovery.load(hosts=",".join(hosts), hostfile=hostfile, ssh_config=ssh_config)
    assert asked is not None
    return asked


def _typed(hosts: list[str], hostfile: str) -> str:
    return shlex.join(["clusterctl", "init", *hosts, *(["--hostfile", hostfile] if hostfile else [])])


def _file(made: Inventory, found: Mapping[str, Found], typed: str) -> str:
    from cluster import inventory

    notes = {name: _comments(each) for name, each in found.items()}
    head = [f"Found by: {typed}", "Every key: docs/inventory.md. Change what you like; `clusterctl doctor` checks it."]
    if made.device == "cpu":
        head.append("No node has a GPU that jobs may use: they run CPU processes.")
    return inventory.write(made, notes, head)


def _comments(each: Found) -> list[str]:
    return [
        f"{each.hostname}: {_gpus(each)}, {each.engine}, {each.free_gb:.0f} GB free",
        f"address: {each.why}",
        *each.notes,
    ]


def _gpus(each: Found) -> str:
    counts = {model: each.gpus.count(model) for model in each.gpus}
    return ", ".join(f"{count} x {model}" for model, count in counts.items()) or "no GPU"


def _as_json(each: Found) -> dict[str, object]:
    node = each.node
    return {
        "name": node.name,
        "login": node.login,
        "hostname": each.hostname,
        "address": node.address,
        "network": each.network,
        "why": each.why,
        "gpus": list(each.gpus),
        "runtime": node.runtime,
        "engine": each.engine,
        "run_dir": node.run_dir,
        "data_dir": node.data_dir,
        "free_gb": round(each.free_gb, 1),
        "notes": list(each.notes),
    }


def _show(out: Console, found: Mapping[str, Found]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("node", "address", "GPUs", "runtime", "free", "run directory"):
        table.add_column(column, overflow="fold")
    for name, each in found.items():
        address = f"{each.node.address} ({each.network})" if each.network else each.node.address
        table.add_row(name, address, _gpus(each), each.engine, f"{each.free_gb:.0f} GB", each.node.run_dir)
    out.print(table)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"-o {path}: {error.strerror}", "name a file in a folder that is there") from error


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(highlight=False, stderr=stderr)
