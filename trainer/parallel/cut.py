"""Where a model is cut into stages: its operations in order, what each costs, and the parts that result."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from trainer.errors import TrainerError
from trainer.parallel.mode import tensors

NEAR = 1.05  # a stage that takes this much longer than the best split's slowest is as good, if less is sent


class _Tracer(fx.Tracer):
    """Follows a model down to torch's own layers and torchvision's operations."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module counts as one operation."""
        return m.__module__.startswith(("torch.nn", "torchvision.ops")) and not isinstance(m, nn.Sequential)


def trace(model: nn.Module) -> fx.Graph:
    """The model's operations in the order in which they run, none of which changes its input in place.

    A stage's input is another stage's output, and must not be written to. Raises TrainerError for a model whose
    course depends on the pictures, or that runs a layer twice.
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # whatever the model's code raises when it meets a stand-in for a tensor
        raise TrainerError(
            f"--parallel pipeline: {type(model).__name__} cannot be cut into stages: {str(error).splitlines()[0]}",
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
    twice = next(
        (name for name in called if called.count(name) > 1 and list(model.get_submodule(name).parameters())), ""
    )
    if twice:
        raise TrainerError(
            f"--parallel pipeline: the layer {twice} runs twice, and can be in one stage only",
            "use --parallel fsdp for a model that does not fit",
        )
    return graph


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "output"]


def crossing(graph: fx.Graph, position: int) -> list[fx.Node]:
    """What operations before `position` made and those from it on need, the outputs included."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    return [n for n in _operations(graph)[:position] if any(place[user] >= position for user in n.users)]


def part(model: nn.Module, graph: fx.Graph, start: int, stop: int) -> fx.GraphModule:
    """The operations `start` to `stop` as a module, that keeps the model's layers under their names there.

    It takes what crosses `start` and returns what crosses `stop`, as a tuple; the last part, what the model does.
    """
    own, kept = fx.Graph(), dict[fx.Node, fx.Node]()
    operations = _operations(graph)
    for node in crossing(graph, start):
        kept[node] = own.placeholder(node.name)
    for node in operations[start:stop]:
        kept[node] = own.node_copy(node, lambda n: kept[n])
    if stop == len(operations):
        (output,) = (node for node in graph.nodes if node.op == "output")
        own.output(fx.map_arg(output.args[0], lambda n: kept[n]))
    else:
        own.output(tuple(kept[node] for node in crossing(graph, stop)))
    return fx.GraphModule(model, own)


class _Stopwatch(fx.Interpreter):
    """Runs each operation forward and backward by itself, and notes its time and the bytes of its result."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The operation's result, on which nothing before it depends."""
        with torch.enable_grad():
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            given = fx.node.map_aggregate((args, kwargs), _leaf)
            begin = self._now()
            result = getattr(self, n.op)(n.target, *given)
            made = [t for t in _made(result) if t.requires_grad]
            if made and n.op != "placeholder" and n.op != "get_attr" and n.op != "output":
                torch.autograd.backward(made, [torch.ones_like(t) for t in made])
            self.seconds[n.name] = self._now() - begin
        self.bytes[n.name] = sum(t.numel() * t.element_size() for t in _made(result))
        return fx.node.map_aggregate(result, lambda t: t.detach() if isinstance(t, Tensor) else t)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _made(value: Any) -> list[Tensor]:
    return tensors(value) if isinstance(value, (Tensor, tuple, list, dict)) and _plain(value) else []


def _plain(value: Any) -> bool:
    """Whether there is nothing but tensors in it; a shape is numbers."""
    if isinstance(value, (tuple, list, dict)):
        return all(_plain(v) for v in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def measure(model: nn.Module, graph: fx.Graph, images: Tensor) -> tuple[list[float], list[int]]:
    """Seconds of each operation, forward and backward, and bytes that cross each position, from 0 to the end.

    The second of two runs counts. The model's gradients and running statistics are not those of a training after it.
    """
    watch = _Stopwatch(fx.GraphModule(model, graph), images.device)
    model.train()
    for _ in range(2):
        watch.run(images)
    operations = _operations(graph)
    seconds = [watch.seconds[node.name] for node in operations]
    sent = [sum(watch.bytes[n.name] for n in crossing(graph, k)) for k in range(len(operations) + 1)]
    return seconds, sent


def split(seconds: Sequence[float], sent: Sequence[int], stages: int) -> list[int]:
    """Positions [0, ..., len(seconds)] that cut the operations into `stages` of equal time, as far as that goes.

    The slowest stage takes at most NEAR times what it takes in the best split; of such splits, the one that sends
    the fewest bytes.
    """
    count = len(seconds)
    before = np.concatenate(([0.0], np.cumsum(seconds)))
    slowest = np.full(count + 1, np.inf)
    slowest[0] = 0.0
    for _ in range(stages):
        slowest = np.array(
            [min(np.maximum(slowest[:j], before[j] - before[:j]), default=np.inf) for j in range(count + 1)]
        )
    limit = slowest[count] * NEAR
    fewest = np.full(count + 1, np.inf)
    fewest[0] = 0.0
    chosen = []
    for _ in range(stages):
        fits = before[None, :] - before[:, None] <= limit  # (from, to)
        cost = np.where(fits & np.tri(count + 1, k=-1, dtype=bool).T, fewest[:, None], np.inf) + np.array(sent)[None, :]
        chosen.append(cost.argmin(0))
        fewest = cost.min(0)
    cuts = [count]
    for froms in reversed(chosen):
        cuts.append(int(froms[cuts[-1]]))
    return cuts[::-1]
