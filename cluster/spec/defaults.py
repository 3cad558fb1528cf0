"""Defaults: completes the launch options to a Job, from the inventory and this machine; ports to try. Pure."""

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import NamedTuple, cast

from cluster import contract
from cluster.errors import UsageError, near_or_all
from cluster.runtimes import RUNTIMES, engine_options
from cluster.spec.model import PASS_ENV, Device, Gpu, Inventory, Job, Machine, Mount, Procs, Queue, and_list
from cluster.spec.request import Request
from cluster.spec.traits import Table, Traits

DEFAULT_IMAGE = "trainer:0.1"


def how_to_get(image: str, engine: str) -> str:
    """Return how to get an image that this machine's container engine lacks."""
    if image == DEFAULT_IMAGE:
        return "build it in a clone of the repository: make image; or name another: --image NAME"
    return f"{engine} pull {image}, or build it: {engine} build -t {image} FOLDER"


DEFAULT_RESTARTS = 3
DEFAULT_STALL_TIMEOUT_S = 300.0

#: The options of a dataset: the trainer's, and that of `yolo`.
_DATA = ("--data", "data=")
#: The largest number of nodes. A typing error would otherwise take hours to plan.
_MOST_NODES = 10_000
#: Ports for `auto`: below the ephemeral range of Linux, so that no outgoing connection occupies one.
_AUTO_PORTS = range(20000, 30000)
#: Variables that change what pip and uv install.
_INSTALLER_VARIABLES = ("PIP_", "UV_")
#: The files and folders that a requirements file includes.
_INCLUDES = re.compile(
    rb"^\s*(?:(?:-r|-c|-e|--requirement|--constraint|--editable)[ \t=]*|(?=\.\.?(?:/|$)|/\w))(\S+)", re.MULTILINE
)
#: The pattern of an environment variable's name.
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


@dataclass(frozen=True)
class Here:
    """Facts about the launching machine that the defaults of a job depend on.

    `gpus` are the visible GPU ids, `user` is the UID:GID for containers. `exists` and `is_folder` examine a path.
    `variables` are the names of environment variables.
    `read` returns the content of a file, b"" if there is no regular file, or None if it is too large or not readable.
    """

    cwd: str
    user: str
    python: str
    gpus: tuple[Gpu, ...] = ()
    variables: tuple[str, ...] = ()
    exists: Callable[[str], bool] = lambda path: False
    is_folder: Callable[[str], bool] = lambda path: False
    read: Callable[[str], bytes | None] = lambda path: b""


