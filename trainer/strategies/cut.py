"""Split of a model into pipeline stages: traced operations, their cost, and the parts."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from trainer.distributed import comm
from trainer.errors import TrainerError

TOLERANCE = 0.02  # of the model's time: allowed distance of a cut from an equal split, to send fewer bytes


class _Tracer(fx.Tracer):
    """Tracer whose leaves are torch's layers and torchvision's operations."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_layer = m.__module__.startswith(("torch.nn", "torchvision.ops")) or isinstance(
            m, (nn.BatchNorm2d, nn.Conv2d)
        )
        return is_layer and not isinstance(m, nn.Sequential)


def trace(model: nn.Module) -> fx.Graph:
    """Return the graph of the model's operations, and turn off their in-place variants.

    A stage's input is another stage's output, so operations must not change it in place. Raises TrainerError
    for a model whose control flow depends on the images, or that runs a layer twice.
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # the model's code can raise anything on a proxy
        raise TrainerError(
            f"--parallel pipeline: {type(model).__name__} cannot be split into stages: {str(error).splitlines()[0]}",
            "use --parallel fsdp for a model that does not fit",
        ) from error
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    for node in graph.nodes:
        if node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
        if node.target is operator.iadd:
            node.target = operator.add
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    twice = next((n for n in called if called.count(n) > 1 and list(model.get_submodule(n).parameters())), "")
    if twice:
        raise TrainerError(
            f"--parallel pipeline: the layer {twice} runs twice, but a layer can be in one stage only",
            "use --parallel fsdp for a model that does not fit",
        )
    return graph


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "output"]


def _is_everywhere(node: fx.Node) -> bool:
    """Whether a value is the images or an attribute of them, such as their shape. Every stage has these."""
    reads = node.op == "call_function" and node.target in (getattr, operator.getitem)
    return node.op == "placeholder" or (reads and all(map(_is_everywhere, node.all_input_nodes)))


def crossing(graph: fx.Graph, position: int) -> list[fx.Node]:
    """Return the values that operations before `position` produce and later ones or the outputs use."""
    index = {node: k for k, node in enumerate(graph.nodes)}
    made = [node for node in _operations(graph)[:position] if not _is_everywhere(node)]
    return [n for n in made if any(index[user] >= position for user in n.users)]


def part(model: nn.Module, graph: fx.Graph, start: int, stop: int) -> fx.GraphModule:
    """Return the operations `start` to `stop` as a module with the model's parameter names.

    Its inputs are the images and the values that cross `start`. It returns a tuple of the values that cross
    `stop`; the last part returns the model's outputs.
    """
    own = fx.Graph()
    kept = dict[fx.Node, fx.Node]()
    operations = _operations(graph)
    for node in operations:
        if node.op == "placeholder":
            kept[node] = own.node_copy(node)
    for node in crossing(graph, start):
        kept[node] = own.placeholder(node.name)
    for k, node in enumerate(operations):
        if node not in kept and (start <= k < stop or _is_everywhere(node)):
            kept[node] = own.node_copy(node, lambda n: kept[n])
    if stop == len(operations):
        (output,) = (node for node in graph.nodes if node.op == "output")
        own.output(fx.map_arg(output.args[0], lambda n: kept[n]))
    else:
        own.output(tuple(kept[node] for node in crossing(graph, stop)))
    return fx.GraphModule(model, own)


class _Profiler(fx.Interpreter):
    """Interpreter that times each operation's forward and backward pass, and records the size of its result."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, float] = {}  # inf if a stage cannot send it

    def run_node(self, n: fx.Node) -> Any:
        with torch.enable_grad():
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            inputs = fx.node.map_aggregate(
                (args, kwargs),
                lambda v: (
                    v.detach().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
                ),
            )
            begin = comm.now(self._device)
            result = getattr(self, n.op)(n.target, *inputs)
            made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            if made and n.op not in ("placeholder", "get_attr", "output"):
                torch.autograd.backward(made, [torch.ones_like(t) for t in made])
            self.seconds[n.name] = comm.now(self._device) - begin
        sendable = (
            n.op != "get_attr"
            and isinstance(result, Tensor)
            and result.is_floating_point()
            and result.dim() > 0
        )
        self.bytes[n.name] = result.numel() * result.element_size() if sendable else math.inf
        return fx.node.map_aggregate(result, lambda t: t.detach() if isinstance(t, Tensor) else t)


def measure(model: nn.Module, graph: fx.Graph, images: Tensor) -> tuple[list[float], list[float]]:
    """Return the seconds of each operation (forward and backward), and the bytes that cross each position.

    The bytes are inf at a position that sizes, parameters or tuples cross, because a stage sends only tensors.
    The second of two runs counts. Changes the model's gradients and running statistics.
    """
    profiler = _Profiler(fx.GraphModule(model, graph), images.device)
    model.train()
    for _ in range(2):
        profiler.run(images)
    operations = _operations(graph)
    seconds = [profiler.seconds[node.name] for node in operations]
    sent = [sum(profiler.bytes[n.name] for n in crossing(graph, k)) for k in range(len(operations))]
    return seconds, [*sent, 0.0]


def split(seconds: Sequence[float], sent: Sequence[float], stages: int) -> list[int]:
    """Return positions [0, ..., len(seconds)] that split the operations into `stages` of about equal time.

    Each cut is the position with the fewest bytes within TOLERANCE of an equal split, else the nearest position that
    a stage can send. Raises TrainerError if the model has too few positions to split at.
    """
    before = np.concatenate(([0.0], np.cumsum(seconds)))  # seconds of the operations before each position
    total = before[-1]
    cuts = [0]
    for stage in range(1, stages):
        distance = np.abs(before - total * stage / stages)
        distance[: cuts[-1] + 1] = distance[-1] = np.inf
        distance[np.isinf(sent)] = np.inf
        near = distance <= max(total * TOLERANCE, distance.min())
        if np.isinf(distance.min()):
            raise TrainerError(
                f"--stages {stages}: too few operations to split", "use fewer --stages, or fsdp"
            )
        cuts.append(int(np.where(near, sent, np.inf).argmin()))
    return [*cuts, len(seconds)]
