"""Process group: rank and world size from the environment, device, threads, and collectives."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import contract
from trainer.config.strategies import DEFAULT_STRATEGY, traits_of
from trainer.errors import TrainerError

_DEVICES = Path("/dev")

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
NUMBERS = (*RANK_VARIABLES, "LOCAL_WORLD_SIZE", "GROUP_RANK")  # in the order of the fields of World
ALSO_NEEDED = ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = timedelta(minutes=10)
BACKEND = "TRAINER_BACKEND"  # environment variable
JOIN_WARNING_S = 60.0  # until a rank reports that it waits for the others
LEAVE_LIMIT_S = 10.0
Group = dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """Rank and world size of this process; `local_*` count within the node."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node: int = 0
    launched: bool = False  # by torchrun, also with one process


def world_of(environment: Mapping[str, str]) -> World:
    """Return the world of the environment; raise TrainerError if only some rank variables are set."""
    present = [name for name in RANK_VARIABLES if name in environment]
    if not present:
        return World()
    missing = [name for name in (*RANK_VARIABLES, *ALSO_NEEDED) if name not in environment]
    if missing:
        raise TrainerError(
            f"{', '.join(present)} set in the environment but not {', '.join(missing)}",
            f"start with torchrun, or unset {', '.join(present)} to train in one process",
        )
    values = {}
    for field, name in zip(("rank", "local_rank", "size", "local_size", "node"), NUMBERS, strict=True):
        try:
            values[field] = int(environment.get(name, "0"))
        except ValueError:
            raise TrainerError(f"{name} is {environment[name]!r} in the environment, not a number") from None
    world = World(**values, launched=True)
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size):
        raise TrainerError(
            f"RANK {world.rank} of WORLD_SIZE {world.size}, LOCAL_RANK {world.local_rank} of "
            f"LOCAL_WORLD_SIZE {world.local_size}: a rank must be below its size"
        )
    wanted_size = environment.get(contract.GLOBAL_WORLD_SIZE)
    if wanted_size is not None and wanted_size != str(world.size):
        raise TrainerError(
            f"WORLD_SIZE is {world.size}, but the job has {wanted_size} ranks ({contract.GLOBAL_WORLD_SIZE})",
            "check that the PET_* variables of the launcher reach torchrun",
        )
    return world


def gpu_numbers(wanted: str) -> list[int]:
    """Return the GPU numbers of --device, [] for the CPU. "" selects all GPUs, or the CPU if it has none."""
    wanted = wanted.strip().lower()
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not wanted and not have and (problem := _gpu_problem()):
        raise TrainerError(
            f"this machine has a GPU that torch cannot use: {problem}", "--device cpu trains without it"
        )
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
            raise TrainerError(f"--device {wanted}: a GPU is named twice", "name one GPU per rank")
    if not have:
        problem = _gpu_problem()
        raise TrainerError(
            f"--device {wanted}: no GPU can be used on this machine" + (f": {problem}" if problem else ""),
            "use --device cpu; in a container, check that it was started with its GPUs",
        )
    for n in numbers:
        if not 0 <= n < have:
            raise TrainerError(f"--device {wanted}: no GPU {n}, this machine has {have}")
    return numbers


