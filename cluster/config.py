"""From what the user typed, and what the machine has, to a Job: pure; what is not typed gets its default here."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import cast

from cluster import slurm
from cluster.errors import UsageError
from cluster.model import Device, Inventory, Job, Mount, Node, Queue

DEFAULT_IMAGE = "trainer:0.1"
DEFAULT_RESTARTS = 3

#: Ports that `auto` chooses from: below the ephemeral range of Linux, so that no outgoing connection sits on one.
_AUTO_PORTS = range(20000, 30000)
#: What `--backend` calls this machine, whatever cluster.yaml says; `here` leaves open how.
ON_THIS_MACHINE = ("here", "local", "compose")
#: Trainer options whose value is a file of this machine when it has a '/'.
_FILE_OPTIONS = ("--data", "--cfg", "--hyp", "--weights")
#: Words that are data sets of the trainer after --data, also where a folder has that name.
DATA_SETS = ("digits", "cifar10", "cifar100")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Here:
    """What the launching machine is: the only facts that a job's defaults depend on.

    `gpus` are the ids of those that this process may use; `user` is who owns the files of containers here.
    """

    cwd: str
    user: str
    python: str
    gpus: tuple[int, ...] = ()
    existing: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Request:
    """The launch options as typed; None and "" mean: not given."""

    nodes: int = 1
    gpus: int = 1
    name: str = ""
    device: str = "auto"
    image: str = ""
    build: str = ""
    user: str = ""
    run_root: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    env_names: tuple[str, ...] = ()
    master_port: str = "auto"
    timeout_s: float = 300.0
    python: str = ""
    inventory: Inventory | None = None
    spares: int = 0
    min_nodes: int = 0
    slurm: tuple[str, ...] = ()
    max_restarts: int | None = None
    stall_timeout_s: float = 300.0


def job(request: Request, here: Here, backend: str) -> tuple[Job, list[str]]:
    """The job that a request means on this machine, and plain sentences on what the user should know.

    Raises UsageError for what makes no sense.
    """
    if request.user and backend != "compose":
        raise UsageError("--user: containers of compose alone take one", "elsewhere a job runs as the user who logs in")
    if request.python and backend == "compose":
        raise UsageError(
            "--python: a container has its own", "name an image with the interpreter you mean: --image NAME"
        )
    without_containers = {"--image": request.image, "--mount": request.mounts}
    for option, value in without_containers.items() if backend == "local" else ():
        if value:
            raise UsageError(
                f"{option}: process groups take none, they see this machine's files",
                "leave it out, or --backend compose",
            )
    if request.build and backend != "compose":
        raise UsageError("--build: only a compose file has one", "--backend compose")
    if request.spares < 0:
        raise UsageError(f"--spares {request.spares}: less than none", "leave it out")
    if request.slurm and backend != "slurm":
        raise UsageError(f"--slurm {request.slurm[0]}: only Slurm takes it", "--backend slurm")
    inventory = request.inventory if backend in ("ssh", "slurm") else None
    queue = _queue(request, inventory) if backend == "slurm" else None
    hosts, spares, device, notes = _queued(request, inventory, queue) if queue else _places(request, here, inventory)
    elsewhere = bool(hosts) or bool(queue and queue.login.login)
    mounts = [mount(text, here.cwd) for text in request.mounts]
    mounts = [replace(each, synced=elsewhere and each.source in here.existing) for each in mounts]
    arguments: list[str] = []
    for argument in _split(request.arguments):
        path = _absolute(argument, here.cwd)
        folder_of_data = arguments[-1:] == ["--data"] and argument not in DATA_SETS and path in here.folders
        if path in here.existing and ("/" in argument or "." in argument or folder_of_data):
            folder = path if path in here.folders else str(PurePosixPath(path).parent)
            mounts.append(Mount(folder, folder, synced=elsewhere))
            argument = path
        elif "/" in argument and arguments and arguments[-1] in _FILE_OPTIONS and not _is_mounted(argument, mounts):
            raise UsageError(f"{arguments[-1]} {argument}: no such file", f"looked for {path}")
        arguments.append(argument)
    if request.command:
        if arguments:
            raise UsageError("--command and arguments after -- exclude each other", "put them into --command '...'")
        try:
            command = tuple(shlex.split(request.command))
        except ValueError as error:
            raise UsageError(f"--command {request.command!r}: {error}", "quote it for a shell") from error
        mounts.append(Mount(here.cwd, here.cwd, read_only=elsewhere, synced=elsewhere))
    else:
        if not arguments or arguments[0].startswith("-"):
            arguments.insert(0, "train")
        if device != "any" and "--device" not in arguments:
            arguments += ["--device", device]
        command = ("-m", "trainer", *arguments)
    # A program that may choose (`any`) gets its node's part of them where there are enough for all nodes.
    shares = not elsewhere and not queue and device != "cpu" and len(here.gpus) >= request.nodes * request.gpus
    made = Job(
        name=request.name or "job",
        command=command,
        nodes=request.nodes,
        procs_per_node=request.gpus,
        run_root=_run_root(request.run_root or (queue.login.run_dir if queue and not elsewhere else ""), here.cwd),
        device=device,
        image=_image(request, backend, inventory, queue),
        build=request.build,
        user=(request.user or here.user) if backend == "compose" else "",
        python=request.python or (here.python if backend == "local" else "python3"),
        workdir=here.cwd if request.command or backend == "local" else "",
        env={**(inventory.env if inventory else {}), **dict(_variable(text) for text in request.env if "=" in text)},
        secrets=tuple(dict.fromkeys([*request.env_names, *(_name(text) for text in request.env if "=" not in text)])),
        mounts=() if backend == "local" else tuple(dict.fromkeys([*(inventory.mounts if inventory else ()), *mounts])),
        port=_port(request.master_port),
        timeout_s=request.timeout_s,
        says_ready=not request.command,
        gpus=here.gpus[: request.nodes * request.gpus] if shares else (),
        hosts=hosts,
        spares=spares,
        queue=queue,
        min_nodes=request.min_nodes,
        max_restarts=_max_restarts(request),
        stall_timeout_s=request.stall_timeout_s,
    )
    return (made if request.name else replace(made, name=default_name(made))), notes


def _queue(request: Request, inventory: Inventory | None) -> Queue:
    """The cluster of the inventory, or the one that this machine is a login node of, with the options as typed."""
    if request.spares:
        raise UsageError("--spares: Slurm chooses the nodes, and takes others for those that fail", "leave it out")
    if request.min_nodes not in (0, request.nodes):
        raise UsageError(f"--nodes {request.min_nodes}:{request.nodes}: Slurm gives as many as asked for", "one number")
    if inventory is not None:
        login = inventory.nodes[0]
    else:
        login = Node("login", "", runtime="apptainer" if request.image else "none")
    if request.run_root and not login.login:
        login = replace(login, run_dir="")
    typed = [text.partition("=") for text in request.slurm]
    given = {name.removeprefix("--"): value for name, _, value in typed}
    return Queue(login, slurm.checked({**(inventory.options if inventory else {}), **given}))


def _queued(
    request: Request, inventory: Inventory | None, queue: Queue
) -> tuple[tuple[Node, ...], tuple[Node, ...], Device, list[str]]:
    """As `_places`, for a job whose nodes Slurm chooses: none, and the device as it is asked for."""
    wanted = request.device if request.device != "auto" else inventory.device if inventory else "cuda"
    if wanted not in ("cpu", "cuda", "any"):
        raise UsageError(f"--device {wanted!r}", "one of: cuda, cpu, any")
    notes = [f"{_count(request.gpus, 'CPU process', 'CPU processes')} per node over gloo"] if wanted == "cpu" else []
    if not {"cpus-per-gpu", "cpus-per-task", "exclusive"} & queue.options.keys():
        more = "cpus-per-gpu=8" if wanted == "cuda" else f"cpus-per-task={2 * request.gpus}"
        notes.append(f"CPU cores as the partition gives by default, often one per node (more: --slurm {more})")
    return (), (), cast(Device, wanted), notes


def _image(request: Request, backend: str, inventory: Inventory | None, queue: Queue | None) -> str:
    if backend == "local":
        return ""
    image = request.image or (inventory.image if inventory else "")
    if queue is None or queue.login.runtime in ("docker", "podman"):
        return image or DEFAULT_IMAGE
    if queue.login.runtime == "none":
        return ""
    if not image:
        raise UsageError(
            f"no image: {queue.login.runtime} needs one to be named", "clusterctl image sif, then image in cluster.yaml"
        )
    return image


def visible_gpus(listed: str, visible: str | None) -> tuple[int, ...]:
    """The ids in what `nvidia-smi -L` prints that CUDA_VISIBLE_DEVICES (None: not set) leaves, in its order.

    As CUDA does, it takes numbers and beginnings of UUIDs, and none from the first on that is neither.
    """
    uuids = {int(match[1]): match[2] for match in re.finditer(r"^GPU (\d+):.*\(UUID: ([^)]+)\)", listed, re.MULTILINE)}
    if visible is None:
        return tuple(uuids)
    chosen: list[int] = []
    for word in visible.split(","):
        word = word.strip()
        found = [gpu for gpu, uuid in uuids.items() if word == str(gpu) or (word and uuid.startswith(word))]
        if not found:
            break
        chosen.append(found[0])
    return tuple(dict.fromkeys(chosen))


def default_name(made: Job) -> str:
    """`digits-7f3a`: what is trained on, and four hex digits of everything that makes the job what it is."""
    words = list(made.command)
    if "--data" in words[:-1]:
        stem = _stem(words[words.index("--data") + 1])
    else:
        stem = "digits" if made.says_ready else _stem(words[1] if words[0] == "-m" and words[1:] else words[0])
    digest = hashlib.sha256(json.dumps(asdict(made), sort_keys=True).encode()).hexdigest()
    return f"{stem}-{digest[:4]}"


def auto_port(name: str, nth: int = 0) -> int:
    """The nth port to try for a job of this name: the same on every machine and at every call."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return _AUTO_PORTS[(first + nth) % len(_AUTO_PORTS)]


