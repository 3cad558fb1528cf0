"""--parallel pipeline: the model's operations are dealt out to ranks, and micro-batches pass from one to the next.

Every step is GPipe's (Huang et al. 2019): all micro-batches forward, the loss of them together, all backward. Sends
and receives are our own, as torch.distributed.pipelining (2.15) wants every micro-batch of a run to have one shape,
and a loss for each before the next one is through; a detector's sides and shares change, and its loss divides by what
all outputs together tell.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from trainer import dist
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.models.sync import synchronise
from trainer.parallel import cut
from trainer.parallel.mode import Conditions, Evaluate, tensors
from trainer.parallel.state import fill, model_state

MICRO_BATCHES = 4
Layout = list[tuple[torch.Size, torch.dtype, bool] | Any]  # of each value that is sent: a tensor's, or what it is


class Pipeline:
    """Neighbouring ranks are the stages of one pipeline; several pipelines are copies that share the pictures."""

    module: nn.Module
    average: nn.Module
    seeing: dist.Group | None

    def __init__(self, settings: Settings, world: dist.World, device: torch.device) -> None:
        self.stages = settings.stages or world.size
        if world.size % self.stages:
            fits = [str(n) for n in range(1, world.size + 1) if not world.size % n]
            raise TrainerError(
                f"--stages {self.stages}: {world.size} ranks are not a whole number of such pipelines",
                f"use --stages {' or '.join(fits[1:] or fits)}" + (", or more --ranks" if world.size == 1 else ""),
            )
        if settings.compile:
            raise TrainerError("--parallel pipeline does not go with --compile", "leave --compile out, or use ddp")
        self._settings, self._device = settings, device
        self.share = world.rank // self.stages, world.size // self.stages
        self._first_rank, self._stage = world.rank - world.rank % self.stages, world.rank % self.stages
        self.sees_outputs = self._stage == self.stages - 1
        self.rest: Mapping[str, Tensor] = {}
        self._layouts: dict[torch.Size, Layout] = {}

    def place(self, model: nn.Module, average: nn.Module, conditions: Conditions) -> None:
        """Cut the model by what its operations cost on rank 0, and keep this stage's."""
        self._conditions = conditions
        self.micro_batches = self._settings.micro_batches or min(MICRO_BATCHES, conditions.least_share)
        pictures = conditions.least_share // self.micro_batches
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        single = pictures == 1 and self._settings.imgsz // conditions.stride == 1  # value of a batch: without variance
        if pictures < 1 or (single and normalises):
            raise TrainerError(
                f"--micro-batches {self.micro_batches}: a pipeline's share of a step can be "
                f"{conditions.least_share} pictures, too few for that many",
                f"use --micro-batches {max(1, conditions.least_share // 2)}, or a larger --batch",
            )
        self._names, self._parameters = list(model.state_dict()), [name for name, _ in model.named_parameters()]
        # Only the ranks of one pipeline, and those of one stage in all of them, have something to say to each other.
        copies, stages = self.share[1], self.stages
        pipelines = [range(first, first + stages) for first in range(0, copies * stages, stages)]
        same = [range(stage, copies * stages, stages) for stage in range(stages)]
        self._pipeline, self._copies = _groups(pipelines)[self.share[0]], _groups(same)[self._stage]
        self.seeing = self._copies

        graph = cut.trace(model)
        found, error = None, None
        if dist.first():
            try:
                found = self._cuts(model, graph)
            except TrainerError as refused:
                error = refused
        dist.agree(error)
        cuts, shares = dist.broadcast(found)
        self.said = (
            f"pipeline: {stages} stages with {', '.join(f'{share:.0%}' for share in shares)} of the time, "
            f"{self.micro_batches} micro-batches" + (f", {copies} times" if copies > 1 else "")
        )
        start, stop = cuts[self._stage : self._stage + 2]
        self.module = copy.deepcopy(cut.part(model, graph, start, stop))
        self.average = copy.deepcopy(cut.part(average, graph, start, stop)).eval()
        own = set(self.module.state_dict())
        everywhere = {name for names in dist.all_gather(own) for name in names}
        self.rest = {name: tensor for name, tensor in model.state_dict().items() if name not in everywhere}
        if copies > 1 and self._settings.sync_bn:
            synchronise(self.module, self._device, self._copies)
        self._empty = average.to("cpu")  # to be filled when a whole model is needed
        model.to("cpu")
        self.refresh()

    def _cuts(self, model: nn.Module, graph: Any) -> tuple[list[int], list[float]]:
        """Where the stages begin and end, and what part of the time each takes."""
        pictures = max(1, self._settings.batch // self.share[1] // self.micro_batches)
        side = max(self._settings.imgsz, self._conditions.least_side)
        images = torch.rand(max(2, pictures), 3, side, side, device=self._device)
        images = images.to(next(model.parameters()).dtype, memory_format=torch.channels_last)
        with self._conditions.autocast():
            seconds, sent = cut.measure(copy.deepcopy(model), graph, images)
        cuts = cut.split(seconds, sent, self.stages)
        for start, stop in itertools.pairwise(cuts):
            if not any(p.requires_grad for p in cut.part(model, graph, start, stop).parameters()):
                frozen = " (all that it has is frozen)" if self._settings.freeze else ""
                raise TrainerError(
                    f"--stages {self.stages}: too many, one would have nothing to learn{frozen}",
                    f"use --stages {self.stages // 2}" if self.stages > 2 else "use --parallel ddp",
                )
        return cuts, [sum(seconds[start:stop]) / sum(seconds) for start, stop in itertools.pairwise(cuts)]

    def refresh(self) -> None:
        """Which values have gradients is to be found out again."""
        self._layouts.clear()

    def step(self, images: Tensor, evaluate: Evaluate, moves: bool) -> None:
        """All micro-batches forward, then backward; the k-th has every M-th picture from the k-th on."""
        number = self.micro_batches
        sending: list[tuple[Any, Tensor]] = []  # under way, with what must not be freed before it has arrived
        given, made = [], []
        with self._conditions.autocast():
            for k in range(number):
                pictures = images[k::number].contiguous(memory_format=torch.channels_last)
                given.append(self._receive(pictures) if self._stage else [pictures.to(_dtype(self.module))])
                made.append(self.module(*given[-1]))
                if not self.sees_outputs:
                    self._send(made[-1], pictures.shape, sending)
        gradients: list[list[Tensor]] = []
        if self.sees_outputs:
            outputs = _interleaved(made)
            evaluate(outputs).backward()  # type: ignore[no-untyped-call]
            gradients = [[_gradient(t)[k::number] for t in tensors(outputs)] for k in range(number)]
        for k in range(number):
            results = [t for t in _tensors(made[k]) if t.requires_grad]
            incoming = (
                gradients[k] if self.sees_outputs else [self._receive_tensor(t, self._stage + 1) for t in results]
            )
            if results:
                torch.autograd.backward(results, incoming)
            made[k] = None
            if self._stage:
                for tensor in _tensors(given[k]):
                    if tensor.requires_grad:
                        self._send_tensor(_gradient(tensor), self._stage - 1, sending)
            given[k] = []
        for work, _ in sending:
            work.wait()
        if moves and self.share[1] > 1:
            self._sum_gradients()

    def _receive(self, pictures: Tensor) -> list[Any]:
        """The values that this micro-batch's part takes, from the stage before."""
        if pictures.shape not in self._layouts:
            box: list[Any] = [None]
            torch_dist.recv_object_list(box, self._first_rank + self._stage - 1, device=self._device)
            self._layouts[pictures.shape] = box[0]
        values: list[Any] = []
        for layout in self._layouts[pictures.shape]:
            if isinstance(layout, tuple) and len(layout) == 3 and isinstance(layout[1], torch.dtype):
                shape, dtype, learns = layout
                like = torch.empty(shape, dtype=dtype, device="meta")
                values.append(self._receive_tensor(like, self._stage - 1).requires_grad_(learns))
            else:
                values.append(layout)
        return values

    def _send(self, values: Sequence[Any], shape: torch.Size, sending: list[tuple[Any, Tensor]]) -> None:
        """Hand a part's result to the next stage; what it consists of is told once for each shape of a micro-batch."""
        if shape not in self._layouts:
            self._layouts[shape] = [(v.shape, v.dtype, v.requires_grad) if isinstance(v, Tensor) else v for v in values]
            torch_dist.send_object_list([self._layouts[shape]], self._first_rank + self._stage + 1, device=self._device)
        for value in values:
            if isinstance(value, Tensor):
                self._send_tensor(value.detach(), self._stage + 1, sending)

    def _send_tensor(self, tensor: Tensor, stage: int, sending: list[tuple[Any, Tensor]]) -> None:
        """Begin to send; maps of pictures travel with their channels last, as the network computes."""
        tensor = (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).contiguous()
        sending.append((torch_dist.isend(tensor, self._first_rank + stage), tensor))

    def _receive_tensor(self, like: Tensor, stage: int) -> Tensor:
        """A tensor of the same shape and type."""
        shape = [like.shape[d] for d in (0, 2, 3, 1)] if like.dim() == 4 else like.shape
        tensor = torch.empty(shape, dtype=like.dtype, device=self._device)
        torch_dist.recv(tensor, self._first_rank + stage)
        return tensor.permute(0, 3, 1, 2) if like.dim() == 4 else tensor

    def _sum_gradients(self) -> None:
        """Sum over the copies of this stage."""
        learning = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in learning:
            parameter.grad = _gradient(parameter)
        flat = torch.cat([_gradient(p).flatten() for p in learning])
        sent = flat.bfloat16() if self._settings.grad_compress == "bf16" else flat
        torch_dist.all_reduce(sent, group=self._copies)
        parts = torch.split(sent.to(flat.dtype), [p.numel() for p in learning])
        for parameter, summed in zip(learning, parts, strict=True):
            # In place, as a fused optimizer wants the gradient to lie in memory as the weight does.
            _gradient(parameter).copy_(summed.view_as(parameter))

    def clip(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], most: float
    ) -> Tensor:
        """The norm over the stages; a stage whose gradients overflowed lets the others leave the step out, too."""
        gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        if scaler.is_enabled():
            finite = torch.stack([g.isfinite().all() for g in gradients.values()]).all()
            broken = (~finite).float()
            scaler.scale(broken)  # it begins to count with the first loss, which the last stage alone has
            dist.wait(dist.start_sum(broken, self._pipeline))
            some = next(iter(gradients.values()))
            some.copy_(torch.where(broken > 0, math.inf, some))
        scaler.unscale_(optimizer)
        norms = torch.zeros(len(self._parameters), dtype=_dtype(self.module), device=self._device)
        for name, norm in zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True):
            norms[self._parameters.index(name)] = norm
        dist.wait(dist.start_sum(norms, self._pipeline))
        whole: Tensor = torch.linalg.vector_norm(norms)
        nn.utils.clip_grads_with_norm_(parameters, most, whole)
        return whole

    def average_(self, tensors: list[Tensor]) -> None:
        """Average over the copies of this stage."""
        dist.average_(tensors, self._copies)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every stage sends its tensors to the other stages of its pipeline, into the host's memory."""
        mine = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if self.stages == 1:
            return dict(tensors)
        everyone: list[Any] = [None] * self.stages
        torch_dist.all_gather_object(everyone, mine, self._pipeline)
        found: dict[str, Tensor] = {}
        for stage, named in enumerate(everyone):
            for name, (shape, dtype) in named.items():
                own = stage == self._stage
                tensor = (
                    tensors[name].detach().contiguous() if own else torch.empty(shape, dtype=dtype).to(self._device)
                )
                torch_dist.broadcast(tensor, self._first_rank + stage, self._pipeline)
                found[name] = tensor.cpu()
        return found

    def take(self, own: Tensor, whole: Tensor) -> None:
        """Copy all of it: a tensor is in one stage."""
        own.copy_(whole)

    def complete(self) -> nn.Module:
        """A copy of the whole average: its weights alone, without gradients or what an optimizer keeps."""
        whole = fill(self._empty, model_state(self, self.average, self._names))
        return copy.deepcopy(whole).to(self._device)


def _groups(listed: Sequence[Sequence[int]]) -> list[dist.Group | None]:
    """A group of ranks for each list, made by all ranks in the same order; a process by itself needs none."""
    if not dist.together():
        return [None] * len(listed)
    return [torch_dist.new_group(list(ranks)) for ranks in listed]  # type: ignore[misc]


def _interleaved(parts: Sequence[Any]) -> Any:
    """The outputs of micro-batches as those of the whole batch, in its order, to be differentiated by."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _interleaved([part[key] for part in parts]) for key in first}
    if not isinstance(first, Tensor):
        return [_interleaved(values) for values in zip(*parts, strict=True)]
    whole = first.new_empty((sum(len(part) for part in parts), *first.shape[1:]))
    for k, part in enumerate(parts):
        whole[k :: len(parts)] = part.detach()
    return whole.requires_grad_()


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among what a part takes or returns, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, (list, tuple)) or hasattr(values, "__iter__"):
        return [t for value in values for t in _tensors(value)]
    return []


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