def _gpu_problem() -> str:
    """Return why torch cannot use the GPU that this machine or container has; "" if it has none, or none is visible."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1") or not list(
        _DEVICES.glob("nvidia[0-9]*")
    ):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # for example: the driver is too old, and its version
        return str(error).split(". ")[0]
    return "it finds no device"


def devices_of(device: str, ranks: int, strategy: str = DEFAULT_STRATEGY) -> str:
    """Return the value of --device for the first `ranks` ranks.

    With --parallel dp, one process drives `ranks` GPUs; raises TrainerError if the machine has fewer.
    """
    if not traits_of(strategy).one_process:
        return ",".join(device.split(",")[:ranks])
    gpus = gpu_numbers(device)
    if len(gpus) < ranks:
        what = f"--parallel {strategy} on {ranks} GPUs: this machine has {len(gpus)}"
        raise TrainerError(what, f"use fewer ranks, or {DEFAULT_STRATEGY}")
    return ",".join(map(str, gpus[:ranks]))


def pick_device(wanted: str, world: World, *, several: bool = False) -> torch.device:
    """Return the device of this process: the first of --device if one process drives `several`."""
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
    """Return the GPU of this process; raise TrainerError in all processes of a node with too few GPUs.

    With TRAINER_BACKEND=gloo, processes share a GPU where there are more of them.
    """
    if backend_of(os.environ, "cuda") == "gloo":
        return numbers[world.local_rank % len(numbers)]
    if world.local_size > len(numbers):
        raise TrainerError(
            f"{world.local_size} processes on this node, but {len(numbers)} GPUs",
            "start one process per GPU, or use --device cpu",
        )
    return numbers[world.local_rank]


def thread_count(
    environment: Mapping[str, str], world: World, device: torch.device, cores: int
) -> int | None:
    """Return the CPU threads of this process, or None to keep the user's OMP_NUM_THREADS.

    With a GPU it is always one: the host only launches kernels, and OpenMP's threads would spin at barriers, waiting
    for threads whose cores the dataloader workers use. With 16 threads next to 8 workers, an H200 trained at a
    fifth of the speed. On a CPU, a process gets its share of the node's cores. OMP_NUM_THREADS=1 without a launcher's
    job is torchrun's default there, not a choice of the user.
    """
    if device.type != "cpu":
        return 1
    omp = environment.get("OMP_NUM_THREADS")
    if omp is not None and not (world.launched and omp == "1" and contract.JOB_ID not in environment):
        return None
    return max(1, cores // world.local_size)


def usable_cores() -> int:
    """Return the cores of this node: its share of the CPU affinity, limited by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    nodes = os.environ.get(contract.NODES_ON_HOST, "1")  # of the job on this machine
    if not nodes.isdecimal():
        raise TrainerError(f"{contract.NODES_ON_HOST} is {nodes!r}, not a number")
    cores = max(1, cores // max(1, int(nodes)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


class LoaderShare(TypedDict):
    """A loader's arguments that depend on the rank."""

    rank: int  # of `world` ranks that share each batch
    world: int
    local_size: int  # ranks on this node
    workers: int  # dataloader workers of each rank
    stride: int  # pixels of which the sides of the images are multiples


def share_of(world: World, device: torch.device, workers: int | None, stride: int) -> LoaderShare:
    """Return a loader's arguments that depend on the rank. `workers` is by default 0 on a CPU, which trains itself."""
    if workers is None:
        workers = 0 if device.type == "cpu" else min(8, usable_cores() // world.local_size)
    return {
        "rank": world.rank,
        "world": world.size,
        "local_size": world.local_size,
        "workers": workers,
        "stride": stride,
    }


def limit_threads(world: World, device: torch.device) -> None:
    """Limit torch's threads in this process."""
    threads = thread_count(os.environ, world, device, usable_cores())
    if threads is not None:
        torch.set_num_threads(threads)


def backend_of(environment: Mapping[str, str], device: str) -> str:
    """Return the backend for a type of device: TRAINER_BACKEND, by default nccl for `cuda` and gloo for `cpu`.

    NCCL does not allow two ranks on one GPU. gloo does, and copies everything that the ranks exchange through the host.
    """
    default = "nccl" if device == "cuda" else "gloo"
    wanted = environment.get(BACKEND) or default
    if wanted not in (default, "gloo"):
        known = "gloo" if default == "gloo" else "nccl or gloo"
        raise TrainerError(
            f"{BACKEND}={wanted}: not a backend for {device}", f"set it to {known}, or unset it"
        )
    return wanted


_JOINED: list[str] = []  # backends of the process groups that this process has joined


def join(world: World, device: torch.device, timeout: timedelta | None = None) -> str:
    """Join the process group and return its backend; "" for a process without torchrun.

    `timeout` is that of the rendezvous and of the collectives, by default TIMEOUT.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not world.launched:
        return ""
    backend = backend_of(os.environ, device.type)
    options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
    try:
        dist.init_process_group(backend, timeout=timeout or TIMEOUT, **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "already in use" not in str(error):
            raise
        raise TrainerError(
            f"MASTER_PORT {os.environ['MASTER_PORT']} is in use by another program on this machine",
            "set another MASTER_PORT on all ranks, or stop that program (ss -ltnp)",
        ) from None
    _JOINED.append(backend)
    return backend


@contextlib.contextmanager
def rendezvous_errors(world: World, device: torch.device, timeout: timedelta | None = None) -> Iterator[None]:
    """Report a slow rendezvous during join() and the first collective; raise TrainerError if it times out."""
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    warning = (
        f"rank {world.rank} has waited {JOIN_WARNING_S:g} s for the others of {world.size} ranks at {where}"
    )
    if device.type == "cuda":
        warning += "; if all have started, peer-to-peer between the GPUs may fail: try NCCL_P2P_DISABLE=1"
    timer = threading.Timer(JOIN_WARNING_S, print, (warning,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if world.size > 1:
        timer.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if "timed out" not in str(error).lower() or contract.JOB_ID in os.environ:  # the launcher reports it
            raise
        seconds = (timeout or TIMEOUT).seconds
        raise TrainerError(
            f"rank {world.rank}: not all of {world.size} ranks joined at {where} within {seconds} s",
            "start all ranks, and check that each machine reaches that port (clusterctl doctor)",
        ) from None
    finally:
        timer.cancel()


def has_joined() -> bool:
    """Whether this process has joined a process group, also if it has left it since."""
    return bool(_JOINED)


def leave() -> None:
    """Destroy the process group, if this process has joined one. Give up after LEAVE_LIMIT_S, and say so.

    NCCL can wait for other ranks forever. The caller has nothing left to do but to report and exit.
    """
    if not dist.is_initialized():
        return
    rank = dist.get_rank()
    problem = [f"not possible within {LEAVE_LIMIT_S:.0f} s"]

    def destroy() -> None:
        try:
            dist.destroy_process_group()
            problem.clear()
        except RuntimeError as error:
            problem[:] = str(error).splitlines()[:1]

    leaving = threading.Thread(target=destroy, daemon=True)
    leaving.start()
    leaving.join(LEAVE_LIMIT_S)
    if problem:
        print(
            f"rank {rank}: exiting without leaving the process group: {problem[0]}",
            file=sys.stderr,
            flush=True,
        )


def is_distributed() -> bool:
    """Whether the process group has more than one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_rank_zero() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not is_distributed() or dist.get_rank() == 0


def raise_on_all_ranks(error: TrainerError | None) -> None:
    """Raise on all ranks the error of the first rank that has one. A collective."""
    found = all_gather((error.message, error.hint) if error else None)
    if any(found):
        # Without the barrier, a rank that exits closes connections that another rank still reads.
        with contextlib.suppress(RuntimeError):
            barrier()
    if error:
        raise error
    for rank, other in enumerate(found):
        if other:
            raise TrainerError(f"rank {rank}: {other[0]}", other[1])


def broadcast(value: Any, source: int = 0) -> Any:
    """Return the value (picklable) of rank `source` on every rank."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def all_gather(value: Any) -> list[Any]:
    """Return every rank's value (picklable) in rank order, on every rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    if is_distributed():
        dist.barrier()


def copy_to_host(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy a few values to the host; the returned function waits for the copy and returns them."""
    if values.device.type != "cuda":
        return values.tolist
    copy = values.to("cpu", non_blocking=True)  # torch allocates pinned memory for it
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def read() -> list[float]:
        event.synchronize()
        return copy.tolist()

    return read


def now(device: torch.device) -> float:
    """Return the seconds of a clock, after a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def connect_store() -> Any:
    """Return a separate connection to the rendezvous store, which no collective blocks; None if it fails."""
    if not is_distributed():
        return None
    try:
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
    except (RuntimeError, OSError, ValueError, KeyError):
        return None


def gather(value: Any) -> list[Any]:
    """Return every rank's value (picklable) in rank order on rank 0, and [] elsewhere."""
    if not is_distributed():
        return [value]
    rank = dist.get_rank()
    values: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(value, values, dst=0)
    return values or []


def average_(tensors: list[Tensor], group: Group | None = None) -> None:
    """Average float tensors over the ranks (of a group), in place, in one collective."""
    if not is_distributed() or not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))


def start_sum(value: Tensor, group: Group | None = None) -> dist.Work | None:
    """Start to sum a tensor over the ranks (of a group), in place; wait() on the result before reading it."""
    return dist.all_reduce(value, group=group, async_op=True) if is_distributed() and value.numel() else None


def wait(work: dist.Work | None) -> None:
    """Wait for a sum that start_sum started."""
    if work is not None:
        work.wait()
