"""Hints for known messages of CUDA, NCCL, torch and the kernel in a failed program's output. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Hints by pattern, below the source of the remedy. The first pattern that matches the error or a line counts.
KNOWN = {
    # PyTorch, CUDA semantics
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError": (
        "use a smaller batch or bf16; against fragmentation: --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    ),
    # Linux, cgroups
    r"out of memory: the kernel killed it": "use fewer dataloader workers or a smaller batch",
    # PyTorch, CUDA semantics
    r"No CUDA GPUs are available|Found no NVIDIA driver": (
        "check the GPUs of the node: clusterctl doctor; without GPUs: --device cpu"
    ),
    # NVIDIA, CUDA Compatibility
    r"CUDA driver version is insufficient|driver on your system is too old": (
        "install a newer NVIDIA driver, or use an image with an older CUDA; clusterctl doctor names the versions"
    ),
    # PyTorch, CUDA semantics
    r"no kernel image is available for execution": (
        "the torch of the image does not support this GPU: use an image with another torch"
    ),
    r"device-side assert triggered": (
        "often a label or index out of range; for the exact line: --env CUDA_LAUNCH_BLOCKING=1"
    ),
    # NVIDIA, Xid Errors
    r"illegal memory access was encountered": (
        "for the exact line: --env CUDA_LAUNCH_BLOCKING=1; for a fault of the GPU: dmesg | grep Xid"
    ),
    r"uncorrectable ECC error": "the GPU is faulty: run without this node (--only), and reset it",
    # PyTorch, torchrun
    r"invalid device ordinal": "the program uses more GPUs than --gpus: select the GPU by LOCAL_RANK",
    # PyTorch, torch.distributed
    r"Duplicate GPU detected": (
        "two ranks use one GPU: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first collective"
    ),
    # NVIDIA NCCL, Troubleshooting and Environment Variables
    r"no socket interface found|Call to (connect|bind) .*failed": (
        "check the network between the nodes: clusterctl doctor; to choose the device: --env NCCL_SOCKET_IFNAME=eth0"
    ),
    r"ncclSystemError|unhandled system error|ncclUnhandledCudaError|unhandled cuda error": (
        "for the call that failed: --env NCCL_DEBUG=INFO; often /dev/shm is too small"
    ),
    r"ncclInvalidUsage|ncclInternalError|ncclInvalidArgument": (
        "for the cause: --env NCCL_DEBUG=INFO; all nodes need the same image and NCCL"
    ),
    # PyTorch, torch.distributed
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (send|recv) operation": (
        "a rank did not enter the collective; to see which: --stall-timeout 60"
    ),
    r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives on ranks": (
        "the ranks call different collectives or shapes; to see which: --env TORCH_DISTRIBUTED_DEBUG=DETAIL"
    ),
    # PyTorch, DistributedDataParallel
    r"Expected to have finished reduction in the prior iteration": (
        "some parameters got no gradient: DistributedDataParallel(..., find_unused_parameters=True)"
    ),
    # PyTorch, torch.distributed
    r"No backend type associated with device type cpu|Tensors must be CUDA and dense": (
        "CPU tensors need gloo: init_process_group('cpu:gloo,cuda:nccl')"
    ),
    r"Default process group has not been initialized": "call torch.distributed.init_process_group() first",
    # PyTorch, torch.utils.data and Multiprocessing best practices
    r"Bus error|insufficient shared memory|unable to (open|write to|mmap) .*shm|unable to mmap \d+ bytes": (
        "the container has too little /dev/shm: use fewer dataloader workers"
    ),
    r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (exited unexpectedly|is killed by signal: Killed)": (
        "the kernel may have killed it for memory: use fewer dataloader workers"
    ),
    r"Too many open files|received 0 items of ancdata": (
        "torch.multiprocessing.set_sharing_strategy('file_system'), or a higher limit: ulimit -n"
    ),
    # Linux, errno
    r"No space left on device": "free some space on the node; clusterctl doctor shows how much it has",
    # PyTorch, torchrun
    r"Address already in use|EADDRINUSE": "use a free port: --master-port auto",
    # docs/how-to/any-program.md
    r"Read-only file system": (
        "write below the working directory or $CLUSTER_RUN_DIR, or mount the folder: --mount DIR:DIR:rw"
    ),
    # pip, HTTPS Certificates
    r"CERTIFICATE_VERIFY_FAILED": (
        "a proxy has its own certificate: copy it to the working directory, then --env PIP_CERT=FILE"
    ),
    # PyTorch, torch.distributed
    r"connectFullMesh failed": (
        "check the network between the nodes: clusterctl doctor; to choose the device: --env GLOO_SOCKET_IFNAME=eth0"
    ),
    # Linux, errno
    r"Disk quota exceeded": "free some space of this user on the node, or use another disk: --run-dir FOLDER",
    # Linux, errno: clone and pthread_create
    r"can't start new thread|pthread_create failed|Cannot allocate memory.*fork|fork: (retry: )?Resource temporarily": (
        "use fewer dataloader workers and --env OMP_NUM_THREADS=1, or a higher limit of processes: ulimit -u"
    ),
    # OpenCV, installation of opencv-python
    r"lib(GL|EGL|gthread-2\.0|glib-2\.0|SM|Xext|Xrender)\.so\.\d+: cannot open": (
        "use OpenCV without a display: --setup 'pip uninstall -y opencv-python; pip install opencv-python-headless'"
    ),
    # PyTorch, Multiprocessing best practices
    r"Cannot re-initialize CUDA in forked subprocess": (
        "use no CUDA before the workers start, or DataLoader(..., multiprocessing_context='spawn')"
    ),
    # GNU C Library and GCC, symbol versions
    r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found": (
        "a package was built for a newer system: install an older build of it, or use an image with a newer system"
    ),
    # oneMKL, Using the Single Dynamic Library
    r"MKL_THREADING_LAYER": "--env MKL_THREADING_LAYER=GNU",
    # PyTorch, C++ extensions
    r"[Ss]egmentation fault": (
        "the log has the Python stack; often a package was built for another torch or CUDA: reinstall it with --setup"
    ),
    # docs/how-to/any-program.md
    r"No module named '(?P<name>[^'.]+)": (
        "install it: --setup 'pip install {name}', or use an image that has it: --image NAME"
    ),
}

#: The packages of modules that have another name.
PACKAGES = {
    "Crypto": "pycryptodome",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "git": "GitPython",
    "google": "protobuf",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}


def hint(error: str, output: Iterable[str] = ()) -> str:
    """Return the hint for an error, or else for the newest known line of the output; "" if none is known."""
    for text in (error, *reversed([*output])):
        for pattern, advice in KNOWN.items():
            if match := re.search(pattern, text):
                names = {key: PACKAGES.get(name, name) for key, name in match.groupdict().items()}
                return advice.format(**names)
    return ""
