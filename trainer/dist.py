"""Which process this is among how many: ranks from torchrun's environment, device, threads, process group."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer import contract
from trainer.errors import TrainerError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
ALSO_NEEDED = ("MASTER_ADDR", "MASTER_PORT")
TIMEOUT = datetime.timedelta(minutes=10)
PATIENCE_S = 60.0  # until a rank that waits for others says so
Group = dist.ProcessGroup  # some of the ranks


@dataclass(frozen=True)
class World:
    """This process's place: `size` processes in all, `local_size` of them on this node."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node: int = 0
    launched: bool = False  # by torchrun, even if alone
    guessed: bool = False  # local_size, by whoever set the others but not LOCAL_WORLD_SIZE


def world_of(environment: Mapping[str, str]) -> World:
    """The place that the environment names; half of the rank variables is an error, none is a single process."""
    present = [name for name in RANK_VARIABLES if name in environment]
    if not present:
        return World()
    missing = [name for name in (*RANK_VARIABLES, *ALSO_NEEDED) if name not in environment]
    if missing:
        raise TrainerError(
            f"{', '.join(present)} set in the environment but not {', '.join(missing)}",
            f"start with torchrun, or unset {', '.join(present)} to train in one process",
        )
    wanted = (*RANK_VARIABLES, "LOCAL_WORLD_SIZE", "GROUP_RANK")
    values = {}
    for name in wanted:
        text = environment.get(name, environment["WORLD_SIZE"] if name == "LOCAL_WORLD_SIZE" else "0")
        try:
            values[name] = int(text)
        except ValueError:
            raise TrainerError(f"{name} is {text!r} in the environment, not a number") from None
    world = World(
        rank=values["RANK"],
        local_rank=values["LOCAL_RANK"],
        size=values["WORLD_SIZE"],
        local_size=values["LOCAL_WORLD_SIZE"],
        node=values["GROUP_RANK"],
        launched=True,
        guessed="LOCAL_WORLD_SIZE" not in environment,
    )
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size):
        raise TrainerError(
            f"RANK {world.rank} of WORLD_SIZE {world.size}, LOCAL_RANK {world.local_rank} of "
            f"LOCAL_WORLD_SIZE {world.local_size}: a rank must be below its size"
        )
    wanted_size = environment.get(contract.GLOBAL_WORLD_SIZE)
    if wanted_size is not None and wanted_size != str(world.size):
        raise TrainerError(
            f"this process is one of {world.size}, and the job has {wanted_size}: its node would train alone",
            f"something between launcher and torchrun lost variables: compare PET_* and {contract.GLOBAL_WORLD_SIZE}",
        )
    return world


def gpu_numbers(wanted: str) -> list[int]:
    """The GPUs that --device means, none for the CPU: cpu, cuda, a number, numbers with commas, '' to find out."""
    wanted = wanted.strip().lower()
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (not wanted and not have):
        return []
    if wanted in ("", "cuda", "gpu"):
        numbers = list(range(have))
    else:
        try:
            numbers = [int(n) for n in wanted.removeprefix("cuda:").split(",")]
        except ValueError:
            raise TrainerError(
                f"--device {wanted}: no such device", "use cpu, cuda, a GPU number, or numbers like 0,1"
            ) from None
        if len(set(numbers)) < len(numbers):
            once = ",".join(map(str, dict.fromkeys(numbers)))
            raise TrainerError(
                f"--device {wanted}: a GPU is named twice, and each is one rank's alone", f"use --device {once}"
            )
    if not have:
        raise TrainerError(
            f"--device {wanted}: no GPU can be used on this machine",
            "use --device cpu; in a container, check that it was started with its GPUs",
        )
    for n in numbers:
        if not 0 <= n < have:
            raise TrainerError(f"--device {wanted}: there is no GPU {n}, this machine has {have}")
    return numbers


def devices_of(device: str, ranks: int, mode: str = "ddp") -> str:
    """--device for some of its ranks: of a list of GPUs the first ones, as one process takes one number only.

    With `dp` one process takes them all: as many GPUs as it would be ranks, or a TrainerError.
    """
    if mode != "dp":
        return ",".join(device.split(",")[:ranks])
    gpus = gpu_numbers(device)
    if len(gpus) < ranks:
        raise TrainerError(f"--parallel dp on {ranks} GPUs: there are {len(gpus)}", "leave dp out, or use fewer ranks")
    return ",".join(map(str, gpus[:ranks]))


def pick_device(wanted: str, world: World, *, several: bool = False) -> torch.device:
    """The device of this process for --device; the first where one process drives `several`."""
    numbers = gpu_numbers(wanted)
    if not numbers:
        return torch.device("cpu")
    named = wanted.strip().lower() not in ("", "cuda", "gpu")
    if not world.launched and named and len(numbers) > 1 and not several:
        raise TrainerError(
            f"--device {wanted}: one process drives one GPU",
            "name one of them; to score on several: "
            f"torchrun --nproc-per-node {len(numbers)} -m trainer val --device {wanted} ...",
        )
    return torch.device("cuda", gpu_of(numbers, world))


def gpu_of(numbers: Sequence[int], world: World) -> int:
    """This process's GPU; too few for the node are an error in all of its processes, so that none waits for others."""
    processes = world.local_rank + 1 if world.guessed else world.local_size
    if processes > len(numbers):
        raise TrainerError(
            f"{processes} processes on this node but {len(numbers)} GPUs",
            "start one process per GPU, or use --device cpu",
        )
    return numbers[world.local_rank]