def named_paths(request: Request, cwd: str) -> list[str]:
    """The absolute paths that arguments and mounts might name; which of them exist is for `Here` to say."""
    arguments = [_absolute(argument, cwd) for argument in _split(request.arguments) if not argument.startswith("-")]
    return arguments + [mount(text, cwd).source for text in request.mounts]


def _places(
    request: Request, here: Here, inventory: Inventory | None
) -> tuple[tuple[Node, ...], tuple[Node, ...], Device, list[str]]:
    """The inventory's nodes that the job takes and its spares (none: this machine), the device, and notes."""
    if inventory is None:
        if request.spares:
            raise UsageError("--spares: this machine has none", "name machines: clusterctl init gpu-a gpu-b gpu-c")
        if request.min_nodes not in (0, request.nodes):
            raise UsageError(
                f"--nodes {request.min_nodes}:{request.nodes}: this machine gives as many as asked for",
                "one number; or name machines: clusterctl init gpu-a gpu-b gpu-c",
            )
        return (), (), *_device(request, here)
    known = ", ".join(node.name for node in inventory.nodes)
    wanted = request.nodes + request.spares
    if len(inventory.nodes) < wanted:
        asked = f"--nodes {request.nodes}" + (f" --spares {request.spares}" if request.spares else "")
        raise UsageError(
            f"{asked}: {inventory.path or 'the inventory'} has {len(inventory.nodes)}: {known}",
            "fewer --nodes, or add machines to it: clusterctl init",
        )
    device = inventory.device if request.device == "auto" else request.device
    if device not in ("cpu", "cuda", "any"):
        raise UsageError(f"--device {device!r}", "one of: cuda, cpu, any")
    hosts = []
    for node in inventory.nodes[:wanted]:
        if (device == "cuda" or node.gpus) and len(node.gpus) < request.gpus:
            has = f"{len(node.gpus)} GPU{'s' if len(node.gpus) != 1 else ''}" if node.gpus else "no GPU"
            raise UsageError(
                f"{node.name}: it has {has}, and --gpus {request.gpus} asks for more",
                "fewer --gpus, other nodes, or --device cpu (CPU processes instead)",
            )
        hosts.append(replace(node, gpus=node.gpus[: request.gpus]))
    notes = [f"{_count(request.gpus, 'CPU process', 'CPU processes')} per node over gloo"] if device == "cpu" else []
    return tuple(hosts[: request.nodes]), tuple(hosts[request.nodes :]), cast(Device, device), notes