def job(
    request: Request, here: Here, backend: Traits, table: Table, inventory: Inventory | None = None
) -> tuple[Job, list[str]]:
    """Return the job for a request, and notes for the user. `table` has all backends.

    Raises UsageError if options are invalid or conflict.
    """
    inventory = inventory if backend.machines != "here" else None
    fewest, most = node_range(request.nodes, _all_nodes(request, inventory) if inventory else 1)
    _refuse_unsupported(request, backend, table, is_range=fewest < most)
    queue = _queue(request, backend, table, inventory)
    procs = _procs(request, most, here, backend, table, inventory)
    device, notes = _device(request, here, most, procs, inventory, queue)
    if queue is not None and isinstance(procs, int):
        notes += backend.advice(device, procs, queue.settings)
    hosts, spares = _hosts(request, most, procs, device, inventory) if inventory and not queue else ((), ())
    elsewhere = bool(hosts) or bool(queue and (queue.login.login or not backend.has_login_node))
    mounts = [mount(text, here.cwd) for text in request.mounts]
    mounts = [replace(each, synced=elsewhere and here.exists(each.source)) for each in mounts]
    arguments, paths = _arguments(request, here, mounts, backend.folders(queue.settings) if queue else ())
    mounts += [Mount(path, path, synced=elsewhere) for path in paths]
    workdir = _workdir(request, here, mounts)
    copies = bool(request.command) and (elsewhere or queue is not None)
    if request.command:
        if arguments:
            hint = "put all of them into --command '...'"
            raise UsageError("--command and arguments after -- cannot be used together", hint)
        command = tuple(split(request.command, f"--command {request.command!r}"))
        if not copies:
            mounts.append(Mount(workdir, workdir, read_only=False))
    else:
        if not arguments or arguments[0].startswith("-"):
            arguments.insert(0, contract.COMMANDS[0])
        if arguments[0] not in contract.COMMANDS:
            hint = near_or_all(arguments[0], contract.COMMANDS)
            hint += "" if hint.endswith("?") else "; for another program: --command 'train.py ...'"
            raise UsageError(f"-- {arguments[0]}: the trainer has no such command", hint)
        if device != "any" and "--device" not in arguments:
            arguments += ["--device", device]
        command = ("-m", "trainer", *arguments)
    env, secrets = _environment(request.env)
    job_env = {**(inventory.env if inventory else {}), **env}
    prologue = "\n".join(filter(None, [inventory.prologue if inventory else "", request.prologue]))
    restarts = 0 if request.command else DEFAULT_RESTARTS  # other programs may not resume
    stall_timeout_s = 0.0 if request.command else DEFAULT_STALL_TIMEOUT_S  # other programs may wait for input
    run_root = request.run_root or (queue.login.run_dir if queue and not elsewhere else "")
    # Divide the GPUs among the nodes if they suffice, also for `any`: the program may use none.
    needed = _total(procs, most)
    shares = not elsewhere and not queue and device != "cpu" and len(here.gpus) >= needed
    in_containers, is_here = backend.in_containers, backend.machines == "here"
    new = Job(
        name=request.name or "job",
        command=command,
        nodes=most,
        procs_per_node=procs,
        # "./runs" stays relative: a compose file may be committed, so it must not contain this machine's paths.
        run_root=run_root if run_root.startswith("./") else _absolute(run_root or "runs", here.cwd),
        device=device,
        image=_image(request, backend, inventory, hosts, queue),
        user=here.user if is_here and in_containers else "",
        python=request.python or ("python3" if in_containers is not False else here.python),
        workdir=workdir if request.command or in_containers is False else "",
        copies_workdir=copies,
        prologue=prologue,
        setup=request.setup,
        setup_key=_setup_key(request.setup, prologue, job_env, workdir, here),
        env=job_env,
        pass_env=inventory.pass_env if inventory else _pass_env(here) if is_here and in_containers else PASS_ENV,
        secrets=secrets,
        mounts=() if in_containers is False else (*dict.fromkeys([*(inventory.mounts if inventory else ()), *mounts]),),
        run_options=_run_options(request, (*hosts, *spares, *([queue.login] if queue else []))),
        port=_port(request.master_port),
        timeout_s=request.timeout_s,
        says_ready=not request.command,
        gpus=here.gpus[:needed] if shares else (),
        hosts=hosts,
        spares=spares,
        queue=queue,
        min_nodes=fewest,
        max_restarts=restarts if request.max_restarts is None else request.max_restarts,
        grace_s=seconds(request.grace, "--grace") if request.grace else contract.STOP_GRACE_S,
        stall_timeout_s=stall_timeout_s if request.stall_timeout_s is None else request.stall_timeout_s,
    )
    return (new if request.name else replace(new, name=default_name(new))), notes


def absolute_paths(request: Request, here: Here) -> Request:
    """Return the request with absolute paths of its files and folders. Raise UsageError for an invalid one."""
    mounts = [mount(text, here.cwd) for text in request.mounts]
    return replace(
        request,
        arguments=_arguments(request, here, mounts, ())[0],
        workdir=_workdir(request, here, mounts) if request.command else "",
        run_root=_absolute(request.run_root or "runs", here.cwd),
        build=request.build and _absolute(request.build, here.cwd),
        mounts=[f"{each.source}:{each.target}:{'ro' if each.read_only else 'rw'}" for each in mounts],
    )


def _queue(request: Request, backend: Traits, table: Table, inventory: Inventory | None) -> Queue | None:
    """Return what assigns the machines, or None if they are known."""
    if backend.machines != "assigned":
        return None
    login = inventory.machines[0] if inventory else backend.login_node(request.image)
    login = replace(login, run_dir="") if backend.has_login_node and request.run_root and not login.login else login
    given = request.given_settings(backend.name, table)
    return Queue(login, backend.settings(inventory.settings if inventory else {}, given))


