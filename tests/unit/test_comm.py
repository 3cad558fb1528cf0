import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.unit.trainer_process import call, ranks
from trainer.distributed import comm
from trainer.distributed.comm import (
    World,
    backend_of,
    gpu_numbers,
    gpu_of,
    pick_device,
    share_of,
    thread_count,
    usable_cores,
    world_of,
)
from trainer.errors import TrainerError

CPU = torch.device("cpu")
WHOLE = ranks(4, nodes=2)[3]  # torchrun's variables of the last rank


def test_torchruns_variables_give_rank_and_world_size() -> None:
    assert world_of({"PATH": "/bin"}) == World(
        rank=0, local_rank=0, size=1, local_size=1, node=0, launched=False
    )
    whole = {**WHOLE, "CLUSTER_WORLD_SIZE": "4"}
    assert world_of(whole) == World(rank=3, local_rank=1, size=4, local_size=2, node=1, launched=True)
    with pytest.raises(TrainerError, match="WORLD_SIZE is 4, but the job has 8 ranks"):
        world_of({**WHOLE, "CLUSTER_WORLD_SIZE": "8"})


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_a_partial_set_of_rank_variables_names_the_missing_ones(missing: str) -> None:
    with pytest.raises(TrainerError) as error:
        world_of({k: v for k, v in WHOLE.items() if k != missing})
    assert f"not {missing}" in error.value.message


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"RANK": "one"}, {"LOCAL_RANK": "2"}])
def test_impossible_ranks_are_errors(change: dict[str, str]) -> None:
    with pytest.raises(TrainerError):
        world_of({**WHOLE, **change})


@pytest.mark.parametrize(
    ("environment", "local", "cores", "expected"),
    [
        ({}, 2, 8, 4),
        ({}, 2, 1, 1),  # at least one
        ({"OMP_NUM_THREADS": "1"}, 2, 8, 4),  # torchrun's own default
        ({"OMP_NUM_THREADS": "3"}, 2, 8, None),
        ({"OMP_NUM_THREADS": "1", "CLUSTER_JOB_ID": "job"}, 2, 8, None),  # --env OMP_NUM_THREADS=1
    ],
)
def test_the_nodes_cores_are_shared(
    environment: dict[str, str], local: int, cores: int, expected: int | None
) -> None:
    world = World(size=local, local_size=local, launched=True)
    cpu = torch.device("cpu")
    assert thread_count(environment, world, cpu, cores) == expected
    assert (
        thread_count({"OMP_NUM_THREADS": "1"}, World(), cpu, 8) is None
    )  # a choice: not started by torchrun
    # Threads on a GPU's host compete with the dataloader workers.
    assert thread_count(environment, world, torch.device("cuda", 0), cores) == 1


@pytest.mark.parametrize(("nodes", "cores"), [("1", 8), ("2", 4), ("16", 1)])
def test_nodes_on_one_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, nodes: str, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: "max 100000")
    monkeypatch.setenv("CLUSTER_NODES_ON_HOST", nodes)
    assert usable_cores() == cores
    assert share_of(World(size=2, local_size=2), torch.device("cuda"), None, 32)["workers"] == cores // 2
    monkeypatch.setenv("CLUSTER_NODES_ON_HOST", "two")
    with pytest.raises(TrainerError, match="CLUSTER_NODES_ON_HOST is 'two', not a number"):
        usable_cores()


def test_devices() -> None:
    for wanted in ("tpu", "0,a", "-1"):
        with pytest.raises(TrainerError):
            pick_device(wanted, World())
    assert pick_device("cpu", World()) == CPU
    if torch.cuda.is_available():
        assert pick_device("", World()) == torch.device("cuda", 0)
        with pytest.raises(TrainerError, match=f"no GPU {torch.cuda.device_count()}"):
            pick_device(str(torch.cuda.device_count()), World())
        many = World(local_rank=64, local_size=65, size=65, launched=True)
        with pytest.raises(TrainerError, match="65 processes"):
            pick_device("cuda", many)
    else:
        assert pick_device("", World()) == CPU
        with pytest.raises(TrainerError, match="no GPU can be used"):
            pick_device("cuda", World())