def thread_count(environment: Mapping[str, str], world: World, cores: int) -> int | None:
    """Threads of this process, so that all processes of the node share its cores; None to leave it alone.

    A user's OMP_NUM_THREADS stands, and so does a launcher's, which has shared the cores itself or heard of a user's;
    torchrun's own (1, for more than one process) does not count as one.
    """
    omp = environment.get("OMP_NUM_THREADS")
    if omp is not None and not (world.launched and omp == "1" and contract.JOB_ID not in environment):
        return None
    return max(1, cores // world.local_size)


def nodes_on_host(environment: Mapping[str, str]) -> int:
    """The job's nodes that share this machine, as its launcher says; 1 without one."""
    text = environment.get(contract.NODES_ON_HOST, "1")
    try:
        return max(1, int(text))
    except ValueError:
        raise TrainerError(f"{contract.NODES_ON_HOST} is {text!r}, not a number") from None


def usable_cores() -> int:
    """Cores that this node may use: its part of this process's affinity, less where a container's quota says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = max(1, cores // nodes_on_host(os.environ))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def default_workers(device: torch.device, world: World) -> int:
    """Loader processes per rank: none on the CPU, where they would take the cores from the training."""
    return 0 if device.type == "cpu" else min(8, usable_cores() // world.local_size)


def limit_threads(world: World) -> None:
    """Give this process its part of the machine's cores: threads that outnumber them only get in each other's way."""
    threads = thread_count(os.environ, world, usable_cores())
    if threads is not None:
        torch.set_num_threads(threads)


#: The backends of the process groups that this process has joined.
_MET: list[str] = []


def join(world: World, device: torch.device) -> str:
    """Meet the other processes; returns the backend ("" for one process)."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not world.launched:
        return ""
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    try:
        dist.init_process_group(backend, timeout=TIMEOUT, **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "already in use" not in str(error):
            raise
        raise TrainerError(
            f"MASTER_PORT {os.environ['MASTER_PORT']} is taken by another program on this machine",
            "choose another one for all ranks, or end what holds it (ss -ltnp)",
        ) from None
    _MET.append(backend)
    return backend


@contextlib.contextmanager
def meeting(world: World, device: torch.device) -> Iterator[None]:
    """Around join() and the first exchange: says after a minute what is waited for; TrainerError where nobody comes."""
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    said = f"rank {world.rank} has waited {PATIENCE_S:g} s for the others of {world.size} ranks at {where}"
    if device.type == "cuda":
        said += "; if all have started, their GPUs may not reach each other: try NCCL_P2P_DISABLE=1"
    timer = threading.Timer(PATIENCE_S, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if world.size > 1:
        timer.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if "timed out" not in str(error).lower() or contract.JOB_ID in os.environ:  # a launcher has words of its own
            raise
        raise TrainerError(
            f"rank {world.rank}: the {world.size} ranks have not met at {where} within {TIMEOUT.seconds} s",
            "start all of them, and see whether each machine reaches that port (clusterctl doctor)",
        ) from None
    finally:
        timer.cancel()


def has_met() -> bool:
    """Whether this process is, or was, in a process group."""
    return bool(_MET)


def leave() -> None:
    """Take the process group down, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def together() -> bool:
    """Whether there is a process group with more than one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def first() -> bool:
    """Whether this process decides for all: rank 0, or the only one."""
    return not together() or dist.get_rank() == 0


def agree(error: TrainerError | None) -> None:
    """Raise on all ranks if one of them found an error: the first rank's, so that none waits for it in vain."""
    if not together():
        if error:
            raise error
        return
    found: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (error.message, error.hint) if error else None)
    if any(found):
        # A rank that ends at once can close its connections while another still reads the answer from them.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    if error:
        raise error
    for rank, other in enumerate(found):
        if other:
            raise TrainerError(f"rank {rank}: {other[0]}", other[1])


def broadcast(value: Any, source: int = 0) -> Any:
    """The value (picklable) of rank `source` on every rank."""
    if not together():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def all_gather(value: Any) -> list[Any]:
    """Every rank's value (picklable) in rank order, on every rank."""
    if not together():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank, the same answer on all of them."""
    return any(all_gather(flag))


def barrier() -> None:
    """Wait until all ranks are here."""
    if together():
        dist.barrier()


def second_store() -> Any:
    """A connection of its own to the ranks' store, which no collective blocks; None where there is none to be had."""
    if not together():
        return None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=10),
        )
    except (RuntimeError, OSError, ValueError, KeyError):
        return None


def gather(value: Any) -> list[Any]:
    """Every rank's value (picklable) in rank order on rank 0, and nothing elsewhere."""
    if not together():
        return [value]
    rank = dist.get_rank()
    box: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(value, box, dst=0)
    return box or []


def average_(tensors: list[Tensor], group: Group | None = None) -> None:
    """Average float tensors over the ranks (of a group), in place, in one collective."""
    if not together() or not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))


def start_sum(value: Tensor, group: Group | None = None) -> dist.Work | None:
    """Begin to sum a tensor over the ranks (of a group), in place; wait() on the result before reading it."""
    return dist.all_reduce(value, group=group, async_op=True) if together() and value.numel() else None


def wait(work: dist.Work | None) -> None:
    """Wait for what start_sum began."""
    if work is not None:
        work.wait()


def wrap(model: nn.Module, device: torch.device, *, static: bool) -> DistributedDataParallel:
    """The model under DDP, with the options that this torch knows.

    Buffers are not copied from rank 0 at every step (batch norm's are averaged before validation instead);
    `static` says that every step runs the same graph, without no_sync.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": static}
    # torch 2.15 renames the option.
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None, **options)