def _refuse_unsupported(request: Request, backend: Traits, table: Table, *, is_range: bool) -> None:
    """Raise UsageError for an option that the backend does not support."""
    if is_range:
        backend.refuse("--nodes MIN:MAX", table, f"--nodes {request.nodes}")
    for name, option in {"partition": "", "account": "", "qos": "", "time_limit": "--time"}.items():
        if getattr(request, name):
            backend.refuse(option or f"--{name}", table)
    for name in request.given_settings(backend.name, table):
        backend.refuse("--set", table, f"--set {name}")
    for text in request.settings:
        if "=" not in text and text not in backend.flags:
            hint = f"give it a value: --set {text}=VALUE"
            hint += f"; an option that takes none: --set {text}=" if backend.flags else ""
            raise UsageError(f"--set {text}: expected KEY=VALUE", hint)
    given = {
        "--run-option": request.run_options,
        "--prologue": request.prologue,
        "--spares": request.spares,
        "--image": request.image,
        "--mount": request.mounts,
        "--build": request.build,
    }
    for option in (option for option, value in given.items() if value):
        backend.refuse(option, table)
    if request.spares < 0:
        raise UsageError(f"--spares {request.spares}: must be at least 0")


def gpus_per_node(text: str) -> Procs:
    """Parse `--gpus`: `2`, `2,1` or `all`. Equal numbers are one. Raise UsageError for anything else."""
    if text == "all":
        return "all"
    if not re.fullmatch(r"-?[0-9]{1,18}(, *-?[0-9]{1,18})*", text):
        example = "for example: --gpus 2; for two nodes with two GPUs and one: --gpus 2,1; or --gpus all"
        raise UsageError(f"--gpus {text}: expected a number, one number per node, or all", example)
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        raise UsageError(f"--gpus {text}: must be at least 1" + (" for each node" if numbers[1:] else ""))
    return numbers[0] if len(numbers) == 1 else numbers


def _procs(
    request: Request, nodes: int, here: Here, backend: Traits, table: Table, inventory: Inventory | None
) -> Procs:
    """Return the processes per node. Raise UsageError for numbers that do not fit the nodes, or `all` without GPUs."""
    wanted = gpus_per_node(str(request.gpus))
    if isinstance(wanted, tuple):
        if len(wanted) != nodes:
            why = f"{len(wanted)} numbers, and the job has {nodes} node{'' if nodes == 1 else 's'}"
            hint = f"give one number per node (--nodes {len(wanted)}), or one for all nodes: --gpus {max(wanted)}"
            raise UsageError(f"--gpus {request.gpus}: {why}", hint)
        wanted = wanted[0] if len(set(wanted)) == 1 else wanted
    if isinstance(wanted, int):
        return wanted
    number = max(wanted) if isinstance(wanted, tuple) else 2
    backend.refuse("unequal nodes", table, f"--gpus {request.gpus}", f"give all nodes one number: --gpus {number}")
    if wanted != "all":
        return wanted
    device = inventory.device if inventory and request.device == "auto" else request.device
    if device == "cpu":
        cause = "--device cpu" if request.device == "cpu" else f"device: cpu in {inventory and inventory.path}"
        hint = "give the number of CPU processes per node: --gpus 2"
        raise UsageError(f"--gpus all: there are no GPUs to count with {cause}", hint)
    if inventory:
        return wanted
    if not here.gpus:
        hint = "give a number, for CPU processes: --gpus 2"
        raise UsageError("--gpus all: this machine has no GPU that can be used", hint)
    if nodes > 1:
        each = len(here.gpus) // nodes
        hint = "use one node: --nodes 1" + (f"; or divide them: --gpus {each}" if each else "")
        raise UsageError(f"--gpus all: this machine's GPUs are for one node, and the job has {nodes}", hint)
    return len(here.gpus)


def _total(procs: Procs, nodes: int) -> int:
    """Return the number of processes of all nodes on this machine."""
    return nodes * procs if isinstance(procs, int) else sum(procs) if isinstance(procs, tuple) else 0


