"""Hints for known messages of CUDA, NCCL, torch and the kernel in a failed program's output. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CUDA = "PyTorch, CUDA semantics"
_NCCL = "NVIDIA NCCL, Troubleshooting and Environment Variables"
_ELASTIC = "PyTorch, torch.distributed"
_LOADER = "PyTorch, torch.utils.data and Multiprocessing best practices"

#: (pattern, hint, source of the remedy). The first pattern that matches the error or a line of the output counts.
KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError",
        "use a smaller batch or bf16; against fragmentation: --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        _CUDA,
    ),
    (r"out of memory: the kernel killed it", "use fewer dataloader workers or a smaller batch", "Linux, cgroups"),
    (
        r"No CUDA GPUs are available|Found no NVIDIA driver",
        "check the GPUs of the node: clusterctl doctor; without GPUs: --device cpu",
        _CUDA,
    ),
    (
        r"CUDA driver version is insufficient|driver on your system is too old",
        "install a newer NVIDIA driver, or use an image with an older CUDA; clusterctl doctor names the versions",
        "NVIDIA, CUDA Compatibility",
    ),
    (
        r"no kernel image is available for execution",
        "the torch of the image does not support this GPU: use an image with another torch",
        _CUDA,
    ),
    (
        r"device-side assert triggered",
        "often a label or index out of range; for the exact line: --env CUDA_LAUNCH_BLOCKING=1",
        _CUDA,
    ),
    (
        r"illegal memory access was encountered",
        "for the exact line: --env CUDA_LAUNCH_BLOCKING=1; for a fault of the GPU: dmesg | grep Xid",
        "NVIDIA, Xid Errors",
    ),
    (
        r"uncorrectable ECC error",
        "the GPU is faulty: run without this node (--only), and reset it",
        "NVIDIA, Xid Errors",
    ),
    (
        r"invalid device ordinal",
        "the program uses more GPUs than --gpus: select the GPU by LOCAL_RANK",
        "PyTorch, torchrun",
    ),
    (
        r"Duplicate GPU detected",
        "two ranks use one GPU: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first collective",
        _ELASTIC,
    ),
    (
        r"no socket interface found|Call to (connect|bind) .*failed",
        "check the network between the nodes: clusterctl doctor; to choose the device: --env NCCL_SOCKET_IFNAME=eth0",
        _NCCL,
    ),
    (
        r"ncclSystemError|unhandled system error|ncclUnhandledCudaError|unhandled cuda error",
        "for the call that failed: --env NCCL_DEBUG=INFO; often /dev/shm is too small",
        _NCCL,
    ),
    (
        r"ncclInvalidUsage|ncclInternalError|ncclInvalidArgument",
        "for the cause: --env NCCL_DEBUG=INFO; all nodes need the same image and NCCL",
        _NCCL,
    ),
    (
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (send|recv) operation",
        "a rank did not enter the collective; to see which: --stall-timeout 60",
        _ELASTIC,
    ),
    (
        r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives on ranks",
        "the ranks call different collectives or shapes; to see which: --env TORCH_DISTRIBUTED_DEBUG=DETAIL",
        _ELASTIC,
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        "some parameters got no gradient: DistributedDataParallel(..., find_unused_parameters=True)",
        "PyTorch, DistributedDataParallel",
    ),
    (
        r"No backend type associated with device type cpu|Tensors must be CUDA and dense",
        "CPU tensors need gloo: init_process_group('cpu:gloo,cuda:nccl')",
        _ELASTIC,
    ),
    (
        r"Default process group has not been initialized",
        "call torch.distributed.init_process_group() first",
        _ELASTIC,
    ),
    (
        r"Bus error|insufficient shared memory|unable to (open|write to|mmap) .*shm|unable to mmap \d+ bytes",
        "the container has too little /dev/shm: use fewer dataloader workers",
        _LOADER,
    ),
    (
        r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (exited unexpectedly|is killed by signal: Killed)",
        "the kernel may have killed it for memory: use fewer dataloader workers",
        _LOADER,
    ),
    (
        r"Too many open files|received 0 items of ancdata",
        "torch.multiprocessing.set_sharing_strategy('file_system'), or a higher limit: ulimit -n",
        _LOADER,
    ),
    (
        r"No space left on device",
        "free some space on the node; clusterctl doctor shows how much it has",
        "Linux, errno",
    ),
    (r"Address already in use|EADDRINUSE", "use a free port: --master-port auto", "PyTorch, torchrun"),
    (
        r"Read-only file system",
        "write below the working directory or $CLUSTER_RUN_DIR, or mount the folder: --mount DIR:DIR:rw",
        "docs/how-to/any-program.md",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "a proxy has its own certificate: copy it to the working directory, then --env PIP_CERT=FILE",
        "pip, HTTPS Certificates",
    ),
    (
        r"No module named '(?P<name>[^'.]+)",
        "install it: --setup 'pip install {name}', or use an image that has it: --image NAME",
        "docs/how-to/any-program.md",
    ),
)


def hint(error: str, output: Iterable[str] = ()) -> str:
    """Return the hint for an error, or else for the newest known line of the output; "" if none is known."""
    for text in (error, *reversed([*output])):
        for pattern, advice, _ in KNOWN:
            if match := re.search(pattern, text):
                return advice.format(**match.groupdict())
    return ""
