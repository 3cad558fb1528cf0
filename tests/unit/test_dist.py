import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.unit.trainer_process import Ended, ranks, start, wait
from trainer.dist import (
    World,
    default_workers,
    gpu_numbers,
    gpu_of,
    pick_device,
    thread_count,
    usable_cores,
    world_of,
)
from trainer.errors import TrainerError

ROOT = Path(__file__).parents[2]
WHOLE = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_no_rank_variables_is_a_single_process() -> None:
    assert world_of({"PATH": "/bin"}) == World(rank=0, local_rank=0, size=1, local_size=1, node=0, launched=False)


def test_torchruns_variables_give_the_place() -> None:
    assert world_of(WHOLE) == World(rank=3, local_rank=1, size=4, local_size=2, node=1, launched=True)


def test_a_rank_in_a_smaller_world_than_the_jobs_refuses_to_train_alone() -> None:
    assert world_of({**WHOLE, "CLUSTER_WORLD_SIZE": "4"}).size == 4
    with pytest.raises(TrainerError, match="one of 4, and the job has 8"):
        world_of({**WHOLE, "CLUSTER_WORLD_SIZE": "8"})


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_set_of_rank_variables_names_what_is_missing(missing: str) -> None:
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
        ({}, 1, 8, 8),
        ({}, 2, 8, 4),
        ({}, 2, 1, 1),  # never none
        ({"OMP_NUM_THREADS": "1"}, 2, 8, 4),  # torchrun's own default
        ({"OMP_NUM_THREADS": "3"}, 2, 8, None),
        ({"OMP_NUM_THREADS": "1", "CLUSTER_JOB_ID": "job"}, 2, 8, None),  # --env OMP_NUM_THREADS=1
    ],
)
def test_the_nodes_cores_are_shared(environment: dict[str, str], local: int, cores: int, expected: int | None) -> None:
    world = World(size=local, local_size=local, launched=True)
    assert thread_count(environment, world, cores) == expected


@pytest.mark.parametrize(("nodes", "cores"), [("1", 8), ("2", 4), ("16", 1)])
def test_nodes_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch, nodes: str, cores: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: "max 100000")
    monkeypatch.setenv("CLUSTER_NODES_ON_HOST", nodes)
    assert usable_cores() == cores
    assert default_workers(torch.device("cuda"), World(size=2, local_size=2)) == cores // 2


def test_a_number_of_nodes_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_NODES_ON_HOST", "two")
    with pytest.raises(TrainerError, match="CLUSTER_NODES_ON_HOST is 'two', not a number"):
        usable_cores()


def test_a_users_threads_stand_in_a_single_process() -> None:
    assert thread_count({"OMP_NUM_THREADS": "1"}, World(), 8) is None


@pytest.mark.parametrize("wanted", ["tpu", "0,a", "-1"])
def test_unknown_devices_are_errors(wanted: str) -> None:
    with pytest.raises(TrainerError):
        pick_device(wanted, World())


def test_devices() -> None:
    assert pick_device("cpu", World()) == torch.device("cpu")
    if torch.cuda.is_available():
        assert pick_device("", World()) == torch.device("cuda", 0)
        with pytest.raises(TrainerError, match=f"no GPU {torch.cuda.device_count()}"):
            pick_device(str(torch.cuda.device_count()), World())
        many = World(local_rank=64, local_size=65, size=65, launched=True)
        with pytest.raises(TrainerError, match="65 processes"):
            pick_device("cuda", many)
    else:
        assert pick_device("", World()) == torch.device("cpu")
        with pytest.raises(TrainerError, match="no GPU can be used"):
            pick_device("cuda", World())


def test_each_rank_has_a_gpu_of_its_own_or_all_of_the_node_refuse() -> None:
    with pytest.raises(TrainerError, match="--device 0,1,0: a GPU is named twice") as twice:
        gpu_numbers("0,1,0")
    assert twice.value.hint == "use --device 0,1"
    for rank in range(4):
        place = World(rank=rank, local_rank=rank, size=4, local_size=4, launched=True)
        assert gpu_of([4, 5, 6, 7], place) == 4 + rank
        with pytest.raises(TrainerError, match="4 processes on this node but 2 GPUs"):
            gpu_of([0, 1], place)
    # Who sets the ranks by hand may not say how many are on this node: each can only speak for itself.
    del (alone := dict(WHOLE))["LOCAL_WORLD_SIZE"]
    assert gpu_of([4, 5], world_of(alone)) == 5
    with pytest.raises(TrainerError, match="2 processes on this node but 1 GPUs"):
        gpu_of([4], world_of(alone))