def _device(
    request: Request, here: Here, nodes: int, procs: Procs, inventory: Inventory | None, queue: Queue | None
) -> tuple[Device, list[str]]:
    """Return the device of the ranks, and notes. `auto` is the inventory's device, or what this machine has."""
    if request.device not in ("auto", "cpu", "cuda", "any"):
        raise UsageError(f"--device {request.device}: unknown", "use one of: auto, cpu, cuda, any")
    device = cast(Device, "cuda" if request.device == "auto" else request.device)
    notes = []
    if request.device == "auto" and inventory is not None:
        device = inventory.device
    needed = _total(procs, nodes)
    if device == "cuda" and inventory is None and queue is None and len(here.gpus) < needed:
        missing = f"GPUs on this machine: {len(here.gpus)}, needed: {needed}"
        if request.device == "cuda":
            raise UsageError(missing, "use fewer --gpus, or --device auto (CPU processes instead)")
        device = "cpu"
        notes.append(f"{missing} (--device cuda makes this an error)")
    if device == "cpu":
        each = and_list(procs) if isinstance(procs, tuple) else procs
        notes.append(f"processes per node: {each}, on the CPU over gloo")
    return device, notes


def _hosts(
    request: Request, nodes: int, procs: Procs, device: Device, inventory: Inventory
) -> tuple[tuple[Machine, ...], tuple[Machine, ...]]:
    """Return the job's machines and its spares, the first ones of the inventory."""
    if len(inventory.machines) < nodes + request.spares:
        known = ", ".join(node.name for node in inventory.machines)
        why = f"--nodes {nodes} --spares {request.spares}: {inventory.path or 'the inventory'} has only {known}"
        hint = "use fewer --nodes, or add machines to the inventory: clusterctl init"
        raise UsageError(why, hint)
    used = inventory.machines[: nodes + request.spares]
    for index, host in enumerate(used if device != "cpu" else ()):
        if procs == "all":
            if not host.gpus:
                others = ",".join(each.name for each in inventory.machines if each.gpus)
                hint = f"leave it out (--only {others}), or " if others else ""
                hint += "start processes on CPUs: --device cpu --gpus 1"
                raise UsageError(f"{host.name}: --gpus all, and it has no GPUs", hint)
            continue
        # A spare may have to replace any node.
        wanted = procs if isinstance(procs, int) else procs[index] if index < nodes else max(procs)
        if (device == "cuda" or host.gpus) and len(host.gpus) < wanted:
            hint = "use fewer --gpus, other nodes, or --device cpu (CPU processes instead)"
            hint = f"use all GPUs of each machine: --gpus all; or {hint}" if all(each.gpus for each in used) else hint
            many = "more" if isinstance(procs, int) else f"{wanted} {'here' if index < nodes else 'of a spare'}, more"
            why = f"{host.name}: --gpus {request.gpus} asks for {many} than its GPUs ({len(host.gpus)})"
            raise UsageError(why, hint)
    return inventory.machines[:nodes], inventory.machines[nodes : nodes + request.spares]


def _arguments(
    request: Request, here: Here, mounts: Sequence[Mount], folders: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the trainer's arguments with absolute paths, and what to mount: these paths, and what those files need.

    Paths below `folders` exist on the nodes.
    """
    there = (*(each.target for each in mounts), *folders)
    arguments: list[str] = []
    paths: list[str] = []
    for before, option, argument in _words(request.arguments):
        path = _absolute(argument, here.cwd)
        is_mounted = any(f"{argument}/".startswith(f"{each}/") for each in there)
        folder_of_data = option in _DATA and argument not in contract.DATA_SETS and here.is_folder(path)
        if here.exists(path) and ("/" in argument or "." in argument or folder_of_data):
            paths += [path, *_needed_by(option, path, here)]
            argument = path
        elif "/" in argument and option in contract.INPUT_OPTIONS and not is_mounted and "://" not in argument:
            shown = f"{before}{argument}" if before else f"{option} {argument}"
            raise UsageError(f"{shown}: no such file", f"the full path would be {path}")
        arguments.append(before + argument)
    paths = list(dict.fromkeys(paths))
    folders = [path for path in paths if here.is_folder(path)]
    folders += [each.source for each in mounts if each.source == each.target]
    return arguments, [path for path in paths if not any(path.startswith(f"{folder}/") for folder in folders)]


def _words(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (text before it, option, word) for each word, where the word is the value of the option, if it has one.

    `--data x` and `--data=x` become two words, and `data=x` stays one: its option is `data=`.
    """
    option = ""
    for word in arguments:
        name, mark, value = word.partition("=")
        if mark and name in contract.INPUT_OPTIONS:
            yield "", option, name
            yield "", name, value
        elif mark and f"{name}=" in contract.INPUT_OPTIONS:
            yield f"{name}=", f"{name}=", value
        else:
            yield "", option, word
        option = word


def _needed_by(option: str, path: str, here: Here) -> list[str]:
    """Return the paths that the trainer also reads if the value of an option is the file `path`."""
    if option in _DATA and path.endswith((".yaml", ".yml")):
        return _data_folders(path, here)
    before = str(PurePosixPath(path).with_name(contract.PREVIOUS_CHECKPOINT))
    return [before] if option == "--resume" and before != path and here.exists(before) else []


def _data_folders(path: str, here: Here) -> list[str]:
    """Return the folders of a data.yaml that exist: its `path`, and those with the images and labels of its splits.

    The trainer reports a data.yaml that cannot be read.
    """
    import yaml  # most jobs have no data.yaml, and the import is slow

    try:
        content = yaml.safe_load(here.read(path) or b"")
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date, or not UTF-8
        return []
    values = content if isinstance(content, dict) else {}
    root = _absolute(str(values.get("path") or "."), posixpath.dirname(path))
    found = [root] if values.get("path") else []
    for split in ("train", "val", "test"):
        value = values.get(split)
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, str):
                continue
            # Exported data sets often have paths relative to a folder that their archive does not contain.
            sources = [_absolute(text, root) for text in (entry, entry.removeprefix("../"))]
            source = next(filter(here.exists, sources), "")
            top = f"{source}/".rpartition("/images/")[0]  # labels are in a folder beside `images`
            if source:
                found.append(top or (source if here.is_folder(source) else posixpath.dirname(source)))
    return [folder for folder in found if here.is_folder(folder)]


