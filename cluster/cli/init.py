"""`clusterctl init`: inspects machines over SSH and writes cluster.yaml."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from cluster.backends import BACKENDS
from cluster.cli.console import console, print_line
from cluster.cli.options import AsJson, Hostfile, SshConfig, flag
from cluster.errors import UsageError
from cluster.runtimes import BARE, ENGINES
from cluster.spec.inventory import DATA_DIR, RUN_DIR
from cluster.spec.model import Device
from cluster.spec.request import argument, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from cluster.spec.model import Inventory
    from cluster.transport.discovery import InspectedMachine

_DEVICES = ("auto", "cuda", "cpu", "any")
NO_GPU = (
    "no GPU on any node: device is cpu, jobs use CPU processes and gloo (--device cuda makes this an error)"
)


def _discoverable() -> list[str]:
    return [name for name, backend in BACKENDS.items() if backend.is_discoverable]


def init(
    hosts: Annotated[
        list[str], argument(metavar="[HOST...]", help="[USER@]HOST[:PORT], or names from ~/.ssh/config.")
    ] = [],  # noqa: B006 (typer reads the default and never changes it)
    hostfile: Hostfile = "",
    ssh_config: SshConfig = "",
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="File to write.")
    ] = "cluster.yaml",
    force: Annotated[bool, flag("Overwrite the file.", "--force")] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="cuda, cpu, any (the program decides) or auto: cuda if every node has a GPU, cpu if none has one.",
        ),
    ] = "auto",
    runtime: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="docker, podman, none or auto: the first of these that a node has."
        ),
    ] = "auto",
    run_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Where the nodes keep run directories; '~/' is the home directory there."
        ),
    ] = RUN_DIR,
    data_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Where the nodes keep synced data; '~/' is the home directory there."
        ),
    ] = DATA_DIR,
    backend: Annotated[
        str,
        option(
            "--backend",
            "-b",
            metavar="NAME",
            help="Use the cluster of this backend instead of machines.",
            autocompletion=lambda incomplete: [
                name for name in _discoverable() if name.startswith(incomplete)
            ],
        ),
    ] = "",
    as_json: AsJson = False,
    schema_only: Annotated[bool, flag("Print the JSON Schema of the file, for editors.", "--schema")] = False,
) -> None:
    """Inspect machines over SSH and write cluster.yaml.

    It finds each machine's GPUs, container runtime, free disk space, and the address at which the others reach it.
    Nothing is changed on the machines, and no file is written unless all of them answer.
    """
    from cluster.spec import schema

    if schema_only:
        print(json.dumps(schema.json_schema(schema.file_type(BACKENDS)), indent=1))
        return
    from cluster.transport import discovery

    if backend and (hosts or hostfile):
        raise UsageError("--backend and machines cannot be used together", "omit one of them")
    if hosts and hostfile:
        raise UsageError("HOST... and --hostfile cannot be used together", "use one of them")
    path = Path(output)
    if backend:
        _of_cluster(backend, _writable(path, output, force=force), device, as_json=as_json)
        return
    given = None
    if hosts or hostfile:
        given = discovery.load(BACKENDS, hosts=",".join(hosts), hostfile=hostfile, ssh_config=ssh_config)
    if given is None:
        raise UsageError("init: no machines given", "for example: clusterctl init gpu-a ann@gpu-b:2222")
    _check_choice("--device", device, _DEVICES)
    _check_choice("--runtime", runtime, ("auto", *ENGINES, BARE.name))
    _check_folder("--run-dir", run_dir)
    _check_folder("--data-dir", data_dir)
    _writable(path, output, force=force)
    options = {"run_dir": os.path.normpath(run_dir), "data_dir": os.path.normpath(data_dir)}
    options["runtime"] = "" if runtime == "auto" else runtime
    wanted = replace(
        given,
        device=cast(Device, "cuda" if device == "auto" else device),
        machines=tuple(replace(machine, **options) for machine in given.machines),  # type: ignore[arg-type]
    )
    with console(stderr=True).status(f"inspecting {len(wanted.machines)} machines"):
        inspected = discovery.inspect(wanted)
    chosen = cast(Device, discovery.device(inspected, device))
    command = shlex.join(["clusterctl", "init", *hosts, *(["--hostfile", hostfile] if hostfile else [])])
    _write(path, _document(replace(wanted, device=chosen), inspected, command))
    if as_json:
        nodes = [asdict(host) for host in inspected.values()]
        print(json.dumps({"file": output, "device": chosen, "nodes": nodes}))
        return
    out = console()
    out.print(_table(inspected))
    if chosen == "cpu" and device == "auto":
        print_line(out, NO_GPU, style="bold yellow")
    for name, host in inspected.items():
        for note in host.notes:
            print_line(out, f"{name}: {note}", style="yellow")
    print_line(out, f"wrote {output}; next: clusterctl doctor")


def _check_choice(name: str, value: str, values: Sequence[str]) -> None:
    if value not in values:
        raise UsageError(f"{name} {value}: unknown", f"use one of: {', '.join(values)}")


def _check_folder(name: str, folder: str) -> None:
    if not folder.startswith(("/", "~/")) or "\0" in folder:
        raise UsageError(f"{name} {folder!r}: not an absolute path", f"for example: {name} /data/runs")


def _document(inventory: Inventory, inspected: Mapping[str, InspectedMachine], command: str) -> str:
    """Return the text of cluster.yaml: the machines as they were found by `command`, with comments."""
    from cluster.spec import schema

    head = [f"Found by: {command}"]
    head.append("All keys: docs/reference/configuration.md. To check the machines: clusterctl doctor")
    machines = tuple(host.machine for host in inspected.values())
    if inventory.device == "cpu":
        head.append("No node has a GPU that jobs may use, so they run CPU processes.")
        machines = tuple(replace(machine, gpus=()) for machine in machines)
    notes = {
        name: [f"{host.hostname}: {_gpus(host)}, {host.engine}, {host.free_gb:.0f} GB free", *host.notes]
        for name, host in inspected.items()
    }
    return schema.write(replace(inventory, machines=machines), notes, head)


def _table(inspected: Mapping[str, InspectedMachine]) -> Table:
    """Return a table of the machines."""
    from rich.table import Column, Table

    from cluster.cli.display import PLAIN

    titles = ("node", "address", "GPUs", "runtime", "free", "run directory")
    table = Table(*(Column(title, overflow="fold") for title in titles), **PLAIN)
    for name, host in inspected.items():
        address = f"{host.machine.address} ({host.network})" if host.network else host.machine.address
        table.add_row(name, address, _gpus(host), host.engine, f"{host.free_gb:.0f} GB", host.machine.run_dir)
    return table


def _writable(path: Path, output: str, *, force: bool) -> Path:
    """Return the path of the file to write. Raises UsageError if another file would be lost."""
    if path.exists() and not path.is_file():  # for example /dev/null, which the file would replace
        what = "a folder" if path.is_dir() else "not a regular file"
        raise UsageError(f"-o {output}: expected a file, but this is {what}", "write another file: -o FILE")
    if path.exists() and not force:
        raise UsageError(
            f"{output} already exists", "write another file: -o FILE; or overwrite this one: --force"
        )
    return path


def _of_cluster(backend: str, path: Path, device: str, *, as_json: bool) -> None:
    """Write the cluster.yaml of the cluster that a backend reaches from this machine."""
    from cluster.spec.job_text import yaml_text

    if backend not in BACKENDS:
        raise UsageError(
            f"--backend {backend!r}: unknown backend", f"use one of: {', '.join(_discoverable())}"
        )
    if device not in _DEVICES:
        raise UsageError(f"--device {device}: unknown", f"use one of: {', '.join(_DEVICES)}")
    settings, cluster_device, notes = BACKENDS[backend].discover()
    chosen = cluster_device if device == "auto" else device
    head = f"# Found by: clusterctl init --backend {backend}\n# All keys: docs/reference/configuration.md\n"
    _write(path, head + yaml_text({"backend": backend, "device": chosen, backend: settings}))
    if as_json:
        print(json.dumps({"file": str(path), "device": chosen, "settings": settings, "notes": notes}))
        return
    out = console()
    for note in (*notes, f"wrote {path}; next: clusterctl doctor"):
        print_line(out, note)


def _gpus(host: InspectedMachine) -> str:
    counts = Counter(host.gpus.values())
    return ", ".join(f"{count} x {model}" for model, count in counts.items()) or "no GPU"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"-o {path}: {error.strerror}", "name a file in an existing folder") from error
