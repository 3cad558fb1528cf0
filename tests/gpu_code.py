"""The code that inductor generates for a GPU from a training step, on a machine without a GPU.

`trace` lets a training compile its step on the CPU, with a backend that keeps the graphs and computes nothing: what it
returns has the right shapes and no values. `lower` replaces their inputs by fake tensors on `cuda:0`, and lets inductor
generate the code for an H100. `compile_kernel` compiles a kernel of it to a cubin with the ptxas of Triton's package.

Used by tests, and by benchmarks/on_paper.py, in a separate process: it replaces functions of torch. The graphs are
traced with a CPU's autocast, which casts a few more operations than a GPU's does (none of a YOLO's).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor
import triton
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.flop_counter import FlopCounterMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.engine.trainer import Trainer
from trainer.models.blocks import ColourConv2d
from trainer.strategies.network_with_loss import GPU_OPTIONS

CUDA = torch.device("cuda", 0)
#: What CUDA reports of an H100.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
    gcnArchName="",
)
SMALL = 1 << 20  # bytes of a tensor that is zeroed
GENERATED = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
LAUNCHES = re.compile(r"\b(triton_[a-z]+)_\w*?\.run\(")
OTHERS = re.compile(r"(?:= |^ +)(extern_kernels\.\w+|torch\.ops\.[\w.]+)\((.*)$", re.MULTILINE)
MASK = re.compile(
    r"\[(True|False), (True|False), (True|False)\]"
)  # of the gradients that a convolution makes
KINDS = {"triton_poi": "pointwise", "triton_red": "reduction", "triton_per": "reduction"}
MULTIPLICATIONS = ("convolution", "mm", "addmm", "bmm", "baddbmm", "attention")


@dataclass(frozen=True)
class Graph:
    """A graph of a step: `part` is the function that was compiled."""

    part: str
    is_backward: bool
    module: torch.fx.GraphModule
    inputs: list[Any]


@dataclass(frozen=True)
class Node:
    """A node of the generated code: most are a kernel."""

    bytes: int  # read and written
    what: str  # its operations, and the shape of its result
    in_loss: bool


@dataclass(frozen=True)
class Lowered:
    """The generated code of a graph."""

    code: str
    kernels: dict[str, int]  # by kind; at least one for each call
    nodes: list[Node]
    flops: int  # of convolutions and matrix products

    @property
    def sources(self) -> dict[str, str]:
        """The Triton kernels, each by its name."""
        return dict(GENERATED.findall(self.code))


@dataclass(frozen=True)
class Usage:
    """What a kernel needs on a GPU."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread


