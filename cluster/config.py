"""From what the user typed, and what the machine has, to a Job: pure, and the only place that has defaults."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath

from cluster.errors import UsageError
from cluster.model import Device, Job, Mount

DEFAULT_IMAGE = "trainer:0.1"

#: Ports that `auto` chooses from: below the ephemeral range of Linux, so that no outgoing connection sits on one.
_AUTO_PORTS = range(20000, 30000)
#: Trainer options whose value is a file of this machine when it has a '/'.
_FILE_OPTIONS = ("--data", "--cfg", "--hyp", "--weights")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Here:
    """What the launching machine is: the only facts that a job's defaults depend on."""

    cwd: str
    user: str
    python: str
    gpus: int
    existing: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Request:
    """The launch options as typed; None and "" mean: not given."""

    nodes: int = 1
    gpus: int = 1
    name: str = ""
    device: str = "auto"
    image: str = DEFAULT_IMAGE
    build: str = ""
    user: str = ""
    run_root: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    master_port: str = "auto"
    timeout_s: float = 300.0


def job(request: Request, here: Here, backend: str) -> tuple[Job, list[str]]:
    """The job that a request means on this machine, and plain sentences on what the user should know.

    Raises UsageError for what makes no sense.
    """
    device, notes = _device(request, here)
    mounts = [mount(text, here.cwd) for text in request.mounts]
    arguments: list[str] = []
    for argument in _split(request.arguments):
        path = _absolute(argument, here.cwd)
        if path in here.existing and ("/" in argument or "." in argument):
            folder = path if path in here.folders else str(PurePosixPath(path).parent)
            mounts.append(Mount(folder, folder))
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
        mounts.append(Mount(here.cwd, here.cwd, read_only=False))
    else:
        if not arguments or arguments[0].startswith("-"):
            arguments.insert(0, "train")
        if device != "any" and "--device" not in arguments:
            arguments += ["--device", device]
        command = ("-m", "trainer", *arguments)
    made = Job(
        name=request.name or "job",
        command=command,
        nodes=request.nodes,
        procs_per_node=request.gpus,
        run_root=_run_root(request.run_root, here.cwd),
        device=device,
        image=request.image if backend == "compose" else "",
        build=request.build,
        user=(request.user or here.user) if backend == "compose" else "",
        python="python3" if backend == "compose" else here.python,
        workdir=here.cwd if request.command or backend == "local" else "",
        env=dict(_variable(text) for text in request.env),
        mounts=tuple(dict.fromkeys(mounts)) if backend == "compose" else (),
        port=_port(request.master_port),
        timeout_s=request.timeout_s,
        says_ready=not request.command,
    )
    return (made if request.name else replace(made, name=default_name(made))), notes


def default_name(made: Job) -> str:
    """`digits-7f3a`: what is trained on, and four hex digits of everything that makes the job what it is."""
    words = list(made.command)
    if "--data" in words[:-1]:
        stem = _stem(words[words.index("--data") + 1])
    else:
        stem = "digits" if made.says_ready else _stem(words[0] if words[0] != "-m" else words[-1])
    digest = hashlib.sha256(json.dumps(asdict(made), sort_keys=True).encode()).hexdigest()
    return f"{stem}-{digest[:4]}"


def auto_port(name: str, nth: int = 0) -> int:
    """The nth port to try for a job of this name: the same on every machine and at every call."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return _AUTO_PORTS[(first + nth) % len(_AUTO_PORTS)]


def named_paths(request: Request, cwd: str) -> list[str]:
    """The absolute paths that arguments might name; which of them exist is for `Here` to say."""
    return [_absolute(argument, cwd) for argument in _split(request.arguments) if not argument.startswith("-")]


def _device(request: Request, here: Here) -> tuple[Device, list[str]]:
    wanted = request.nodes * request.gpus
    has = f"{here.gpus} GPUs" if here.gpus != 1 else "1 GPU"
    have = "no GPU" if not here.gpus else f"only {has}"
    if request.device == "cuda":
        if here.gpus < wanted:
            raise UsageError(
                f"this machine: {have}, and {request.nodes} x {request.gpus} need {wanted}",
                "fewer --gpus, or --device auto (CPU processes instead)",
            )
        return "cuda", []
    if request.device == "auto" and here.gpus >= wanted:
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
