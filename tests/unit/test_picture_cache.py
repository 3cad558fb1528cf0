"""The cache of decoded pictures: the same batches, one file per machine, nothing left behind."""

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.yolo_folder import make_yolo_set, write_picture
from trainer.config import Hyp
from trainer.data import TrainLoader, open_dataset
from trainer.data.digits import Digits
from trainer.data.picture_cache import cache_pictures, memory_free
from trainer.dist import World
from trainer.errors import TrainerError


def alone(value):
    return [value]


def loader_of(dataset, workers=0, **options):
    return TrainLoader(
        dataset, imgsz=32, batch=3, rank=0, world=1, seed=0, workers=workers, hyp=Hyp(mosaic=0.7), **options
    )


@pytest.fixture
def dataset(tmp_path):
    """Eight pictures: of three sizes, so that some are shrunk when they are decoded for 32 px."""
    path = make_yolo_set(tmp_path / "set", train=7)
    write_picture(tmp_path / "set/images/train/big.jpg", height=300, width=200, seed=9)
    return open_dataset(str(path), "train", imgsz=32)


def left_in_shm():
    """What is in /dev/shm, but for the semaphores of other programs' processes, which come and go."""
    return sorted(path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem."))


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"multi_scale": True}])
def test_batches_are_the_same_as_without_and_pictures_are_not_read_again(dataset, tmp_path, kind, workers, options):
    expected = [b for e in range(2) for b in loader_of(dataset, **options).epoch(e)]
    loader = loader_of(dataset, workers, **options)
    before = left_in_shm()
    loader.cache(kind, [tmp_path / "home"], World(), alone, 2)
    for k in range(len(dataset)):
        dataset.path(k).write_bytes(b"gone")
    batches = [b for e in range(2) for b in loader.epoch(e)]
    for batch, same in zip(batches, expected, strict=True):
        assert torch.equal(batch.images, same.images)
        assert torch.equal(batch.targets, same.targets)
    if kind == "ram":
        assert not (tmp_path / "home").exists()
        if not workers:  # their batches are there
            assert left_in_shm() == before
    else:
        assert len(list((tmp_path / "home").iterdir())) == 1


def test_a_disk_cache_is_found_again_until_a_picture_changes(dataset, tmp_path):
    homes = [tmp_path / "not-there", tmp_path / "home"]
    (tmp_path / "not-there").write_text("a file: nothing can be made in it")
    cache_pictures(dataset, 32, "disk", homes, World(), alone, 1)
    (first,) = homes[1].iterdir()
    made = first.stat()
    again = cache_pictures(dataset, 32, "disk", homes, World(), alone, 1)
    assert [p.stat().st_ino for p in homes[1].iterdir()] == [made.st_ino]
    assert first.stat().st_mtime_ns == made.st_mtime_ns
    np.testing.assert_array_equal(again.image(7, 32), dataset.image(7, 32))
    assert again.image(7, 32).shape[:2] != again.image(7).shape[:2] == dataset.size(7)  # for more, from its file
    os.utime(dataset.path(0), (1, 1))
    cache_pictures(dataset, 32, "disk", homes, World(), alone, 1)
    cache_pictures(dataset, 64, "disk", homes, World(), alone, 1)
    assert len(list(homes[1].iterdir())) == 3


class Ranks:
    """Ranks as threads, that exchange values as processes do."""

    def __init__(self, nodes):
        self.places = [(node, local) for node, size in enumerate(nodes) for local in range(size)]
        self.worlds = [World(rank=r, local_rank=k, node=n) for r, (n, k) in enumerate(self.places)]
        self.values = [None] * len(self.worlds)
        self.barrier = threading.Barrier(len(self.worlds))
        self.results = [None] * len(self.worlds)

    def run(self, work):
        def one(rank):
            def exchange(value):
                self.values[rank] = pickle.dumps(value)
                self.barrier.wait(30)
                values = [pickle.loads(v) for v in self.values]
                self.barrier.wait(30)
                return values

            try:
                self.results[rank] = work(self.worlds[rank], exchange)
            except TrainerError as error:
                self.results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.worlds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return self.results


class Counted:
    """A data set that notes which of its pictures were decoded."""

    def __init__(self, dataset):
        self.dataset, self.decoded = dataset, []

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)

    def image(self, index, min_side=0):
        self.decoded.append(index)
        return self.dataset.image(index, min_side)


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("shared", [True, False])
def test_each_machine_decodes_a_picture_once_and_all_of_them_together_on_a_shared_disk(dataset, tmp_path, kind, shared):
    counted = Counted(dataset)

    def work(world, exchange):
        home = tmp_path / "home" if shared else tmp_path / f"home-{world.node}"
        return cache_pictures(counted, 32, kind, [home], world, exchange, 1)

    for pictures in Ranks([3, 2]).run(work):
        for k in range(len(dataset)):
            np.testing.assert_array_equal(pictures.image(k, 32), dataset.image(k, 32))
    machines = 1 if shared and kind == "disk" else 2
    assert sorted(counted.decoded) == sorted(list(range(len(dataset))) * machines)
    if kind == "disk":
        homes = ["home"] if shared else ["home-0", "home-1"]
        names = [[p.name.startswith("pictures-") for p in (tmp_path / home).iterdir()] for home in homes]
        assert names == [[True]] * len(homes)
        counted.decoded.clear()
        Ranks([3, 2]).run(work)
        assert not counted.decoded


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_picture_that_cannot_be_decoded_stops_all_ranks_and_leaves_nothing(dataset, tmp_path, kind):
    dataset.path(2).write_bytes(b"bad")
    results = Ranks([2, 1]).run(
        lambda world, exchange: cache_pictures(dataset, 32, kind, [tmp_path / "home"], world, exchange, 2)
    )
    assert all(isinstance(error, TrainerError) for error in results)
    assert {str(dataset.path(2)) in error.message for error in results} == {True}
    assert not list((tmp_path / "home").iterdir()) if kind == "disk" else not (tmp_path / "home").exists()


class Huge(Digits):
    """A terabyte of pictures, as far as their sizes say."""

    def size(self, index):
        return (100_000, 100_000)


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_where_there_is_no_room_the_error_says_how_much_is_missing(tmp_path, kind):
    data = Huge("train", 32, pages=40)
    home = tmp_path / "home"
    results = Ranks([2]).run(lambda world, exchange: cache_pictures(data, 100_000, kind, [home], world, exchange, 1))
    for error in results:
        assert isinstance(error, TrainerError)
        assert f"--cache {kind}: the decoded pictures need 1117.6 GiB" in error.message
        assert "GiB free" in error.message or "GiB of memory is free" in error.message
        assert error.hint
    assert not home.exists() or not list(home.iterdir())


def test_memory_that_is_free_is_what_the_machine_has_at_most():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_free() <= total


def test_a_composed_page_is_cached_too(tmp_path):
    pages = Digits("train", 32, pages=5)
    cached = cache_pictures(pages, 32, "disk", [tmp_path], World(), alone, 1)
    for k in range(5):
        np.testing.assert_array_equal(cached.image(k, 32), pages.image(k))
    assert len(list(Path(tmp_path).iterdir())) == 1
