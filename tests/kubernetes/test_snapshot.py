"""A program with a snapshot of its own in its working directory, as PyTorch's tutorial on DDP has it, loses a pod."""

import re

import pytest
import torch

from tests.conftest import wait_until
from tests.kubernetes.test_cli import clusterctl  # noqa: F401 (a fixture)

pytestmark = pytest.mark.kubernetes

#: Trains a line with DDP. Rank 0 writes the snapshot, and all ranks load it at their start.
PROGRAM = '''
"""Train for some epochs: train.py EPOCHS SNAPSHOT_EVERY."""

import os
import sys
import time

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SNAPSHOT = "snapshot.pt"


class Trainer:
    """A model that resumes from its snapshot."""

    def __init__(self, data, rank):
        self.rank, self.first_epoch = rank, 0
        network = torch.nn.Linear(20, 1)
        if os.path.exists(SNAPSHOT):
            snapshot = torch.load(SNAPSHOT, weights_only=True)
            network.load_state_dict(snapshot["model"])
            self.first_epoch = snapshot["epochs"]
            print("resuming after epoch", self.first_epoch, flush=True)
        self.model = DistributedDataParallel(network)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

    def save(self, epochs):
        torch.save({"model": self.model.module.state_dict(), "epochs": epochs}, SNAPSHOT + ".new")
        os.replace(SNAPSHOT + ".new", SNAPSHOT)

    def train(self, epochs, save_every):
        for epoch in range(self.first_epoch, epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, wanted in self.loader:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(inputs), wanted).backward()
                self.optimizer.step()
            time.sleep(0.3)
            print("rank", self.rank, "ended epoch", epoch + 1, flush=True)
            if self.rank == 0 and (epoch + 1) % save_every == 0:
                self.save(epoch + 1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(512, 20)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    Trainer(data, dist.get_rank()).train(int(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
FOLDER = "my first network"


def test_a_snapshot_in_the_working_directory_survives_the_loss_of_a_pod(clusterctl, kubectl, tmp_path):  # noqa: F811
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "train.py").write_text(PROGRAM)
    text = "backend: kubernetes\ndevice: cpu\nkubernetes:\n  namespace: ada\n  runs: {claim: runs}\n"
    (tmp_path / "cluster.yaml").write_text(text)
    words = ("--nodes", "2", "--gpus", "2", "--name", "cli", "--max-restarts", "2", "--detach")
    code, text = clusterctl("launch", *words, "--workdir", FOLDER, "--command", "train.py 60 2")
    assert code == 0, text
    assert wait_until(lambda: "ended epoch 6" in clusterctl("logs", "cli")[1], timeout_s=120)
    kubectl("delete", "pod", "cli-a1-0", "--namespace", "ada", "--wait=false")
    code, text = clusterctl("attach", "cli")
    assert code == 0, text
    assert "its pod was deleted" in (tmp_path / "runs/cli/supervisor.log").read_text()
    resumed = [
        int(epoch) for epoch in re.findall(r"resuming after epoch (\d+)", clusterctl("logs", "cli")[1])
    ]
    assert len(resumed) == 4  # each rank
    assert len(set(resumed)) == 1
    assert resumed[0] >= 4
    snapshot = torch.load(tmp_path / "runs/cli/workdir/snapshot.pt", weights_only=True)
    assert snapshot["epochs"] == 60
    assert {path.name for path in (tmp_path / "runs/cli/workdir").iterdir()} == {"snapshot.pt"}
