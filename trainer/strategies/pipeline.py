"""--parallel pipeline: stages of one model, run by torch.distributed.pipelining."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from trainer.config import Settings
from trainer.data.batch import Targets
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.strategies import cut
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.strategies.strategy import Conditions, LossOf, Strategy
from trainer.strategies.sync_batch_norm import synchronise

MICRO_BATCHES = 4
MIN_TORCH = (2, 14)  # older versions change batch norm's statistics during shape inference


class StagePart(nn.Module):
    """A stage's part of the model, with inputs and outputs that torch.distributed.pipelining can send.

    All micro-batches of a schedule have one shape, so tensors are padded to `most` images. gloo sends only
    contiguous tensors, so feature maps (b, c, h, w) are sent as (b, h, w, c), the network's memory format.
    """

    def __init__(self, part: nn.Module, most: int, is_last: bool, autocast: Callable[[], Any]) -> None:
        super().__init__()
        self.part = part
        self.most = most
        self.is_last = is_last
        self.autocast = autocast
        self.output_spec: Any = None  # pytree of the model's outputs, on the last stage

    def forward(self, *received: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        """Compute the next stage's inputs; on the last stage, the tensors of the model's outputs."""
        values = [v[: len(images)] for v in received]
        with self.autocast():
            made = self.part(images, *(v.permute(0, 3, 1, 2) if v.dim() == 4 else v for v in values))
        if self.is_last:
            outputs, self.output_spec = tree_flatten(made)
            return tuple(outputs)
        maps = (t.permute(0, 2, 3, 1) if t.dim() == 4 else t for t in made)
        missing = self.most - len(images)
        padded = (torch.cat((t, t.new_zeros(missing, *t.shape[1:]))) if missing else t for t in maps)
        return tuple(t.contiguous() for t in padded)


class JointGPipe:
    """A GPipe schedule (Huang et al. 2019) with one loss over all micro-batches.

    A detector's loss divides by sums over all outputs, so it is computed after the last micro-batch's forward pass.
    """

    def __init__(
        self,
        part: StagePart,
        stage: int,
        stages: int,
        number: int,
        device: torch.device,
        group: comm.Group | None,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # slow to import

        self._part = part
        self._number = number
        self._is_probed = False
        self._made: list[list[Tensor]] = []  # outputs of each micro-batch
        self._gradients: list[Tensor] = []  # of each output, for the whole batch
        placed = PipelineStage(part, stage, stages, device, group=group)
        self._schedule = ScheduleGPipe(placed, number, loss_fn=self._loss, scale_grads=False)

    def step(self, parts: Sequence[Tensor], loss_of_outputs: Callable[[Any], Tensor]) -> None:
        """Compute the gradients of one batch from its micro-batches."""
        self._loss_of_outputs = loss_of_outputs
        target = torch.zeros((), device=parts[0].device)  # torch requires one
        self._schedule.step(
            kwarg_mbs=[{"images": part} for part in parts],
            target_mbs=[target] * self._number,
            return_outputs=False,
        )
        self._made = []
        self._gradients = []

    def _loss(self, outputs: Any, _: Tensor) -> Tensor:
        """Return a value whose backward pass starts from the gradients of the joint loss."""
        made = tree_leaves(outputs)
        if self._is_probed:
            k = len(self._made)
            for j, output in enumerate(made):
                if output.requires_grad:
                    output.register_hook(lambda _, k=k, j=j: self._gradients[j][k :: self._number])
            self._made.append(made)
            if len(self._made) == self._number:
                self._differentiate()
        self._is_probed = True  # torch's first call infers shapes from dummy values
        return torch.stack([t.float().sum() for t in made]).sum()

    def _differentiate(self) -> None:
        """Compute the joint loss of the outputs in the order of the whole batch, and its gradients."""
        whole = []
        for parts in zip(*self._made, strict=True):
            joined = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
            for k, part in enumerate(parts):
                joined[k :: self._number] = part.detach()
            whole.append(joined.requires_grad_())
        self._loss_of_outputs(tree_unflatten(whole, self._part.output_spec)).backward()  # type: ignore[no-untyped-call]
        self._gradients = [_gradient(t) for t in whole]


class Pipeline(Strategy):
    """Pipelines of neighbouring ranks; several pipelines are replicas that share each batch."""

    def __init__(self, settings: Settings, world: comm.World, device: torch.device) -> None:
        self.stages = settings.stages or world.size
        if world.size % self.stages:
            fits = [str(n) for n in range(1, world.size + 1) if not world.size % n]
            raise TrainerError(
                f"--stages {self.stages}: the number of ranks, {world.size}, is not a multiple of it",
                f"use --stages {' or '.join(fits[1:] or fits)}"
                + (", or more --ranks" if world.size == 1 else ""),
            )
        if tuple(map(int, torch.__version__.split(".")[:2])) < MIN_TORCH:
            raise TrainerError(
                f"--parallel pipeline needs torch 2.14 or newer, but this is torch {torch.__version__}",
                "use ddp",
            )
        super().__init__(settings, world, device)
        self.share = world.rank // self.stages, world.size // self.stages
        self._first_rank = world.rank - world.rank % self.stages
        self._stage = world.rank % self.stages
        self.computes_loss = self._stage == self.stages - 1
        self._schedules: dict[torch.Size, JointGPipe] = {}

    def setup(self, whole: NetworkWithLoss, average: nn.Module, conditions: Conditions) -> None:
        """Split the model by the times of its operations on rank 0, and keep this stage's part."""
        self._conditions = conditions
        self._whole = whole
        model = whole.network
        self.micro_batches = self._settings.micro_batches or min(MICRO_BATCHES, conditions.min_share)
        images = conditions.min_share // self.micro_batches
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        # A single value per channel has no variance.
        single = images == 1 and self._settings.imgsz // conditions.stride == 1
        if images < 1 or (single and normalises):
            raise TrainerError(
                f"--micro-batches {self.micro_batches}: too many for a pipeline's share of a step, "
                f"{conditions.min_share} images",
                f"use --micro-batches {max(1, conditions.min_share // 2)}, or a larger --batch",
            )
        self._parameters = [name for name, _ in model.named_parameters()]
        if not torch_dist.is_initialized():  # PipelineStage needs a group, also with one rank
            torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        replicas = self.share[1]
        stages = self.stages
        mesh = init_device_mesh(self._device.type, (replicas, stages), mesh_dim_names=("replicas", "stages"))
        self.replica_group = mesh.get_group("replicas")
        self._pipeline = mesh.get_group("stages")

        graph = cut.trace(model)
        found = None
        error = None
        if comm.is_rank_zero():
            try:
                found = self._cuts(model, graph)
            except TrainerError as failure:
                error = failure
        comm.raise_on_all_ranks(error)
        cuts, shares = comm.broadcast(found)
        self.summary = (
            f"pipeline: {stages} stages with {', '.join(f'{share:.0%}' for share in shares)} of the time, "
            f"{self.micro_batches} micro-batches" + (f", {replicas} replicas" if replicas > 1 else "")
        )
        start, stop = cuts[self._stage : self._stage + 2]
        self.module = copy.deepcopy(cut.part(model, graph, start, stop))
        self.average = copy.deepcopy(cut.part(average, graph, start, stop)).eval()
        own = set(self.module.state_dict())
        used = {name for names in comm.all_gather(own) for name in names}
        most = -(-self._settings.batch // (replicas * self.micro_batches))
        self._part = StagePart(self.module, most, self.computes_loss, whole.autocast)
        self.unused = {name: tensor for name, tensor in model.state_dict().items() if name not in used}
        if replicas > 1 and self._settings.sync_bn:
            synchronise(self.module, self._device, self.replica_group)
        self.host_model = average.to("cpu")
        model.to("cpu")
        self.refresh()

    def _cuts(self, model: nn.Module, graph: Any) -> tuple[list[int], list[float]]:
        """Return the positions of the cuts, and each stage's share of the time."""
        count = max(1, self._settings.batch // self.share[1] // self.micro_batches)
        side = max(self._settings.imgsz, self._conditions.min_side)
        images = torch.rand(max(2, count), 3, side, side, device=self._device)
        images = images.to(next(model.parameters()).dtype, memory_format=torch.channels_last)
        with self._whole.autocast():
            seconds, sent = cut.measure(copy.deepcopy(model), graph, images)
        cuts = cut.split(seconds, sent, self.stages)
        for start, stop in itertools.pairwise(cuts):
            if not any(p.requires_grad for p in cut.part(model, graph, start, stop).parameters()):
                frozen = " (all of its layers are frozen)" if self._settings.freeze else ""
                raise TrainerError(
                    f"--stages {self.stages}: a stage would have no trainable parameters{frozen}",
                    f"use --stages {self.stages // 2}" if self.stages > 2 else "use --parallel ddp",
                )
        return cuts, [sum(seconds[start:stop]) / sum(seconds) for start, stop in itertools.pairwise(cuts)]

    def refresh(self) -> None:
        """Discard the schedules: torch infers only once which values need gradients."""
        self._schedules.clear()

    def schedule(self, images: Tensor, targets: Targets, loss_of: LossOf, *, sync: bool) -> None:
        """Run GPipe over M micro-batches; the k-th has the images k, k + M, k + 2M, ..."""
        images = self._whole.inputs(images)
        number = self.micro_batches
        shape = images.shape[2:]
        if shape not in self._schedules:
            self._schedules[shape] = JointGPipe(
                self._part, self._stage, self.stages, number, self._device, self._pipeline
            )
        dtype = _dtype(self.module)
        layout = torch.channels_last
        parts = [images[k::number].to(dtype, memory_format=layout) for k in range(number)]

        def loss_of_outputs(outputs: Any) -> Tensor:
            return loss_of(*self._whole.sums(outputs, targets, images))

        self._schedules[shape].step(parts, loss_of_outputs)  # torch asks for the loss between the passes
        if sync and self.share[1] > 1:
            self._sum_gradients()

    def _sum_gradients(self) -> None:
        """Sum the gradients over the replicas of this stage."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.grad = _gradient(parameter)
        flat = torch.cat([_gradient(p).flatten() for p in trainable])
        sent = flat.bfloat16() if self._settings.grad_compress == "bf16" else flat
        torch_dist.all_reduce(sent, group=self.replica_group)
        parts = torch.split(sent.to(flat.dtype), [p.numel() for p in trainable])
        for parameter, summed in zip(trainable, parts, strict=True):
            # In place: a fused optimizer needs the gradient in the weight's memory format.
            _gradient(parameter).copy_(summed.view_as(parameter))

    def clip(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        most: float,
    ) -> Tensor:
        """Clip by the norm over the stages. If one stage overflows, all stages skip the step."""
        gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        if scaler.is_enabled():
            finite = torch.stack([g.isfinite().all() for g in gradients.values()]).all()
            overflow = (~finite).float()
            scaler.scale(overflow)  # initializes the scaler: only the last stage has a loss
            comm.wait(comm.start_sum(overflow, self._pipeline))
            some = next(iter(gradients.values()))
            some.copy_(torch.where(overflow > 0, math.inf, some))
        scaler.unscale_(optimizer)
        norms = torch.zeros(len(self._parameters), dtype=_dtype(self.module), device=self._device)
        for name, norm in zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True):
            norms[self._parameters.index(name)] = norm
        comm.wait(comm.start_sum(norms, self._pipeline))
        total: Tensor = torch.linalg.vector_norm(norms)
        nn.utils.clip_grads_with_norm_(parameters, most, total)
        return total

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Broadcast every stage's tensors within its pipeline, into the host's memory."""
        mine = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if self.stages == 1:
            return dict(tensors)
        metadata: list[Any] = [None] * self.stages
        torch_dist.all_gather_object(metadata, mine, self._pipeline)
        found: dict[str, Tensor] = {}
        for stage, named in enumerate(metadata):
            for name, (shape, dtype) in named.items():
                own = stage == self._stage
                tensor = (
                    tensors[name].detach().contiguous()
                    if own
                    else torch.empty(shape, dtype=dtype).to(self._device)
                )
                torch_dist.broadcast(tensor, self._first_rank + stage, self._pipeline)
                found[name] = tensor.cpu()
        return found


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
