"""A training loop with accelerate. `accelerate launch` is not needed: accelerate reads torchrun's variables."""

import torch
from accelerate import Accelerator


def main():
    """Train a linear model for ten steps."""
    accelerator = Accelerator()
    data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.print(f"{accelerator.num_processes} processes, {len(loader)} steps, loss {mean:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
