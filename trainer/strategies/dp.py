"""--parallel dp: one process that computes with all GPUs, by DataParallel."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import Settings
from trainer.data.batch import Targets
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.strategies.ddp import Ddp
from trainer.strategies.network_with_loss import NetworkWithLoss


class Dp(Ddp):
    """DataParallel: every step copies the model to all GPUs and gathers the outputs on the first."""

    def __init__(self, settings: Settings, world: comm.World, device: torch.device) -> None:
        if world.size > 1:
            raise TrainerError(
                f"--parallel dp needs a single process, but WORLD_SIZE is {world.size}",
                "start it without torchrun and --ranks, or use --parallel ddp",
            )
        super().__init__(settings, world, device)
        self._gpus = comm.gpu_numbers(settings.device) if device.type == "cuda" else []
        self.devices = [torch.device("cuda", gpu) for gpu in self._gpus] or [device]
        self.summary = (
            f"DataParallel over {len(self._gpus)} GPUs; --parallel ddp with a process per GPU is faster"
        )
        if len(self._gpus) < 2:
            self.summary = f"--parallel dp: training on {device} only; to use several GPUs: --device 0,1"

    def refresh(self) -> None:
        """Wrap the network again."""
        self._outputs: nn.Module = Outputs(self._whole)
        if len(self._gpus) > 1:
            self._outputs = nn.DataParallel(self._outputs, device_ids=self._gpus)

    def forward(self, images: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Run the network on all GPUs, and the criterion on the first."""
        return self._whole.sums(self._outputs(images), targets, images)


class Outputs(nn.Module):
    """The network of a NetworkWithLoss as a module that DataParallel can copy to several GPUs."""

    def __init__(self, whole: NetworkWithLoss) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, images: Tensor) -> Any:
        """Return the network's outputs; each GPU's thread needs the context of the precision."""
        return self.whole.outputs(images, {})
