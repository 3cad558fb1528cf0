"""Nodes with different numbers of ranks: two on the first and one on the second."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.trainer_process import TINY, call, ranks, start, wait
from tests.unit.yolo_folder import squares
from trainer.bench.processes import Job
from trainer.distributed import comm


def unequal(*counts: int) -> list[dict[str, str]]:
    """Return the environment of each rank of nodes with so many ranks."""
    shared = ranks(sum(counts))
    places = [(node, local, count) for node, count in enumerate(counts) for local in range(count)]
    return [
        {**own, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(node)}
        for own, (node, local, count) in zip(shared, places, strict=True)
    ]


def test_ranks_of_unequal_nodes_train_as_one_rank_does(tmp_path: Path) -> None:
    data = squares(tmp_path / "squares", train=10)
    arguments = [
        "--data",
        str(data),
        "--imgsz",
        "64",
        "--batch",
        "4",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--sync-bn",
    ]
    arguments += ["--cfg", str(TINY), "--log-steps", "--project", ".", "--cache", "disk"]
    found = {}
    for name, environments in (("alone", ranks(1)), ("unequal", unequal(2, 1)), ("reverse", unequal(1, 2))):
        own = {"XDG_CACHE_HOME": str(tmp_path / f"cache-{name}")}
        wait(start(tmp_path, environments, "train", *arguments, "--name", name, **own), code=0)
        rows = (tmp_path / name / "steps.csv").read_text().splitlines()[1:]
        found[name] = [sum(map(float, row.split(",")[1:])) for row in rows]
    assert len(found["alone"]) == 6
    assert found["unequal"] == pytest.approx(found["alone"], rel=0.05)
    assert found["reverse"] == pytest.approx(found["alone"], rel=0.05)


def most_ranks() -> None:
    """Print the number of ranks of the largest node, on rank 0."""
    world = comm.world_of(os.environ)
    job = Job(world)
    if world.rank:
        job.follow()
        return
    print(json.dumps(job.most_on_a_node()))
    job.end()


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (1, 1)])
def test_threads_of_a_measurement_are_those_of_the_largest_node(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    """Each point has the same number of threads per rank, so the first node's number could be too many on another."""
    first, *_ = call(most_ranks, tmp_path, unequal(*counts))
    assert first.stdout == f"{max(counts)}\n"