def node_range(text: str, all_nodes: int) -> tuple[int, int]:
    """`--nodes 2:4` as (2, 4), `4` as (4, 4), nothing given as all; raises UsageError for anything else."""
    if not text:
        return all_nodes, all_nodes
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text.strip())
    if match is None:
        raise UsageError(f"--nodes {text!r}: not a number of nodes", "for example: --nodes 2, or --nodes 2:4")
    most = int(match[2])
    fewest = int(match[1] or most)
    if fewest > most:
        raise UsageError(f"--nodes {text}: the fewest come first", f"for example: --nodes {most}:{fewest}")
    if fewest < 1:
        raise UsageError(f"--nodes {text}: a job needs at least one", "for example: --nodes 2, or --nodes 2:4")
    return fewest, most


def _max_restarts(request: Request) -> int:
    if request.max_restarts is not None:
        return request.max_restarts
    return 0 if request.command else DEFAULT_RESTARTS  # only our trainer is known to go on from a checkpoint


def _name(text: str) -> str:
    if not _ENV_NAME.fullmatch(text):
        raise UsageError(
            f"--env {text!r}", "NAME=VALUE, or NAME alone to take the value from your environment without showing it"
        )
    return text


def _device(request: Request, here: Here) -> tuple[Device, list[str]]:
    wanted = request.nodes * request.gpus
    have = f"only {_count(len(here.gpus), 'GPU', 'GPUs')}" if here.gpus else "no GPU"
    if request.device == "cuda":
        if len(here.gpus) < wanted:
            raise UsageError(
                f"this machine: {have}, and {request.nodes} x {request.gpus} need {wanted}",
                "fewer --gpus, or --device auto (CPU processes instead)",
            )
        return "cuda", []
    if request.device == "auto" and len(here.gpus) >= wanted:
        return "cuda", []
    if request.device in ("auto", "cpu"):
        why = f"{have} on this machine: " if request.device == "auto" else ""
        if request.device == "auto" and here.gpus:
            why = f"{have} on this machine and {wanted} needed: "
        end = " (--device cuda makes this an error)" if request.device == "auto" else ""
        return "cpu", [f"{why}{_count(request.gpus, 'CPU process', 'CPU processes')} per node over gloo{end}"]
    if request.device == "any":
        return "any", []
    raise UsageError(f"--device {request.device!r}", "one of: auto, cpu, cuda, any")