def test_each_rank_has_its_own_gpu_or_all_ranks_of_the_node_fail() -> None:
    with pytest.raises(TrainerError, match="--device 0,1,0: a GPU is named twice"):
        gpu_numbers("0,1,0")
    for rank in range(4):
        world = World(rank=rank, local_rank=rank, size=4, local_size=4, launched=True)
        assert gpu_of([4, 5, 6, 7], world) == 4 + rank
        with pytest.raises(TrainerError, match="4 processes on this node, but 2 GPUs"):
            gpu_of([0, 1], world)


def test_ranks_share_gpus_over_gloo_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [backend_of({}, device) for device in ("cuda", "cpu")] == ["nccl", "gloo"]
    assert [backend_of({"TRAINER_BACKEND": "gloo"}, device) for device in ("cuda", "cpu")] == ["gloo", "gloo"]
    with pytest.raises(TrainerError, match="TRAINER_BACKEND=nccl: not a backend for cpu"):
        backend_of({"TRAINER_BACKEND": "nccl"}, "cpu")
    monkeypatch.setenv("TRAINER_BACKEND", "gloo")
    worlds = [World(rank=rank, local_rank=rank, size=3, local_size=3, launched=True) for rank in range(3)]
    assert [gpu_of([4, 5], world) for world in worlds] == [4, 5, 4]


def test_a_gpu_that_torch_cannot_use_is_an_error_and_not_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate the device file of a GPU, as with a driver that is too old."""
    monkeypatch.setattr(comm, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_numbers("") == []
    (tmp_path / "nvidia0").touch()
    with pytest.raises(TrainerError, match="a GPU that torch cannot use: ") as error:
        gpu_numbers("")
    assert "--device cpu" in error.value.hint
    assert gpu_numbers("cpu") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_numbers("") == []


def join_alone() -> None:
    comm.TIMEOUT = timedelta(seconds=3)
    comm.JOIN_WARNING_S = 1.0
    world = world_of(os.environ)
    try:
        with comm.rendezvous_errors(world, CPU):
            comm.join(world, CPU)
    except TrainerError as error:
        print(error.message)


def test_a_rank_whose_peers_do_not_join_reports_it_and_fails(tmp_path: Path) -> None:
    (alone,) = call(join_alone, tmp_path, ranks(2)[:1])
    assert re.fullmatch(
        r"rank 0: not all of 2 ranks joined at 127\.0\.0\.1:\d+ within 3 s\n", alone.stdout
    ), alone
    assert "rank 0 has waited 1 s for the others of 2 ranks at 127.0.0.1:" in alone.stderr


def use_collectives() -> None:
    world = world_of(os.environ)
    assert comm.join(world, CPU) == "gloo"
    comm.raise_on_all_ranks(None)
    assert comm.broadcast("yes" if world.rank == 0 else "no") == "yes"
    assert comm.gather(world.rank) == ([0, 1] if world.rank == 0 else [])
    tensors = [torch.full((2, 2), float(world.rank)), torch.tensor(10.0 * world.rank)]
    comm.average_(tensors)
    assert tensors[0].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert tensors[1] == 5
    try:
        comm.raise_on_all_ranks(TrainerError("cannot write", "ask the owner") if world.rank == 1 else None)
    except TrainerError as error:
        print(error.message, "/", error.hint)
    comm.leave()


def test_ranks_share_errors_gather_and_average(tmp_path: Path) -> None:
    printed = [each.stdout.strip() for each in call(use_collectives, tmp_path, ranks(2))]
    assert printed == ["rank 1: cannot write / ask the owner", "cannot write / ask the owner"]
