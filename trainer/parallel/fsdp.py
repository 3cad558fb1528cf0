"""--parallel fsdp: every rank has a share of the pictures and of each tensor; blocks are put together when they run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer import dist
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.models.sync import synchronise
from trainer.parallel.mode import Conditions, Evaluate
from trainer.parallel.state import fill, model_state


class Fsdp:
    """torch's fully_shard (FSDP2): weights, gradients, the optimizer's state and the average in shards.

    A block is gathered before its forward and its backward pass and let go after each, so that a rank never holds the
    whole model; its gradients are summed into shards at once, also in steps that do not move the weights.
    """

    stages = 1
    sees_outputs = True
    seeing: dist.Group | None = None
    module: nn.Module
    average: nn.Module
    said = ""
    rest: Mapping[str, Tensor] = {}

    def __init__(self, settings: Settings, world: dist.World, device: torch.device) -> None:
        if world.size == 1:
            raise TrainerError(
                "--parallel fsdp: a single process has nobody to share the model with",
                "add --ranks 2 or more (one for each GPU: --device 0,1), or leave --parallel out",
            )
        for option, given in (("--compile", settings.compile), ("--unfreeze", getattr(settings, "unfreeze", 0))):
            if given:
                raise TrainerError(f"--parallel fsdp does not go with {option}", f"leave {option} out, or use ddp")
        self._settings, self._device = settings, device
        self._rank, self._size = self.share = world.rank, world.size

    def place(self, model: nn.Module, average: nn.Module, conditions: Conditions) -> None:
        """Keep this rank's shard of every tensor."""
        self._conditions = conditions
        self._names = list(average.state_dict())
        self._empty = copy.deepcopy(average).to("cpu")  # to be filled when a whole model is needed
        if self._settings.sync_bn:
            synchronise(model, self._device)
        # A head that returns a view makes fully_shard warn of changes in place, of which there are none.
        warnings.filterwarnings("ignore", message=".*returned a view tensor", module="torch.distributed.fsdp")
        mesh = init_device_mesh(self._device.type, (self._size,))
        sent = torch.bfloat16 if self._settings.grad_compress == "bf16" else None
        for module in (model, average):
            module.to(memory_format=torch.contiguous_format)
            for block in (*blocks(module), module):
                sharded = fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=sent))
                # Sums, not means: a loss made larger instead would overflow in fp16 where one device's does not.
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
        self.module, self.average = model, average
        self.said = f"fsdp: {len(list(blocks(model)))} blocks and the rest of the model, in {self._size} shards each"

    def refresh(self) -> None:
        """Never asked for: --unfreeze is refused."""
        raise NotImplementedError

    def step(self, images: Tensor, evaluate: Evaluate, moves: bool) -> None:
        """Forward and backward on this rank's share."""
        with self._conditions.autocast():
            raw = self.module(images)
        evaluate(raw).backward()  # type: ignore[no-untyped-call]

    def clip(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], most: float
    ) -> Tensor:
        """The norm over the shards of all ranks."""
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, most)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def average_(self, tensors: list[Tensor]) -> None:
        """Average over all ranks; batch norm's statistics are not sharded."""
        dist.average_(tensors)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensor after tensor, into the host's memory."""
        return {name: gathered(tensor).detach().cpu() for name, tensor in tensors.items()}

    def take(self, own: Tensor, whole: Tensor) -> None:
        """Copy this rank's rows."""
        if isinstance(own, DTensor):
            rows = whole.chunk(self._size)
            own, whole = own.to_local(), rows[self._rank] if self._rank < len(rows) else whole[:0]
        own.copy_(whole)

    def complete(self) -> nn.Module:
        """A copy of the whole average: its weights alone, without gradients or what an optimizer keeps."""
        whole = fill(self._empty, model_state(self, self.average, self._names))
        return copy.deepcopy(whole).to(self._device)


LISTS = (nn.Sequential, nn.ModuleList)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that are gathered one at a time: the members of its outermost lists of layers."""
    for child in module.children():
        yield from _members(child) if type(child) in LISTS else blocks(child)


def _members(layers: nn.Module) -> Iterator[nn.Module]:
    for member in layers.children():
        if type(member) in LISTS:
            yield from _members(member)
        elif any(True for _ in member.parameters()):
            yield member


@torch.no_grad()
def gathered(shards: Tensor) -> Tensor:
    """All rows of a tensor that is split by rows, on every rank: its full_tensor(), by a collective of another name.

    A tensor that is not split is returned as it is.

    The threads of torch's gloo (2 by default) each write down the name of the work that they have finished, without a
    lock. A name of more than 15 characters lies on the heap and may then be freed twice: full_tensor()'s, which is
    ALLGATHER_COALESCED, ended a training now and then with "malloc(): unaligned fastbin chunk detected" or a SIGSEGV.
    """
    if not isinstance(shards, DTensor):
        return shards
    own, group = shards.to_local(), shards.device_mesh.get_group()
    count, length = shards.device_mesh.size(), shards.shape[0]
    share = -(-length // count)  # rows of every rank but the last ones, as Tensor.chunk deals them
    padded = own.new_zeros(share, *shards.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(share * count, *shards.shape[1:])
    torch_dist.all_gather_into_tensor(whole, padded, group)
    return whole[:length].clone()  # a view would be saved with the padding
