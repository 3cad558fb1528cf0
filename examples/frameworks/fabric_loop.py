"""A training loop with Lightning Fabric."""

import os

import lightning
import torch


def main():
    """Train a linear model for ten steps."""
    fabric = lightning.Fabric(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
    )
    fabric.launch()
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=8))
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = fabric.all_reduce(loss.detach()).item()
    fabric.print(f"{fabric.world_size} processes, {len(loader)} steps, loss {mean:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