def trace(run: Trainer, batch: Any) -> list[Graph]:
    """Return the graphs of a step with --compile, in the order in which they were compiled."""
    graphs: list[Graph] = []

    def keep(part: str, is_backward: bool, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if not any(g.part == part and g.is_backward == is_backward for g in graphs):
            graphs.append(Graph(part, is_backward, module, list(inputs)))
        (made,) = (node.args[0] for node in module.graph.nodes if node.op == "output")
        shapes = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in made]
        return make_boxed_func(lambda *_: [_blank(each) for each in shapes])

    def backend(part: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(
            compile_fx._recursive_pre_grad_passes(graph, inputs),
            inputs,
            fw_compiler=partial(keep, part, False),
            bw_compiler=partial(keep, part, True),
            decompositions=select_decomp_table(),
            partition_fn=compile_fx.partition_fn,
            keep_inference_input_mutations=True,
        )

    compile_ = torch.compile
    torch._dynamo.reset()

    def kept(function: Any, **_: Any) -> Any:
        return compile_(function, backend=partial(backend, function.__name__), dynamic=False)

    with mock.patch("torch.compile", kept), mock.patch.object(ColourConv2d, "forward", ColourConv2d.padded):
        run.step(batch)
    return graphs


def _blank(like: Any) -> Any:
    if not isinstance(like, Tensor):
        return like
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.zero_() if made.nbytes < SMALL else made  # the pages of a large one are never touched


def lower(graph: Graph) -> Lowered:
    """Let inductor generate the code of a graph for an H100."""
    module = graph.module
    with _without_driver():
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        with mode:
            inputs = [
                torch.empty_strided(i.shape, i.stride(), dtype=i.dtype, device=CUDA)
                if isinstance(i, Tensor)
                else i
                for i in graph.inputs
            ]
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": CUDA}
            node.args = tuple(CUDA if isinstance(arg, torch.device) else arg for arg in node.args)
        module.recompile()
        with FlopCounterMode(display=False) as flops:
            FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
        context = DebugContext()
        options = inductor.patch({"compile_threads": 1, **GPU_OPTIONS})
        with V.set_debug_handler(context), context, V.set_fake_mode(mode), options:
            compile_fx.view_to_reshape(module)
            compile_fx._recursive_post_grad_passes(module, is_inference=False)
            how = {"example_inputs": inputs, "shape_env": mode.shape_env, "is_backward": graph.is_backward}
            lowering = GraphLowering(module, is_inference=False, **how)
            with V.set_graph_handler(lowering):
                lowering.run(*inputs)
                made: Any = lowering.codegen()
                nodes = [_node(node) for node in lowering.scheduler.nodes]
    code = made[0] if isinstance(made, tuple) else made
    code = str(getattr(code, "value", code))
    return Lowered(code, kernels_of(code), nodes, flops.get_total_flops())


def _node(node: Any) -> Node:
    origins = [origin for part in node.get_nodes() for origin in part.node.get_origins()]
    names = dict.fromkeys(
        str(o.target).removeprefix("aten.").removeprefix("prims.").split(".")[0] for o in origins
    )
    size = node.get_nodes()[-1].node.maybe_get_size() or _sizes(origins[-1].meta["val"])
    traces = "".join(str(o.meta.get("stack_trace", "")) for o in origins)
    where = "/trainer/losses/" in traces and "/trainer/models/" not in traces
    return Node(
        node.get_read_write_buffers_sizes(), f"{' '.join(names)} -> {'x'.join(map(str, size))}", where
    )


def _sizes(made: Any) -> Any:
    """Return the shape of the first of some results."""
    return next(
        (each.shape for each in torch.utils._pytree.tree_leaves(made) if isinstance(each, Tensor)), ()
    )


def kernels_of(code: str) -> dict[str, int]:
    """Return the kernels that the code launches, by kind.

    A convolution's backward pass is a kernel for each gradient, and every other call of a library at least one.
    """
    code = code.partition("def call(")[2]
    found = dict.fromkeys(("pointwise", "reduction", "convolution, matmul", "other"), 0)
    for name in LAUNCHES.findall(code):
        found[KINDS.get(name, "other")] += 1
    for name, arguments in OTHERS.findall(code):
        operation = name.removesuffix(".default").rpartition(".")[2]
        if not any(word in operation for word in MULTIPLICATIONS):
            found["other"] += 1
            continue
        mask = MASK.search(arguments) if "backward" in operation else None
        found["convolution, matmul"] += mask[0].count("True") if mask else 1
    return found


def kernel_of(name: str, source: str, folder: Path) -> Any:
    """Return inductor's object for a kernel of the generated code, which Triton has not compiled yet."""
    path = folder / f"{name}.py"  # Triton reads the source of a function from its file
    path.write_text(source)
    names: dict[str, Any] = {"__file__": str(path), "__name__": name}
    with _without_driver():
        exec(compile(source, path, "exec"), names)
    return names[name]


def compile_kernel(kernel: Any, capability: int, folder: Path) -> Usage:
    """Compile a kernel in inductor's first configuration, e.g. for 90 (sm_90); raise what Triton or ptxas raise."""
    meta = kernel._create_compile_meta(kernel.configs[0])
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = kernel._create_compile_options(kernel.configs[0], meta)
    with _without_driver():
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return usage_of(made.asm["cubin"], folder)


def usage_of(cubin: bytes, folder: Path) -> Usage:
    """Return the registers and the spilled bytes of a compiled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run(
        [dump, "--dump-resource-usage", path], capture_output=True, text=True, check=True
    ).stdout
    words = dict(
        word.split(":")[:2] for word in text.split() if word.startswith(("REG:", "STACK:", "LOCAL:"))
    )
    return Usage(int(words["REG"]), max(int(words["STACK"]), int(words["LOCAL"])))


class _Driver:
    """Triton's driver, without a GPU."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_device_interface = staticmethod(lambda: torch.cuda)


@contextlib.contextmanager
def _without_driver() -> Iterator[None]:
    """Let torch and Triton find an H100; nothing may run on it."""
    answers: dict[str, Any] = {
        "torch.cuda._get_device_properties": H100,
        "torch.cuda.get_device_properties": H100,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.current_device": 0,
        "torch.cuda.device_count": 1,
        "torch.cuda.is_available": True,
        "torch.cuda.synchronize": None,
        "torch.cuda._lazy_init": None,
        "torch._subclasses.fake_tensor.init_gpu_context": None,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
        # cuDNN keeps channels last; without a GPU, torch would assume contiguous results.
        "torch._C._conv_determine_backend_memory_format": torch.channels_last,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("torch") and callable(vars(module).get("has_triton")):
            answers[f"{name}.has_triton"] = True
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, lambda *_, answer=answer, **__: answer, create=True))
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(_Driver())
        stack.callback(setattr, triton.runtime.driver, "_active", before)
        yield