def _run_options(request: Request, machines: Sequence[Machine]) -> tuple[str, ...]:
    """Return the options for the container engine. Raises UsageError for a wrong one, or where there is no engine."""
    engine_options.parse(request.run_options)
    without = [each for each in machines if not (each.runtime and RUNTIMES[each.runtime].takes_run_options)]
    if request.run_options and without:
        why = f"--run-option: {without[0].name} starts its programs with runtime {without[0].runtime or 'none'}"
        raise UsageError(why, "omit it: only docker and podman take options of docker run")
    return tuple(request.run_options)


def _workdir(request: Request, here: Here, mounts: Sequence[Mount]) -> str:
    """Return the absolute path of the working directory."""
    path = _absolute(request.workdir or ".", here.cwd)
    if request.workdir and not request.command:
        raise UsageError("--workdir: only with --command", "the trainer needs no working directory: omit it")
    if request.workdir and not here.is_folder(path):
        raise UsageError(f"--workdir {request.workdir}: no such folder", f"the full path would be {path}")
    if request.command and any(each.target == path for each in mounts):
        raise UsageError(f"--mount: {path} is the working directory, which is mounted and writable", "omit this mount")
    return path


def _setup_key(text: str, prologue: str, env: Mapping[str, str], workdir: str, here: Here) -> str:
    """Return a hash of the setup commands, of the prologue, and of the files and variables that the commands use.

    "" if they name a folder, such as `.`, or a file that is too large: the environment then is the job's own.
    """
    if not text or (files := _named_files(text, workdir, here)) is None:
        return ""
    parts = [text.encode(errors="surrogateescape"), *files]
    parts += [prologue.encode(errors="surrogateescape")] if prologue else []
    used = {name for name in env if any(re.search(rb"\b%b\b" % name.encode(), part) for part in parts)}
    used |= {name for name in env if name.startswith(_INSTALLER_VARIABLES)}
    parts += [f"{name}={env[name]}".encode(errors="surrogateescape") for name in sorted(used)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:%b" % (len(part), part))
    return digest.hexdigest()[:16]


def _named_files(text: str, workdir: str, here: Here) -> list[bytes] | None:
    """Return the content of the files that commands name, and of the requirement files that those include.

    None if one of them is a folder, or too large to read.
    """
    text = re.sub(r">+\s*\S+", " ", text)  # a file that the commands write
    commands = [re.split(r"[\s=()<]+", command.strip()) for command in re.split(r"[;&|\n]+", text)]
    # The shell finds the first word in PATH, unless it has a slash.
    words = [word for command in commands for word in command[0 if "/" in command[0] else 1 :]]
    pending = [_file_of(word, workdir) for word in reversed(words) if word]
    found: dict[str, bytes] = {}
    while pending:
        path = pending.pop()
        if path in found:
            continue
        content = here.read(path)
        if content is None or here.is_folder(path):
            return None
        found[path] = content
        included = [word.decode(errors="replace") for word in _INCLUDES.findall(content)]
        pending += [_file_of(word, posixpath.dirname(path)) for word in included]
    return [content for content in found.values() if content]


def _file_of(word: str, folder: str) -> str:
    """Return the path that a word of a command names, without quotes and pip's extras: `'.[dev]'`."""
    return _absolute(word.strip("'\"").partition("[")[0], folder)


def split(text: str, where: str, *, comments: bool = False) -> list[str]:
    """Split a text into words as a shell does. Raise UsageError if it is malformed."""
    try:
        return shlex.split(text, comments=comments)
    except ValueError as error:
        raise UsageError(f"{where}: {error}", "quote it as for a shell") from error


def _environment(given: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables of `NAME=VALUE` texts, and the names of the secrets, which are given without a value."""
    pairs = [text.partition("=") for text in given]
    for name, _, _ in pairs:
        if not re.fullmatch(ENV_NAME, name):
            hint = "use NAME=VALUE, or NAME alone to pass your own value as a secret"
            raise UsageError(f"--env {name}: not a valid variable name", hint)
    secrets = dict.fromkeys(name for name, mark, _ in pairs if not mark)
    return {name: value for name, mark, value in pairs if mark}, tuple(secrets)


def _pass_env(here: Here) -> tuple[str, ...]:
    """Return the variables of this machine that match PASS_ENV. The network devices of a container differ from its."""
    beginnings = tuple(pattern.rstrip("*") for pattern in PASS_ENV)
    return tuple(sorted(name for name in here.variables if name.startswith(beginnings) and "_IFNAME" not in name))


def _image(
    request: Request, backend: Traits, inventory: Inventory | None, hosts: Sequence[Machine], queue: Queue | None
) -> str:
    if backend.in_containers is False or (hosts and all(RUNTIMES[node.runtime].inside for node in hosts)):
        return ""
    built = f"{_stem(_absolute(request.build, '/'))}:latest" if request.build else ""
    image = request.image or built or (inventory.image if inventory else "")
    if queue is None or backend.in_containers or RUNTIMES[queue.login.runtime].engine:
        return image or DEFAULT_IMAGE
    if RUNTIMES[queue.login.runtime].inside:
        return ""
    if not image:
        hint = f"run {RUNTIMES[queue.login.runtime].image_command()}, then set image in cluster.yaml"
        raise UsageError(f"no image: {queue.login.runtime} has no default image", hint)
    return image


class ListedGpu(NamedTuple):
    """A GPU, or a MIG slice with the index of its GPU and the UUIDs of both."""

    model: str
    gpu_index: str
    uuids: tuple[str, ...]


def listed_gpus(text: str) -> dict[Gpu, ListedGpu]:
    """Return the GPUs in the output of `nvidia-smi -L`. MIG slices replace their GPU, which no program can use."""
    found: dict[Gpu, ListedGpu] = {}
    whole = ListedGpu("", "", ())
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+): (.*) \(UUID: ([^)]+)\)", line):
            whole = ListedGpu(match[2], match[1], (match[3],))
            found[int(match[1])] = whole
        elif match := re.match(r"\s*MIG (\S+) .*\(UUID: (MIG-[\w-]+)\)", line):
            found.pop(int(whole.gpu_index), None)
            found[match[2]] = ListedGpu(f"{whole.model} MIG {match[1]}", whole.gpu_index, (match[2], *whole.uuids))
    return found


def visible_gpus(listed: str, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPU ids in `nvidia-smi -L` output that CUDA_VISIBLE_DEVICES (None: not set) selects, in its order.

    As in CUDA, entries are numbers or prefixes of UUIDs, and the first invalid entry ends the list. The entry of a GPU
    with MIG slices is the first of them.
    """
    gpus = listed_gpus(listed)
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for word in visible.split(","):
        word = word.strip()
        found = [
            gpu
            for gpu, (_, index, uuids) in gpus.items()
            if word == index or (word and any(uuid.startswith(word) for uuid in uuids))
        ]
        if not found:
            break
        chosen.append(found[0])
    return tuple(dict.fromkeys(chosen))


def default_name(new: Job) -> str:
    """Return a name like `digits-7f3a`: the data set or program, and four hex digits of the job's hash."""
    words = list(new.command)
    if data := [word for _, option, word in _words(words) if option in _DATA]:
        stem = _stem(data[0])
    else:
        stem = "digits" if new.says_ready else _stem(words[1] if words[0] == "-m" and words[1:] else words[0])
    digest = hashlib.sha256(json.dumps(asdict(new), sort_keys=True).encode()).hexdigest()
    return f"{stem}-{digest[:4]}"


def auto_port(name: str, nth: int = 0) -> int:
    """Return the nth port to try for a job; it depends only on the job's name."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return _AUTO_PORTS[(first + nth) % len(_AUTO_PORTS)]


def node_range(text: str, all_nodes: int) -> tuple[int, int]:
    """Parse `--nodes`: `2:4` is (2, 4), `4` is (4, 4), "" is all nodes. Raise UsageError for anything else."""
    if not text:
        return all_nodes, all_nodes
    match = re.fullmatch(r"(?:(-?\d{1,18}):)?(-?\d{1,18})", text.strip())
    fewest, most = (int(match[1] or match[2]), int(match[2])) if match else (0, 0)
    why = ""
    if match is None:
        why = "expected a number, or MIN:MAX"
    elif min(fewest, most) < 1:
        why = "must be at least 1"
    elif fewest > most:
        why = f"MIN is {fewest}, and MAX only {most}"
    elif most > _MOST_NODES:
        why = f"must be at most {_MOST_NODES}"
    if why:
        raise UsageError(f"--nodes {text}: {why}", "for example: --nodes 2, or --nodes 2:4")
    return fewest, most


def _all_nodes(request: Request, inventory: Inventory) -> int:
    """Return how many machines are left for nodes without --nodes. Raise UsageError if all of them are spares."""
    count = len(inventory.machines)
    if 0 < count <= request.spares and not (request.nodes or inventory.is_assigned):
        machines = "1 machine" if count == 1 else f"{count} machines"
        why = (
            f"--spares {request.spares}: {inventory.path or 'the inventory'} has {machines}, so none is left for a node"
        )
        raise UsageError(why, "use fewer --spares, or add machines to the inventory: clusterctl init")
    return count - request.spares


def seconds(text: str, option: str) -> float:
    """Return the seconds of `90s`, `30m` or `2h`. Raise UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h)", text)
    if not match:
        raise UsageError(f"{option} {text!r}: expected a time", f"for example: {option} 90s, {option} 30m, {option} 2h")
    return float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def _port(text: str) -> int:
    if text == "auto":
        return 0
    if not text.isdecimal() or not 1024 <= int(text) <= 65535:
        raise UsageError(f"--master-port {text!r}: expected auto, or a number from 1024 to 65535")
    return int(text)


def mount(text: str, cwd: str) -> Mount:
    """Parse `SOURCE[:TARGET[:rw]]`; a relative source is below `cwd`. Raise UsageError if it is invalid."""
    source, *rest = text.split(":")
    if not source or len(rest) > 2 or (len(rest) == 2 and rest[1] not in ("ro", "rw")):
        raise UsageError(f"--mount {text!r}", "SOURCE[:TARGET[:rw]], for example: --mount ./data:/data")
    source = _absolute(source, cwd)
    target = rest[0] if rest and rest[0] else source
    if not target.startswith("/"):
        raise UsageError(f"--mount {text!r}: the target must be an absolute path", "for example: --mount ./data:/data")
    return Mount(source, target, read_only=rest[1:] != ["rw"])


def _absolute(path: str, cwd: str) -> str:
    return posixpath.normpath(posixpath.join(cwd, path))


def _stem(text: str) -> str:
    path = PurePosixPath(text)
    stem = path.parent.name if path.stem in ("data", "dataset") and path.parent.name else path.stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:30] or "job"


def numbered(name: str, nth: int) -> str:
    """Return the nth of the names `digits-7f3a`, `digits-7f3a-2`, `digits-7f3a-3`, ..."""
    return name if nth == 1 else f"{name[:44]}-{nth}"
