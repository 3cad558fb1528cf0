"""A classification loop like torchvision's references: DistributedSampler, DDP, a checkpoint by rank 0."""

import os

import torch
import torch.distributed as dist
import torchvision


def main():
    """Train a small ResNet on generated images for one epoch, and write `checkpoint.pth`."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    data = torchvision.datasets.FakeData(64, (3, 64, 64), 10, torchvision.transforms.ToTensor())
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    model = torchvision.models.resnet18(num_classes=10).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {len(loader)} steps, loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict()}, "checkpoint.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
