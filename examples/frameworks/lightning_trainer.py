"""Lightning Trainer. Devices and nodes come from torchrun's variables."""

import os

import lightning
import torch


class Regression(lightning.LightningModule):
    """A linear model."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    """Train for ten steps."""
    data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    trainer = lightning.Trainer(
        max_steps=10,
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=8))
    environment = type(trainer.strategy.cluster_environment).__name__
    print(f"rank {trainer.global_rank} of {trainer.world_size}: step {trainer.global_step}, {environment}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
