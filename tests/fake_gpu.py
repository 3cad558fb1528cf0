"""Two GPUs simulated on the CPU, with real values, and stricter than real ones.

A `GpuTensor` is a CPU tensor that the trainer, autocast and torch's optimizers take for one on `cuda:0` or `cuda:1`, so
that the code under `device.type == "cuda"` runs. Operations are the CPU's: a training has the losses of one on the CPU.
Errors are
- operations that a real GPU does not support: on tensors of two GPUs, or of a GPU and the CPU (except scalars);
- in `step()`, operations for which the host waits: `item`, a blocking copy, `nonzero`, a boolean index.
A copy to the host without blocking has its values only after the synchronization of an event that was recorded later.

Not simulated: kernels and their accuracy, the order of operations on several streams, NCCL, pinned memory, the size of
memory, graphs, torch.compile, and a device `cuda` without its number. Autocast knows the operations of CASTS only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
DEVICE_QUERY = torch.ops.prim.device.default
CPU = torch.device("cpu")
META = torch.device("meta")
COUNT = 2
MEMORY = 2**30  # bytes of a GPU, all free
#: Operations that return numbers, or tensors whose sizes depend on values.
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.nonzero_static,
    aten.equal,
    aten.masked_select,
    aten.bincount,
}
WAITS |= {aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.is_nonzero, aten.repeat_interleave}
COPIES = {aten._to_copy, aten.copy_, aten.copy, aten._foreach_copy_}
INDICES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
#: Operations that autocast casts on a GPU: to its dtype, to the widest of the inputs, to float32.
LOWER = "lower"
WIDEST = "widest"
FLOAT32 = "float32"
CASTS = dict.fromkeys(("conv2d", "conv_transpose2d.input", "linear", "matmul", "mm", "bmm", "addmm"), LOWER)
CASTS |= {"cat": WIDEST, "stack": WIDEST, "softmax.int": FLOAT32, "layer_norm": FLOAT32}

_thread = threading.local()  # `gpu`: the number of the current GPU, which every thread has of its own
_in_step = False
_copies: list[tuple[Tensor, Tensor]] = []  # copies to the host that have not ended, and their values


class DeviceMismatch(RuntimeError):
    """An operation on tensors of several devices."""


class HostWait(RuntimeError):
    """An operation in a step for which the host waits."""


class GpuTensor(Tensor):
    """A tensor on a simulated GPU: its memory is a CPU tensor's, its dispatch keys are those of CUDA.

    Python code finds `gpu` as its device. C++ code finds `meta`: of a CUDA device, the autograd engine would use
    streams, which need a driver. So a new tensor on `meta` is one that C++ code makes on the device of another tensor.
    """

    gpu: torch.device
    is_cuda = True
    is_cpu = False
    is_meta = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor, gpu: torch.device) -> GpuTensor:
        made = Tensor._make_subclass(cls, host, False, dispatch_device=True, device_for_backend_keys=gpu)
        made.gpu = gpu
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUERY:
            return META
        return run(func, args, kwargs or {}) if _are_ours(types) else NotImplemented

    @property
    def device(self) -> torch.device:
        return self.gpu

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: GpuTensor) -> None:
        Tensor.data.__set__(self, other)
        self.gpu = other.gpu

    def get_device(self) -> int:
        return self.gpu.index

    def record_stream(self, _: Any) -> None:
        pass

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.gpu} device type tensor to numpy. Use Tensor.cpu()")

    __array__ = numpy

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype}, {self.gpu})"

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.cpu().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = self.detach().clone()
        made = nn.Parameter(made) if isinstance(self, nn.Parameter) else made
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made


def _are_ours(types: Sequence[type]) -> bool:
    """Whether no other subclass, such as DTensor, must first replace its tensors by those that it holds."""
    return all(kind in (Tensor, nn.Parameter, GpuTensor) for kind in types)


def _current() -> torch.device:
    return torch.device("cuda", getattr(_thread, "gpu", 0))


def _host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with the tensor's memory, as it is now: FSDP resizes and replaces it."""
    with torch._C._DisableTorchDispatch():
        memory = tensor.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(
            memory, tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, after a check of its devices, and put its results on their device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    gpus = [t.gpu for t in tensors if isinstance(t, GpuTensor)]
    wanted = kwargs.get("device")
    device = torch.device(wanted) if wanted is not None else gpus[0] if gpus else CPU
    if device == META or (device.type == "cuda" and device.index is None):
        device = gpus[0] if gpus else _current()
    if gpus or device.type == "cuda":
        _check(func, args, kwargs, tensors, device)
    hosts = {id(t): _host(t) for t in tensors if isinstance(t, GpuTensor)}
    inputs = {id(hosts.get(id(t), t)): t for t in tensors}  # an operation in place returns one of them
    options = {
        k: CPU if k == "device" and v is not None else v for k, v in kwargs.items() if k != "pin_memory"
    }
    args, options = tree_map(lambda leaf: hosts.get(id(leaf), leaf), (args, options))
    made = func(*args, **options)

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, AsyncCollectiveTensor):
            leaf = leaf.wait()
        return inputs[id(leaf)] if id(leaf) in inputs else GpuTensor(leaf, device)

    if device.type == "cuda":
        return tree_map(put, made)
    if gpus and kwargs.get("non_blocking"):
        _copies.append((made, made.clone()))
        made.fill_(torch.nan if made.is_floating_point() else 77)
    return made


