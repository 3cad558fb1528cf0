"""Image cache: equal batches, one file per node, no partial files."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import wait_until
from tests.unit.yolo_folder import make_yolo_set, write_image
from trainer.config import Hyp
from trainer.data.detection_loader import TrainLoader
from trainer.data.digits import Digits
from trainer.data.image_cache import cache_images, memory_free
from trainer.data.registry import open_dataset
from trainer.distributed.comm import World
from trainer.errors import TrainerError


def alone(value):
    return [value]


def loader_of(dataset, workers=0, **options):
    return TrainLoader(
        dataset, imgsz=32, batch=3, rank=0, world=1, seed=0, workers=workers, hyp=Hyp(mosaic=0.7), **options
    )


@pytest.fixture
def dataset(tmp_path):
    """Eight images of three sizes; some have a reduced decoding at 32 px."""
    path = make_yolo_set(tmp_path / "set", train=7)
    write_image(tmp_path / "set/images/train/big.jpg", height=300, width=200, seed=9)
    return open_dataset(str(path), "train", imgsz=32)


def left_in_shm():
    """Return the files in /dev/shm, without the semaphores and folders of other programs."""
    return {path for path in Path("/dev/shm").iterdir() if not (path.name.startswith("sem.") or path.is_dir())}


def cache_files(folder):
    return [path for path in folder.glob("*") if path.name != ".gitignore"]


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"multi_scale": True}])
def test_cached_batches_are_equal_and_images_are_read_once(dataset, tmp_path, kind, workers, options):
    expected = [b for e in range(2) for b in loader_of(dataset, **options).epoch(e)]
    loader = loader_of(dataset, workers, **options)
    before = left_in_shm()
    loader.cache(kind, [tmp_path / "home"], World(), alone, 2)
    for k in range(len(dataset)):
        Path(dataset.name(k)).write_bytes(b"gone")
    batches = [b for e in range(2) for b in loader.epoch(e)]
    for batch, same in zip(batches, expected, strict=True):
        assert torch.equal(batch.images, same.images)
        assert torch.equal(batch.labels, same.labels)
    if kind == "ram":
        assert not (tmp_path / "home").exists()
        if not workers:  # their batches are there
            assert wait_until(lambda: not left_in_shm() - before), left_in_shm() - before
    else:
        assert len(cache_files(tmp_path / "home")) == 1


def test_a_disk_cache_is_reused_until_an_image_changes(dataset, tmp_path):
    homes = [tmp_path / "not-there", tmp_path / "home"]
    (tmp_path / "not-there").write_text("a file: nothing can be made in it")
    cache_images(dataset, 32, "disk", homes, World(), alone, 1)
    (first,) = cache_files(homes[1])
    made = first.stat()
    again = cache_images(dataset, 32, "disk", homes, World(), alone, 1)
    assert [p.stat().st_ino for p in cache_files(homes[1])] == [made.st_ino]
    assert first.stat().st_mtime_ns == made.st_mtime_ns
    np.testing.assert_array_equal(again.image(7, 32), dataset.image(7, 32))
    assert again.image(7, 32).shape[:2] != again.image(7).shape[:2] == dataset.size(7)  # for more, from its file
    os.utime(Path(dataset.name(0)), (1, 1))
    cache_images(dataset, 32, "disk", homes, World(), alone, 1)
    cache_images(dataset, 64, "disk", homes, World(), alone, 1)
    assert len(cache_files(homes[1])) == 3


def on_ranks(nodes, work):
    """Run `work` on nodes of so many ranks each: threads that exchange values like processes."""
    places = [(node, local) for node, size in enumerate(nodes) for local in range(size)]
    worlds = [World(rank=rank, local_rank=local, node=node) for rank, (node, local) in enumerate(places)]
    values, barrier = [None] * len(worlds), threading.Barrier(len(worlds))

    def one(world):
        def exchange(value):
            values[world.rank] = pickle.dumps(value)
            barrier.wait(30)
            gathered = [pickle.loads(v) for v in values]
            barrier.wait(30)
            return gathered

        try:
            return work(world, exchange)
        except TrainerError as error:
            return error

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(one, worlds))


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("shared", [True, False])
def test_an_image_is_decoded_once_per_node(dataset, tmp_path, monkeypatch, kind, shared):
    decoded, read = [], dataset.image
    monkeypatch.setattr(dataset, "image", lambda index, side=0: decoded.append(index) or read(index, side))

    def work(world, exchange):
        home = tmp_path / "home" if shared else tmp_path / f"home-{world.node}"
        return cache_images(dataset, 32, kind, [home], world, exchange, 1)

    for images in on_ranks([3, 2], work):
        for k in range(len(dataset)):
            np.testing.assert_array_equal(images.image(k, 32), read(k, 32))
    assert sorted(decoded) == sorted(list(range(len(dataset))) * 2)
    if kind == "disk":
        for home in ["home"] if shared else ["home-0", "home-1"]:
            assert [path.name.startswith("images-") for path in cache_files(tmp_path / home)] == [True]
        decoded.clear()
        on_ranks([3, 2], work)
        assert not decoded


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_an_undecodable_image_stops_all_ranks_without_partial_files(dataset, tmp_path, kind):
    Path(dataset.name(2)).write_bytes(b"bad")
    home = tmp_path / "home"
    results = on_ranks([2, 1], lambda world, exchange: cache_images(dataset, 32, kind, [home], world, exchange, 2))
    assert all(isinstance(error, TrainerError) for error in results)
    assert {str(Path(dataset.name(2))) in error.message for error in results} == {True}
    assert not cache_files(tmp_path / "home")


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_an_error_reports_the_missing_space(tmp_path, monkeypatch, kind):
    data = Digits("train", 32, pages=40)
    monkeypatch.setattr(data, "size", lambda _: (100_000, 100_000))
    home = tmp_path / "home"
    results = on_ranks([2], lambda world, exchange: cache_images(data, 100_000, kind, [home], world, exchange, 1))
    for error in results:
        assert isinstance(error, TrainerError)
        assert f"--cache {kind}: the decoded images need 1117.6 GiB" in error.message
        assert "GiB free" in error.message or "GiB of memory is free" in error.message
        assert error.hint
    assert not cache_files(home)


def test_free_memory_is_at_most_that_of_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_free() <= total


def test_generated_images_are_cached(tmp_path):
    pages = Digits("train", 32, pages=5)
    cached = cache_images(pages, 32, "disk", [tmp_path], World(), alone, 1)
    for k in range(5):
        np.testing.assert_array_equal(cached.image(k, 32), pages.image(k))
    assert len(cache_files(tmp_path)) == 1
