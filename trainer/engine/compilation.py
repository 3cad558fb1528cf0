"""torch.compile of the network and its loss: whether it pays, in which mode, and eager mode if it fails."""

import gc
import os
import shutil
import time
from collections.abc import Callable

import torch

from trainer.config import DEFAULT_STRATEGY, Settings, traits_of
from trainer.data.batch import Targets
from trainer.distributed import comm
from trainer.engine.memory import OUT_OF_MEMORY, is_out_of_memory
from trainer.engine.meter import LossMeter
from trainer.errors import TrainerError
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.strategies.strategy import Strategy

PAYS_FROM = 2000  # steps of a run
GRAPHS = "reduce-overhead"  # torch's mode that replays a pass as CUDA graphs
MODES = {"on": "default", "graphs": GRAPHS}
CALLS = {"default": 1, GRAPHS: 3}  # until everything is compiled, warmed up and captured


def choose_mode(
    settings: Settings, device: torch.device, ranks: int, steps: int, *, can_compile: bool = True
) -> tuple[str, str]:
    """Return torch's mode for --compile, "" for eager mode, and a line for the log, "" without one.

    `steps` are those of the whole run, `can_compile` is whether the loss can be compiled. Raise TrainerError if the
    settings ask for what cannot be compiled.
    """
    s = settings
    obstacle, hint = _obstacle(s, ranks)
    if not can_compile:
        obstacle = "the shapes in this detector's loss depend on the labels"
        hint = "leave --compile out"
    if s.compile in MODES:
        if obstacle:
            raise TrainerError(f"--compile {s.compile}: {obstacle}", hint)
        note = "--compile graphs: without CUDA graphs, which need a GPU" if device.type == "cpu" else ""
        return MODES[s.compile], note if s.compile == "graphs" else ""
    if s.compile == "off" or device.type != "cuda":
        return "", ""
    if not obstacle and steps < PAYS_FROM:
        obstacle = (
            f"a run of {steps} steps does not repay a minute of compilation; --compile graphs compiles anyway"
        )
    return ("", f"network and loss are not compiled: {obstacle}") if obstacle else (GRAPHS, "")


def _obstacle(s: Settings, ranks: int) -> tuple[str, str]:
    """Return what prevents compilation, and a hint; "" if nothing does."""
    if not traits_of(s.parallel).can_compile:
        hint = f"leave --compile out, or use --parallel {DEFAULT_STRATEGY}"
        return f"--parallel {s.parallel} cannot be compiled", hint
    if s.sync_bn and ranks > 1:
        return "with --sync-bn the ranks communicate within the network", "leave one of the two out"
    if (s.multi_scale or s.rect) and s.compile != "on":
        option = "--multi-scale" if s.multi_scale else "--rect"
        return f"{option} has many image shapes, and each needs its own graphs", "use --compile on"
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        return "this machine has no C++ compiler", "install g++, or use --compile off"
    return "", ""


class Compilation:
    """Compiles network and loss on the first batch of each size."""

    def __init__(self, mode: str, settings: Settings, say: Callable[[str], None]) -> None:
        """Compile in torch's `mode`; "" compiles nothing."""
        self.mode = mode
        self._settings = settings
        self._say = say
        self._many_shapes = settings.multi_scale or settings.rect
        self._done: set[int] = set()  # numbers of images of a step on all ranks

    def is_due(self, size: int) -> bool:
        """Return whether a step with `size` images on all ranks has to be compiled first; the same on all ranks."""
        return bool(self.mode) and size not in self._done and not (self._many_shapes and self._done)

    def run(
        self,
        whole: NetworkWithLoss,
        meter: LossMeter,
        strategy: Strategy,
        images: torch.Tensor,
        targets: Targets,
        size: int,
    ) -> None:
        """Compile for the shapes of a batch, without training on it. A collective.

        If that fails with --compile auto, the run continues in eager mode, and a line says why. Otherwise raise
        TrainerError. An error of the compiler on one rank counts for all.
        """
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
        self._say(
            f"compiling network and loss for steps of {size} images: a minute or more, unless {folder} has them"
        )
        if not self._done:
            # Without `dynamic=False`, the second size of the batches would make all kernels dynamic.
            whole.compile_with(self.mode, None if self._many_shapes else False, images.device)
            meter.compile()
        self._done.add(size)
        begin = time.monotonic()
        buffers = [buffer.clone() for buffer in whole.buffers()]
        accumulated = [(p, p.grad.clone()) for p in whole.parameters() if p.grad is not None]
        problem = ""
        for _ in range(CALLS[self.mode]):
            _remove_gradients(whole)  # a graph overwrites those of the call before
            problem = problem or self._try(whole, meter, strategy, images, targets)
        _remove_gradients(whole)
        for parameter, gradient in accumulated:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        for buffer, value in zip(whole.buffers(), buffers, strict=True):
            buffer.copy_(value)
        if problem and self._settings.compile != "auto":
            hint = "use --compile off" + (", or a smaller --batch" if OUT_OF_MEMORY in problem else "")
            raise TrainerError(f"--compile {self._settings.compile}: {problem}", hint)
        if problem:
            self.mode = ""
            whole.run_eagerly()
            meter.run_eagerly()
            strategy.refresh()
            _free_graphs(images.device)
            self._say(f"eager mode, because compilation failed: {problem}")
        else:
            self._say(f"compiled in {time.monotonic() - begin:.0f} s")

    def _try(
        self,
        whole: NetworkWithLoss,
        meter: LossMeter,
        strategy: Strategy,
        images: torch.Tensor,
        targets: Targets,
    ) -> str:
        """Run forward and backward once; return the compiler's error on any rank, "" without one."""
        problem = ""
        loss = images
        try:
            _, loss = whole.loss(*strategy.forward(images, targets))
            if not comm.is_distributed():
                loss.backward()  # type: ignore[no-untyped-call]
            meter.try_out()
        except Exception as error:  # a compiler can raise anything
            problem = f"{type(error).__name__}: {_first_line(error)}"
            if isinstance(error, (RuntimeError, MemoryError)) and is_out_of_memory(error):
                problem = f"{OUT_OF_MEMORY}, of which graphs need more than eager mode"
        problem = next(
            filter(None, comm.all_gather(problem)), ""
        )  # before the collectives of the backward pass
        if not problem and comm.is_distributed():
            loss.backward()  # type: ignore[no-untyped-call]
        return problem

    def forget(self) -> None:
        """Compile again, because other parameters are trained from now on."""
        self._done.clear()


def _free_graphs(device: torch.device) -> None:
    """Free the memory of the graphs, which eager mode may need."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _remove_gradients(whole: NetworkWithLoss) -> None:
    for parameter in whole.parameters():
        if parameter.grad is not None and comm.is_distributed():  # a view of DDP's buckets
            parameter.grad.zero_()
        else:
            parameter.grad = None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
