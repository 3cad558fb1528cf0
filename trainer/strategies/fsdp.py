"""--parallel fsdp: weights, gradients and optimizer state in shards of the ranks, by fully_shard."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.config import Settings
from trainer.data.batch import Targets
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.strategies.network_with_loss import NetworkWithLoss
from trainer.strategies.strategy import Conditions, Strategy
from trainer.strategies.sync_batch_norm import synchronise


class Fsdp(Strategy):
    """fully_shard (FSDP2): shards of the weights, gradients, optimizer state and averaged model.

    Each block is gathered for its forward and backward pass and freed after it. Gradients are reduced into
    shards in every step, also in steps that do not update the weights.
    """

    def __init__(self, settings: Settings, world: comm.World, device: torch.device) -> None:
        if world.size == 1:
            raise TrainerError(
                "--parallel fsdp needs two or more ranks, but this is a single process",
                "add --ranks 2 or more (one for each GPU: --device 0,1), or leave --parallel out",
            )
        super().__init__(settings, world, device)
        self._rank, self._size = self.share

    def setup(self, whole: NetworkWithLoss, average: nn.Module, conditions: Conditions) -> None:
        """Keep this rank's shard of every tensor."""
        self._whole = whole
        model = whole.network
        self.host_model = copy.deepcopy(average).to("cpu")
        if self._settings.sync_bn:
            synchronise(model, self._device)
        # fully_shard warns of in-place changes if the head returns a view. The trainer makes none.
        warnings.filterwarnings("ignore", message=".*returned a view tensor", module="torch.distributed.fsdp")
        mesh = init_device_mesh(self._device.type, (self._size,))
        sent = torch.bfloat16 if self._settings.grad_compress == "bf16" else None
        for module in (model, average):
            module.to(memory_format=torch.contiguous_format)
            for block in (*blocks(module), module):
                sharded = fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=sent))
                # Sum instead of scaling the loss by the world size, which could overflow in fp16.
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
        self.module = model
        self.average = average
        self.summary = (
            f"fsdp: {len(list(blocks(model)))} blocks and the rest of the model, in {self._size} shards each"
        )

    def forward(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return the sums and counts of this rank's share; the backward pass always sums the gradients."""
        sums, counts = self._whole(images, targets)
        return sums, counts

    def clip(
        self, scaler: GradScaler, optimizer: Optimizer, parameters: Sequence[Tensor], most: float
    ) -> Tensor:
        """Clip by the norm over the shards of all ranks."""
        norm = super().clip(scaler, optimizer, parameters, most)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather one tensor at a time into the host's memory."""
        return {name: full_tensor(tensor).detach().cpu() for name, tensor in tensors.items()}

    def scatter_(self, own: Tensor, full: Tensor) -> None:
        """Copy this rank's rows."""
        if isinstance(own, DTensor):
            rows = full.chunk(self._size)
            own = own.to_local()
            full = rows[self._rank] if self._rank < len(rows) else full[:0]
        own.copy_(full)


LISTS = (nn.Sequential, nn.ModuleList)


def blocks(module: nn.Module, in_list: bool = False) -> Iterator[nn.Module]:
    """Yield the modules to shard: the members of the model's outermost lists of layers."""
    for child in module.children():
        if type(child) in LISTS:
            yield from blocks(child, in_list=True)
        elif not in_list:
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


@torch.no_grad()
def full_tensor(shards: Tensor) -> Tensor:
    """Return all rows of a DTensor that is sharded by rows, on every rank; any other tensor unchanged.

    DTensor.full_tensor() crashes sometimes with gloo ("malloc(): unaligned fastbin chunk detected", SIGSEGV). Gloo's
    threads store the name of their last collective without a lock. Names over 15 characters are on the heap, and
    may be freed twice: ALLGATHER_COALESCED is one. This function uses a collective with a shorter name.
    """
    if not isinstance(shards, DTensor):
        return shards
    own = shards.to_local()
    group = shards.device_mesh.get_group()
    count = shards.device_mesh.size()
    length = shards.shape[0]
    share = -(-length // count)  # rows per rank, as Tensor.chunk splits them; the last ranks have fewer
    padded = own.new_zeros(share, *shards.shape[1:])
    padded[: len(own)] = own
    full = own.new_empty(share * count, *shards.shape[1:])
    torch_dist.all_gather_into_tensor(full, padded, group)
    return full[:length].clone()  # torch.save would write a view with its padding