def _split(arguments: Sequence[str]) -> list[str]:
    """`--data=x` as two words, for the options that name files."""
    words: list[str] = []
    for argument in arguments:
        option, mark, value = argument.partition("=")
        words += [option, value] if mark and option in _FILE_OPTIONS else [argument]
    return words


def _is_mounted(path: str, mounts: Sequence[Mount]) -> bool:
    return any(path == mount.target or path.startswith(f"{mount.target}/") for mount in mounts)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _port(text: str) -> int:
    if text == "auto":
        return 0
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--master-port {text!r}: not a number", "for example: --master-port 29500, or auto") from None


def mount(text: str, cwd: str) -> Mount:
    """The folder that `SOURCE[:TARGET[:rw]]` means, a relative source seen from `cwd`; raises UsageError."""
    source, *rest = text.split(":")
    if not source or len(rest) > 2 or (len(rest) == 2 and rest[1] not in ("ro", "rw")):
        raise UsageError(f"--mount {text!r}", "SOURCE[:TARGET[:rw]], for example: --mount ./data:/data")
    source = _absolute(source, cwd)
    target = rest[0] if rest and rest[0] else source
    if not target.startswith("/"):
        raise UsageError(f"--mount {text!r}: the target must be an absolute path", "for example: --mount ./data:/data")
    return Mount(source, target, read_only=rest[1:] != ["rw"])


def _variable(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not mark or not _ENV_NAME.fullmatch(name):
        raise UsageError(f"--env {text!r}", "NAME=VALUE, for example: --env OMP_NUM_THREADS=2")
    return name, value


def _run_root(given: str, cwd: str) -> str:
    # "./runs" stays relative: a compose file that is meant to be committed must not name this machine's folders.
    return given if given.startswith("./") else _absolute(given or "runs", cwd)


def _absolute(path: str, cwd: str) -> str:
    return posixpath.normpath(posixpath.join(cwd, path))


def _stem(text: str) -> str:
    path = PurePosixPath(text)
    stem = path.parent.name if path.stem in ("data", "dataset") and path.parent.name else path.stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:30] or "job"


def numbered(name: str, nth: int) -> str:
    """`digits-7f3a`, `digits-7f3a-2`, `digits-7f3a-3`, ..."""
    return name if nth == 1 else f"{name[:44]}-{nth}"
