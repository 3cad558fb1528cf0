"""Completes the options of a launch to a Job, from the inventory and this machine. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar, cast

from cluster import contract
from cluster.errors import UsageError, near_or_all
from cluster.runtimes import RUNTIMES, engine_options
from cluster.spec import duration, environment, mount, port, trainer_arguments
from cluster.spec.counts import Procs, and_list, gpus_per_node, node_range
from cluster.spec.here import Here
from cluster.spec.image import DEFAULT_IMAGE
from cluster.spec.job_name import default_name, stem
from cluster.spec.model import Device, Inventory, Job, Machine, Queue
from cluster.spec.mount import Mount
from cluster.spec.paths import absolute
from cluster.spec.request import (
    DEFAULT_RESTARTS,
    DEFAULT_STALL_TIMEOUT_S,
    DEVICES,
    Request,
    UnchangedOptions,
    declared,
)
from cluster.spec.setup_key import setup_key
from cluster.spec.shell_words import split
from cluster.spec.traits import Table, Traits

Request_ = TypeVar("Request_", bound=Request)


@dataclass(frozen=True)
class _Placement:
    """Where a job runs: on known `hosts`, on machines of a `queue`, or here if it has neither.

    `has_own_files`: the nodes do not see the files of this machine, which therefore must be copied to them.
    """

    fewest: int
    nodes: int
    procs: Procs
    device: Device
    hosts: tuple[Machine, ...]
    spares: tuple[Machine, ...]
    queue: Queue | None
    has_own_files: bool

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The known machines, of which a queue has its login node."""
        return (*self.hosts, *self.spares, *([self.queue.login] if self.queue else []))


@dataclass(frozen=True)
class _Program:
    """What the ranks run, and the files that they need."""

    command: tuple[str, ...]
    mounts: tuple[Mount, ...]
    workdir: str
    copies_workdir: bool


def job(
    request: Request, here: Here, backend: Traits, table: Table, inventory: Inventory | None = None
) -> tuple[Job, list[str]]:
    """Return the job for a request, and notes for the user. `table` has all backends.

    Raises UsageError if options are invalid or conflict.
    """
    if backend.machines == "here":
        inventory = None
    placement, notes = _placement(request, here, backend, table, inventory)
    program = _program(request, here, backend, placement)
    variables, secrets = environment.parse(request.env)
    job_env = {**(inventory.env if inventory else {}), **variables}
    prologue = "\n".join(filter(None, [inventory.prologue if inventory else "", request.prologue]))
    new = Job(
        **{option.name: getattr(request, option.name) for option in fields(UnchangedOptions)},
        name=request.name or "job",
        command=program.command,
        nodes=placement.nodes,
        procs_per_node=placement.procs,
        run_root=_run_root(request, here, placement),
        device=placement.device,
        image=_image(request, backend, inventory, placement),
        user=here.user if _is_in_container_here(backend) else "",
        python=request.python or (here.python if backend.in_containers is False else "python3"),
        workdir=program.workdir if request.command or backend.in_containers is False else "",
        copies_workdir=program.copies_workdir,
        prologue=prologue,
        setup_key=setup_key(request.setup, prologue, job_env, program.workdir, here),
        env=job_env,
        pass_env=_pass_env(here, backend, inventory),
        secrets=secrets,
        mounts=_mounts(program, backend, inventory),
        run_options=_run_options(request, placement.machines),
        port=port.parse(request.master_port),
        says_ready=not request.command,
        gpus=_shared_gpus(here, placement),
        hosts=placement.hosts,
        spares=placement.spares,
        queue=placement.queue,
        min_nodes=placement.fewest,
        max_restarts=_max_restarts(request),
        grace_s=duration.seconds(request.grace, "--grace") if request.grace else contract.STOP_GRACE_S,
        stall_timeout_s=_stall_timeout_s(request),
    )
    return (new if request.name else replace(new, name=default_name(new))), notes