def _check(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor], device: torch.device
) -> None:
    """Raise DeviceMismatch or HostWait."""
    name = func.overloadpacket
    found = {t.device for t in tensors}
    if name in COPIES:
        is_async = kwargs.get("non_blocking") or True in args[2:]
        if _in_step and not is_async and CPU in found | {device} and len(found | {device}) > 1:
            raise HostWait(f"{func}: a blocking copy between the host and a GPU in a step")
        return
    is_mask = name in INDICES and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in tree_leaves(args[1])
    )
    if _in_step and (name in WAITS or is_mask):
        raise HostWait(f"{func}: the host waits for {device} in a step")
    if torch.Tag.pointwise in func.tags:  # a kernel takes the CPU's scalars as its arguments
        written = tensors[0] if func._schema.is_mutable else None
        found = {t.device for t in tensors if t.dim() or t.device != CPU or t is written}
    if len(found | ({device} if kwargs.get("device") is None else set())) > 1:
        listed = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in tensors)
        raise DeviceMismatch(f"{func}: expected all tensors to be on the same device, but found {listed}")


class _Factories(TorchDispatchMode):
    """The operations without a GpuTensor: new tensors on a GPU, copies to one, and pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUERY:
            return META
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):  # DTensor infers shapes
            return func(*args, **(kwargs or {}))
        if func.overloadpacket is aten._pin_memory:
            return args[0].clone()
        if func.overloadpacket is aten.is_pinned:
            return False
        return run(func, args, kwargs or {}) if _are_ours(types) else NotImplemented


def _register_cast(library: Any, name: str, kind: str) -> None:
    """Replace the kernel of autocast, which asks C++ for the device, by one that casts any GpuTensor."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(aten, packet), overload or "default")

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtypes = {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        is_wide = kind == FLOAT32 or (kind == WIDEST and torch.float32 in dtypes)
        dtype = torch.float32 if is_wide else torch.get_autocast_dtype("cuda")

        def one(leaf: Any) -> Any:
            is_cast = isinstance(leaf, GpuTensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
            return leaf.to(dtype) if is_cast else leaf

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
            return operation(*tree_map(one, args), **kwargs)

    library.impl(name, cast, "AutocastCUDA", allow_override=True)


class _CudaEvent:
    """torch.cuda.Event: its synchronization ends the copies to the host before it."""

    def __init__(self, **_: Any) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def record(self, *_: Any) -> None:
        self._before = list(_copies)

    def synchronize(self) -> None:
        for copy, values in self._before:
            copy.copy_(values)
        ended = {id(copy) for copy, _ in self._before}
        _copies[:] = [pair for pair in _copies if id(pair[0]) not in ended]

    def elapsed_time(self, _: _CudaEvent) -> float:
        return 1.0


class _CudaStream:
    """torch.cuda.Stream without an order: operations end at once."""

    stream_id = 0
    device_type = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _current()
        self.device_index = self.device.index

    def __enter__(self) -> _CudaStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    wait_event = wait_stream

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: _CudaEvent | None = None) -> _CudaEvent:
        event = event or _CudaEvent()
        event.record()
        return event


def _synchronize(*_: Any) -> None:
    if _in_step:
        raise HostWait("torch.cuda.synchronize in a step")


def _set_device(device: Any) -> None:
    _thread.gpu = device if isinstance(device, int) else torch.device(device).index


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    before = _current()
    _set_device(device)
    try:
        yield
    finally:
        _set_device(before)


def _gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


#: What needs a driver.
_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: COUNT,
    "get_device_capability": lambda *_: (9, 0),
    "mem_get_info": lambda *_: (MEMORY, MEMORY),
    "memory_reserved": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1, multi_processor_count=1),
    "is_bf16_supported": lambda *_: True,
    "current_device": lambda: _current().index,
    "set_device": _set_device,
    "device": _device,
    "synchronize": _synchronize,
    "_lazy_init": lambda: None,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda *_: None,
    "Event": _CudaEvent,
    "Stream": _CudaStream,
    "current_stream": _CudaStream,
    "stream": lambda *_: contextlib.nullcontext(),
}
_ACCELERATOR: dict[str, Any] = {
    "is_available": lambda: True,
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "current_stream": _CudaStream,
    "device_index": _device,
}
#: DataParallel's copies between GPUs.
_COMM: dict[str, Any] = {
    "scatter": lambda x, to, *_: tuple(
        part.to(_gpu(n)) for part, n in zip(x.chunk(len(to)), to, strict=False)
    ),
    "broadcast_coalesced": lambda tensors, to, *_: [[t.to(_gpu(n)) for t in tensors] for n in to],
    "gather": lambda tensors, dim, to: torch.cat([t.to(_gpu(to)) for t in tensors], dim),
    "reduce_add_coalesced": lambda copies, to: [
        sum(t.to(_gpu(to)) for t in same) for same in zip(*copies, strict=True)
    ],
}


def _no_grad(self: torch.inference_mode) -> None:
    self._inference_mode_context = torch.no_grad()
    self._inference_mode_context.__enter__()


@contextlib.contextmanager
def simulated_gpus() -> Iterator[None]:
    """Simulate two GPUs in this process."""
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as library:
        modules = {torch.cuda: _CUDA, torch.accelerator: _ACCELERATOR, torch.nn.parallel.comm: _COMM}
        for module, stubs in modules.items():
            for name, stub in stubs.items():
                patch.setattr(module, name, stub)
        # A DTensor's device is the one that C++ code finds.
        patch.setattr(DTensor, "device", property(lambda self: self.to_local().device), raising=False)
        # Inference mode does not decompose operations before they are dispatched.
        patch.setattr(torch.inference_mode, "__enter__", _no_grad)
        # By default, a module that is moved keeps its parameter objects, which are no GpuTensor.
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        for name, kind in CASTS.items():
            _register_cast(library, name, kind)
        _copies.clear()
        _set_device(0)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes a CPU tensor, and copies it
        try:
            with _Factories():
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Make the host's waits for a GPU errors in the context."""
    global _in_step
    _in_step = True
    try:
        yield
    finally:
        _in_step = False