def run_ranks(program: str, places: list[dict[str, str]], folder: Path) -> list[Ended]:
    """Run a program as several gloo ranks; torchrun itself would add seconds."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    return wait(start(folder, places, program=["program.py"]))


def test_a_rank_whose_peers_do_not_come_says_so_and_ends(tmp_path: Path) -> None:
    program = """
        import datetime, os, torch
        from trainer import dist
        from trainer.errors import TrainerError

        dist.TIMEOUT, dist.PATIENCE_S = datetime.timedelta(seconds=3), 1.0
        world = dist.world_of(os.environ)
        try:
            with dist.meeting(world, torch.device("cpu")):
                dist.join(world, torch.device("cpu"))
        except TrainerError as error:
            print(error.message)
    """
    (alone,) = run_ranks(program, ranks(2)[:1], tmp_path)
    assert re.fullmatch(r"rank 0: the 2 ranks have not met at 127\.0\.0\.1:\d+ within 3 s\n", alone.stdout), alone
    assert "rank 0 has waited 1 s for the others of 2 ranks at 127.0.0.1:" in alone.stderr


@pytest.mark.parametrize("cfg", ["yolov5n.yaml", "yolov5nu.yaml"])
@pytest.mark.parametrize("second", [0, 1])
def test_two_ranks_train_like_one(tmp_path: Path, cfg: str, second: int) -> None:
    """Eight pictures on one rank, and 5 + 3 on two with most or all boxes on the first: same loss, same gradients.

    Batch norm is frozen: its statistics are each rank's own.
    """
    program = """
        import os, sys, torch
        from trainer import dist
        from trainer.config import Hyp
        from trainer.models.yolo import build_yolo, load_cfg
        from trainer.tasks.detection import loss_of
        from trainer.training.timing import Clock

        torch.manual_seed(0)
        model = build_yolo(load_cfg("CFG"), nc=3).eval()
        for p in model.buffers():
            if p.is_floating_point():
                p.mul_(0.2)  # running variances: keeps the signal alive through the layers
        images = torch.rand(8, 3, 64, 64)
        targets = torch.tensor([[0, 1, .4, .4, .3, .2], [0, 2, .7, .3, .5, .5], [4, 0, .5, .6, .9, .8]])
        if SECOND:
            targets = torch.cat((targets, torch.tensor([[6, 1, .3, .5, .4, .4]])))
        after = targets[3:] - torch.tensor([5, 0, 0, 0, 0, 0])

        def losses(net, images, targets):
            loss = loss_of(model, Hyp(), 64)
            assigned = loss.assign(targets, len(images), 64, 64)
            counts = assigned.counts.clone()  # summed in place
            work = dist.start_sum(counts)
            raw = net(images)
            matched, late = loss.match(raw, assigned)
            dist.wait(dist.start_sum(late))
            dist.wait(work)
            terms = loss(raw, matched, torch.cat((counts, late)))
            model.zero_grad()
            (terms.sum() * counts[0].float()).backward()
            terms = terms.detach().double()
            dist.wait(dist.start_sum(terms))
            return terms, [p.grad.clone() for p in model.parameters()]

        whole, gradients = losses(model, images, targets)
        world = dist.world_of(os.environ)
        dist.join(world, torch.device("cpu"))
        net = dist.wrap(model, torch.device("cpu"), static=False)
        clock = Clock(torch.device("cpu"))
        clock.watch(net)
        if world.rank == 0:
            parts, split = losses(net, images[:5], targets[:3])
        else:
            parts, split = losses(net, images[5:], after)
        clock.after_backward()
        assert clock.shares()["sync"] > 0
        assert whole[0] > 0.1 and whole[2] > 0.001, whole
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
        for a, b in zip(split, gradients):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()) + 1e-7)
        dist.leave()
    """
    for result in run_ranks(program.replace("CFG", cfg).replace("SECOND", str(second)), ranks(2), tmp_path):
        assert result.returncode == 0, result.stderr


def test_ranks_agree_gather_and_average(tmp_path: Path) -> None:
    program = """
        import os, sys, torch
        from trainer import dist
        from trainer.errors import TrainerError

        world = dist.world_of(os.environ)
        assert dist.join(world, torch.device("cpu")) == "gloo"
        dist.agree(None)
        assert dist.broadcast("yes" if world.rank == 0 else "no") == "yes"
        assert dist.gather(world.rank) == ([0, 1] if world.rank == 0 else [])
        tensors = [torch.full((2, 2), float(world.rank)), torch.tensor(10.0 * world.rank)]
        dist.average_(tensors)
        assert tensors[0].tolist() == [[0.5, 0.5], [0.5, 0.5]] and tensors[1] == 5, tensors
        try:
            dist.agree(TrainerError("cannot write", "ask the owner") if world.rank == 1 else None)
        except TrainerError as error:
            print(error.message, "/", error.hint)
        dist.leave()
    """
    results = run_ranks(program, ranks(2), tmp_path)
    assert [r.returncode for r in results] == [0, 0], results[0].stderr + results[1].stderr
    said = [r.stdout.strip() for r in results]
    assert said == [
        "rank 1: cannot write / ask the owner",
        "cannot write / ask the owner",
    ]