def absolute_paths(request: Request_, here: Here) -> Request_:
    """Return the request with absolute paths of its files and folders. Raise UsageError for an invalid one."""
    mounts = [mount.parse(text, here.cwd) for text in request.mounts]
    arguments, _ = trainer_arguments.with_paths(request.arguments, here, mounts)
    return replace(
        request,
        arguments=arguments,
        workdir=_workdir(request, here, mounts) if request.command else "",
        run_root=absolute(request.run_root or "runs", here.cwd),
        build=request.build and absolute(request.build, here.cwd),
        mounts=[f"{entry.source}:{entry.target}:{'ro' if entry.read_only else 'rw'}" for entry in mounts],
    )


def _placement(
    request: Request, here: Here, backend: Traits, table: Table, inventory: Inventory | None
) -> tuple[_Placement, list[str]]:
    """Return where the job runs, and notes on it."""
    fewest, nodes = node_range(request.nodes, _all_nodes(request, inventory) if inventory else 1)
    _refuse_unsupported(request, backend, table, is_range=fewest < nodes)
    queue = _queue(request, backend, table, inventory)
    procs = _procs(request, nodes, here, backend, table, inventory)
    device, notes = _device(request, here, nodes, procs, inventory, queue)
    if queue is not None and isinstance(procs, int):
        notes += backend.advice(device, procs, queue.settings)
    hosts, spares = _hosts(request, nodes, procs, device, inventory) if inventory and not queue else ((), ())
    is_submitted_elsewhere = queue is not None and (bool(queue.login.login) or not backend.has_login_node)
    has_own_files = bool(hosts) or is_submitted_elsewhere
    return _Placement(fewest, nodes, procs, device, hosts, spares, queue, has_own_files), notes


def _program(request: Request, here: Here, backend: Traits, placement: _Placement) -> _Program:
    """Return the command of the ranks, with the mounts of the request and of the files that its arguments name."""
    synced = placement.has_own_files
    mounts = [mount.parse(text, here.cwd) for text in request.mounts]
    mounts = [replace(entry, synced=synced and here.exists(entry.source)) for entry in mounts]
    folders = backend.folders(placement.queue.settings) if placement.queue else ()
    arguments, paths = trainer_arguments.with_paths(request.arguments, here, mounts, folders)
    mounts += [Mount(path, path, synced=synced) for path in paths]
    workdir = _workdir(request, here, mounts)
    copies = bool(request.command) and (placement.has_own_files or placement.queue is not None)
    if request.command:
        command = _own_command(request, arguments)
        if not copies:
            mounts.append(Mount(workdir, workdir, read_only=False))
    else:
        command = _trainer_command(arguments, placement.device)
    return _Program(command, tuple(mounts), workdir, copies)


def _own_command(request: Request, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the words of --command."""
    if arguments:
        hint = "put all of them into --command '...'"
        raise UsageError("--command and arguments after -- cannot be used together", hint)
    return tuple(split(request.command, f"--command {request.command!r}"))


def _trainer_command(arguments: Sequence[str], device: Device) -> tuple[str, ...]:
    """Return the trainer's command: its default one if the arguments name none, and the job's device."""
    words = [*arguments]
    if not words or words[0].startswith("-"):
        words.insert(0, contract.COMMANDS[0])
    if words[0] not in contract.COMMANDS:
        hint = near_or_all(words[0], contract.COMMANDS)
        hint += "" if hint.endswith("?") else "; for another program: --command 'train.py ...'"
        raise UsageError(f"-- {words[0]}: the trainer has no such command", hint)
    if device != "any" and "--device" not in words:
        words += ["--device", device]
    return ("-m", "trainer", *words)


def _run_root(request: Request, here: Here, placement: _Placement) -> str:
    """Return the folder of the job's run directory."""
    login_folder = placement.queue.login.run_dir if placement.queue and not placement.has_own_files else ""
    folder = request.run_root or login_folder or "runs"
    # "./runs" stays relative: a compose file may be committed, so it must not contain this machine's paths.
    return folder if folder.startswith("./") else absolute(folder, here.cwd)


def _is_in_container_here(backend: Traits) -> bool:
    """Return whether the nodes are containers of this machine."""
    return backend.machines == "here" and bool(backend.in_containers)


def _pass_env(here: Here, backend: Traits, inventory: Inventory | None) -> tuple[str, ...]:
    """Return the variables of a machine that its containers get."""
    if inventory:
        return inventory.pass_env
    return environment.passed(here.variables) if _is_in_container_here(backend) else environment.PASS_ENV


def _mounts(program: _Program, backend: Traits, inventory: Inventory | None) -> tuple[Mount, ...]:
    """Return each mount of the inventory and of the program once, and none without containers."""
    if backend.in_containers is False:
        return ()
    listed = inventory.mounts if inventory else ()
    return tuple(dict.fromkeys([*listed, *program.mounts]))


def _shared_gpus(here: Here, placement: _Placement) -> tuple[int | str, ...]:
    """Return the GPUs of this machine that its nodes share, also for `any`: the program may use none."""
    needed = _total(placement.procs, placement.nodes)
    is_here = not placement.has_own_files and not placement.queue
    return here.gpus[:needed] if is_here and placement.device != "cpu" and len(here.gpus) >= needed else ()


def _max_restarts(request: Request) -> int:
    if request.max_restarts is not None:
        return request.max_restarts
    return 0 if request.command else DEFAULT_RESTARTS  # other programs may not resume


def _stall_timeout_s(request: Request) -> float:
    if request.stall_timeout_s is not None:
        return request.stall_timeout_s
    return 0.0 if request.command else DEFAULT_STALL_TIMEOUT_S  # other programs may wait for input


def _queue(request: Request, backend: Traits, table: Table, inventory: Inventory | None) -> Queue | None:
    """Return what assigns the machines, or None if they are known."""
    if backend.machines != "assigned":
        return None
    login = inventory.machines[0] if inventory else backend.login_node(request.image)
    login = (
        replace(login, run_dir="")
        if backend.has_login_node and request.run_root and not login.login
        else login
    )
    given = request.given_settings(backend.name, table)
    return Queue(login, backend.settings(inventory.settings if inventory else {}, given))


def _refuse_unsupported(request: Request, backend: Traits, table: Table, *, is_range: bool) -> None:
    """Raise UsageError for an option that the backend does not support, and some other backend does."""
    if is_range:
        backend.refuse("--nodes MIN:MAX", table, f"--nodes {request.nodes}")
    for option in declared(Request):
        value = getattr(request, option.field)
        if value and value != option.default and not option.is_everywhere:
            backend.refuse(option.flag, table)
    for name in request.given_settings(backend.name, table):
        backend.refuse("--set", table, f"--set {name}")
    for text in request.settings:
        if "=" not in text and text not in backend.flags:
            hint = f"give it a value: --set {text}=VALUE"
            hint += f"; an option that takes none: --set {text}=" if backend.flags else ""
            raise UsageError(f"--set {text}: expected KEY=VALUE", hint)
    if request.spares < 0:
        raise UsageError(f"--spares {request.spares}: must be at least 0")


def _procs(
    request: Request, nodes: int, here: Here, backend: Traits, table: Table, inventory: Inventory | None
) -> Procs:
    """Return the processes per node. Raise UsageError for numbers that do not fit the nodes, or `all` without GPUs."""
    wanted = gpus_per_node(str(request.gpus))
    if isinstance(wanted, tuple):
        _refuse_other_length(request, wanted, nodes)
        if len(set(wanted)) == 1:
            wanted = wanted[0]
    if isinstance(wanted, int):
        return wanted
    number = max(wanted) if isinstance(wanted, tuple) else 2
    backend.refuse(
        "unequal nodes", table, f"--gpus {request.gpus}", f"give all nodes one number: --gpus {number}"
    )
    if isinstance(wanted, tuple):
        return wanted
    device = inventory.device if inventory and request.device == "auto" else request.device
    if device == "cpu":
        cause = (
            "--device cpu" if request.device == "cpu" else f"device: cpu in {inventory and inventory.path}"
        )
        hint = "give the number of CPU processes per node: --gpus 2"
        raise UsageError(f"--gpus all: there are no GPUs to count with {cause}", hint)
    return "all" if inventory else _all_gpus_here(here, nodes)


def _refuse_other_length(request: Request, numbers: Sequence[int], nodes: int) -> None:
    """Raise UsageError if there is not one number for each node."""
    if len(numbers) == nodes:
        return
    why = f"{len(numbers)} numbers, but the job has {nodes} node{'' if nodes == 1 else 's'}"
    hint = f"give one number per node (--nodes {len(numbers)}), or one for all nodes: --gpus {max(numbers)}"
    raise UsageError(f"--gpus {request.gpus}: {why}", hint)


def _all_gpus_here(here: Here, nodes: int) -> int:
    """Return the number of GPUs of this machine for `--gpus all`. Raise UsageError if it is not for one node."""
    if not here.gpus:
        hint = "give a number, for CPU processes: --gpus 2"
        raise UsageError("--gpus all: this machine has no GPU that can be used", hint)
    if nodes > 1:
        share = len(here.gpus) // nodes
        hint = "use one node: --nodes 1" + (f"; or divide them: --gpus {share}" if share else "")
        raise UsageError(f"--gpus all: this machine's GPUs are for one node, but the job has {nodes}", hint)
    return len(here.gpus)


def _total(procs: Procs, nodes: int) -> int:
    """Return the number of processes of all nodes on this machine."""
    if isinstance(procs, tuple):
        return sum(procs)
    return nodes * procs if isinstance(procs, int) else 0


def _device(
    request: Request, here: Here, nodes: int, procs: Procs, inventory: Inventory | None, queue: Queue | None
) -> tuple[Device, list[str]]:
    """Return the device of the ranks, and notes. `auto` is the inventory's device, or what this machine has."""
    if request.device not in DEVICES:
        raise UsageError(f"--device {request.device}: unknown", f"use one of: {', '.join(DEVICES)}")
    device = cast(Device, "cuda" if request.device == "auto" else request.device)
    notes = []
    if request.device == "auto" and inventory is not None:
        device = inventory.device
    needed = _total(procs, nodes)
    if device == "cuda" and inventory is None and queue is None and len(here.gpus) < needed:
        missing = f"this machine has {len(here.gpus)} of the {needed} GPUs needed"
        if request.device == "cuda":
            raise UsageError(missing, "use fewer --gpus, or --device auto (CPU processes instead)")
        device = "cpu"
        notes.append(f"{missing}, so the ranks are CPU processes (--device cuda makes this an error)")
    if device == "cpu":
        per_node = and_list(procs) if isinstance(procs, tuple) else procs
        notes.append(f"processes per node: {per_node}, on the CPU over gloo")
    return device, notes


def _hosts(
    request: Request, nodes: int, procs: Procs, device: Device, inventory: Inventory
) -> tuple[tuple[Machine, ...], tuple[Machine, ...]]:
    """Return the job's machines and its spares, the first ones of the inventory."""
    if len(inventory.machines) < nodes + request.spares:
        known = ", ".join(node.name for node in inventory.machines)
        asked = f"--nodes {nodes} --spares {request.spares}" if request.spares else f"--nodes {nodes}"
        fewer = "fewer --nodes or --spares" if request.spares else "fewer --nodes"
        raise UsageError(
            f"{asked}: {inventory.path or 'the inventory'} has only {known}",
            f"use {fewer}, or add machines to {inventory.path or 'the inventory'}",
        )
    hosts = inventory.machines[:nodes]
    spares = inventory.machines[nodes : nodes + request.spares]
    if device == "cpu":
        return hosts, spares
    if procs == "all":
        _refuse_without_gpus((*hosts, *spares), inventory)
    else:
        _refuse_with_few_gpus(request, hosts, spares, procs, device)
    return hosts, spares


def _refuse_without_gpus(machines: Sequence[Machine], inventory: Inventory) -> None:
    """Raise UsageError if `--gpus all` leaves a machine without processes."""
    for machine in machines:
        if not machine.gpus:
            others = ",".join(other.name for other in inventory.machines if other.gpus)
            hint = f"leave it out (--only {others}), or " if others else ""
            hint += "start processes on CPUs: --device cpu --gpus 1"
            raise UsageError(f"{machine.name}: --gpus all, but it has no GPUs", hint)


def _refuse_with_few_gpus(
    request: Request,
    hosts: Sequence[Machine],
    spares: Sequence[Machine],
    procs: int | tuple[int, ...],
    device: Device,
) -> None:
    """Raise UsageError if a machine has fewer GPUs than its node has processes."""
    machines = (*hosts, *spares)
    per_host = procs if isinstance(procs, tuple) else (procs,) * len(hosts)
    per_machine = (*per_host, *[max(per_host)] * len(spares))  # a spare may have to replace any node
    for index, (machine, wanted) in enumerate(zip(machines, per_machine, strict=True)):
        # With `any`, machines without GPUs use their CPUs.
        needs_gpus = device == "cuda" or bool(machine.gpus)
        if not needs_gpus or len(machine.gpus) >= wanted:
            continue
        where = "here" if index < len(hosts) else "of a spare"
        many = f"{wanted} {where}, more" if isinstance(procs, tuple) else "more"
        hint = "use fewer --gpus, other nodes, or --device cpu (CPU processes instead)"
        if all(other.gpus for other in machines):
            hint = f"use all GPUs of each machine: --gpus all; or {hint}"
        why = f"{machine.name}: --gpus {request.gpus} asks for {many} than its GPUs ({len(machine.gpus)})"
        raise UsageError(why, hint)


def _run_options(request: Request, machines: Sequence[Machine]) -> tuple[str, ...]:
    """Return the options for the container engine. Raises UsageError for a wrong one, or where there is no engine."""
    engine_options.parse(request.run_options)
    without = [
        machine
        for machine in machines
        if not (machine.runtime and RUNTIMES[machine.runtime].takes_run_options)
    ]
    if request.run_options and without:
        why = (
            f"--run-option: {without[0].name} starts its programs with runtime {without[0].runtime or 'none'}"
        )
        raise UsageError(why, "omit it: only docker and podman take options of docker run")
    return tuple(request.run_options)


def _workdir(request: Request, here: Here, mounts: Sequence[Mount]) -> str:
    """Return the absolute path of the working directory."""
    path = absolute(request.workdir or ".", here.cwd)
    if request.workdir and not request.command:
        raise UsageError("--workdir: only with --command", "the trainer needs no working directory: omit it")
    if request.workdir and not here.is_folder(path):
        raise UsageError(f"--workdir {request.workdir}: no such folder", f"the full path would be {path}")
    if request.command and any(mount.target == path for mount in mounts):
        raise UsageError(
            f"--mount: {path} is the working directory, which is mounted and writable", "omit this mount"
        )
    return path


def _image(request: Request, backend: Traits, inventory: Inventory | None, placement: _Placement) -> str:
    """Return the container image, "" if no node runs in a container. Raise UsageError if the runtime has no default."""
    hosts = placement.hosts
    queue = placement.queue
    if backend.in_containers is False or (hosts and all(RUNTIMES[node.runtime].inside for node in hosts)):
        return ""
    built = f"{stem(absolute(request.build, '/'))}:latest" if request.build else ""
    image = request.image or built or (inventory.image if inventory else "")
    if queue is None or backend.in_containers or RUNTIMES[queue.login.runtime].engine:
        return image or DEFAULT_IMAGE
    if RUNTIMES[queue.login.runtime].inside:
        return ""
    if not image:
        hint = f"run {RUNTIMES[queue.login.runtime].image_command()}, then set image in cluster.yaml"
        raise UsageError(f"no image: {queue.login.runtime} has no default image", hint)
    return image


def _all_nodes(request: Request, inventory: Inventory) -> int:
    """Return how many machines are left for nodes without --nodes. Raise UsageError if all of them are spares."""
    count = len(inventory.machines)
    if 0 < count <= request.spares and not (request.nodes or inventory.is_assigned):
        machines = "1 machine" if count == 1 else f"{count} machines"
        why = f"--spares {request.spares}: {inventory.path or 'the inventory'} has {machines}, so none is left for a node"
        raise UsageError(why, "use fewer --spares, or add machines to the inventory: clusterctl init")
    return count - request.spares
