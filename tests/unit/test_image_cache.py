"""Image cache: equal batches, each image decoded once, one file per node, no partial files."""

import errno
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import wait_until
from tests.unit.test_resident_images import SourceChecker
from tests.unit.yolo_folder import make_yolo_set, write_image
from trainer.config import Hyp
from trainer.data.cache import image_cache
from trainer.data.cache.image_cache import Layout, cache_images
from trainer.data.cache.memory import memory_free
from trainer.data.formats.digits import Digits
from trainer.data.formats.yolo import Yolo
from trainer.data.loading.detection_loader import TrainLoader
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
    return {
        path for path in Path("/dev/shm").iterdir() if not (path.name.startswith("sem.") or path.is_dir())
    }


def opened(dataset, kind="ram", folders=(), world=None, exchange=alone, threads=1, side=32):
    """The cache of a rank."""
    layout = Layout(dataset, side)
    images, reason = cache_images(dataset, layout, kind, list(folders), world or World(), exchange, threads)
    assert reason
    return images


@pytest.fixture
def decoded(dataset, monkeypatch):
    """The numbers of the images that `dataset` has decoded, in this process."""
    numbers = []
    read = dataset.image
    monkeypatch.setattr(dataset, "image", lambda index, side=0: numbers.append(index) or read(index, side))
    return numbers


def assert_equal(batches, expected):
    for batch, same in zip(batches, expected, strict=True):
        assert torch.equal(batch.images, same.images)
        assert torch.equal(batch.labels, same.labels)


def cache_files(folder):
    return [path for path in folder.glob("*") if path.name != ".gitignore"]


@pytest.mark.parametrize("kind", ["auto", "ram", "disk"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"multi_scale": True}])
def test_cached_batches_are_equal_and_files_are_read_once(dataset, tmp_path, kind, workers, options):
    expected = [list(loader_of(dataset, **options).epoch(e)) for e in range(3)]
    loader = loader_of(dataset, workers, **options)
    before = left_in_shm()
    loader.cache(kind, [tmp_path / "home"], World(), alone, 2, print)
    epochs = [] if kind == "disk" else [list(loader.epoch(0))]
    assert loader._collate.cached._shapes.all()
    for k in range(len(dataset)):
        Path(dataset.name(k)).write_bytes(b"gone")
    epochs += [list(loader.epoch(e)) for e in range(len(epochs), 3)]
    for batches, same in zip(epochs, expected, strict=True):
        assert_equal(batches, same)
    if kind == "disk":
        assert len(cache_files(tmp_path / "home")) == 1
    else:
        assert not (tmp_path / "home").exists()
        if not workers:  # their batches are there
            assert wait_until(lambda: not left_in_shm() - before), left_in_shm() - before


@pytest.mark.parametrize("kind", ["auto", "ram", "disk"])
def test_one_process_decodes_no_image_twice(dataset, tmp_path, decoded, kind):
    loader = loader_of(dataset)
    loader.cache(kind, [tmp_path], World(), alone, 1, print)
    for epoch in range(3):
        list(loader.epoch(epoch))
    assert sorted(decoded) == list(range(len(dataset)))


def test_an_image_that_was_decoded_by_a_rank_is_read_by_the_others(dataset, decoded):
    ranks = on_ranks([2], lambda world, exchange: opened(dataset, "ram", [], world, exchange))
    for images in ranks:
        for k in range(len(dataset)):
            np.testing.assert_array_equal(images.image(k, 32), Yolo.image(dataset, k, 32))
    assert sorted(decoded) == list(range(len(dataset)))


def test_no_process_ever_finds_an_image_without_all_its_bytes(dataset, monkeypatch):
    """Write a few bytes at a time, as a kernel may, and read the image in between from another mapping."""
    expected = [dataset.image(k, 32) for k in range(len(dataset))]
    writer = opened(dataset, "ram")
    reader = pickle.loads(pickle.dumps(writer))
    reader.stores = False
    write = os.pwrite
    read = []
    current = 0

    def slowly(file, content, offset):
        written = write(file, content[:1000], offset)
        is_there = bool(reader._shapes[current].all())
        np.testing.assert_array_equal(reader.image(current, 32), expected[current])
        read.append((current, is_there))
        return written

    monkeypatch.setattr(os, "pwrite", slowly)
    for current in range(len(dataset)):
        writer.image(current, 32)
    assert set(read) == {(k, is_there) for k in range(len(dataset)) for is_there in (False, True)}


def test_an_image_that_cannot_be_decoded_stops_the_epoch_with_its_name(dataset):
    Path(dataset.name(2)).write_bytes(b"bad")
    for workers in (0, 2):
        loader = loader_of(dataset, workers)
        loader.cache("auto", [], World(), alone, 1, print)
        with pytest.raises(TrainerError, match=r"002\.jpg: cannot be decoded") as caught:
            list(loader.epoch(0))
        assert "replace the image" in caught.value.hint


def test_a_new_run_reads_images_that_have_changed(dataset):
    first = loader_of(dataset)
    path = Path(dataset.name(0))
    first.cache("auto", [], World(), alone, 1, print)
    before = list(first.epoch(0))
    path.write_bytes(Path(dataset.name(7)).read_bytes())
    second = loader_of(dataset)
    second.cache("auto", [], World(), alone, 1, print)
    after = list(second.epoch(0))
    assert_equal(after, list(loader_of(dataset).epoch(0)))
    assert not all(
        torch.equal(batch.images, other.images) for batch, other in zip(before, after, strict=True)
    )
    assert_equal(before, list(first.epoch(0)))  # a run in progress keeps its images


def test_a_disk_cache_is_reused_until_an_image_changes(dataset, tmp_path):
    homes = [tmp_path / "not-there", tmp_path / "home"]
    (tmp_path / "not-there").write_text("a file: nothing can be made in it")
    opened(dataset, "disk", homes)
    (first,) = cache_files(homes[1])
    made = first.stat()
    again = opened(dataset, "disk", homes)
    assert [p.stat().st_ino for p in cache_files(homes[1])] == [made.st_ino]
    assert first.stat().st_mtime_ns == made.st_mtime_ns
    np.testing.assert_array_equal(again.image(7, 32), dataset.image(7, 32))
    assert (
        again.image(7, 32).shape[:2] != again.image(7).shape[:2] == dataset.size(7)
    )  # for more, from its file
    os.utime(Path(dataset.name(0)), (1, 1))
    opened(dataset, "disk", homes)
    opened(dataset, "disk", homes, side=64)
    assert len(cache_files(homes[1])) == 3


def on_ranks(nodes, work):
    """Run `work` on nodes of so many ranks each: threads that exchange values like processes."""
    places = [(node, local) for node, size in enumerate(nodes) for local in range(size)]
    worlds = [
        World(rank=rank, size=len(places), local_rank=local, local_size=nodes[node], node=node)
        for rank, (node, local) in enumerate(places)
    ]
    values = [None] * len(worlds)
    barrier = threading.Barrier(len(worlds))

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


@pytest.mark.parametrize(
    ("painter", "nodes"),
    [(None, [2]), (SourceChecker, [2]), (None, [2, 1])],
    ids=["workers", "device", "unequal nodes"],
)
def test_ranks_fill_a_cache_together(dataset, decoded, painter, nodes):
    def work(world, exchange):
        loader = loader_of(dataset, painter=painter and painter())
        loader.cache("auto", [], world, exchange, 1, print)
        loader.fill_cache(world, exchange, 1)
        return loader

    for loader in on_ranks(nodes, work):
        assert loader._collate.cached._shapes.all()
        assert not painter or (loader._collate.resident._states == 1).all()
    assert sorted(decoded) == sorted([*range(len(dataset))] * len(nodes))


@pytest.mark.parametrize("shared", [True, False])
def test_a_disk_cache_decodes_an_image_once_per_folder(dataset, tmp_path, decoded, shared):
    def work(world, exchange):
        home = tmp_path / "home" if shared else tmp_path / f"home-{world.node}"
        return opened(dataset, "disk", [home], world, exchange)

    for images in on_ranks([3, 2], work):
        for k in range(len(dataset)):
            np.testing.assert_array_equal(images.image(k, 32), Yolo.image(dataset, k, 32))
    assert sorted(decoded) == sorted(list(range(len(dataset))) * 2)
    for home in ["home"] if shared else ["home-0", "home-1"]:
        assert [path.name.startswith("images-") for path in cache_files(tmp_path / home)] == [True]
    decoded.clear()
    on_ranks([3, 2], work)
    assert not decoded


def test_an_undecodable_image_stops_all_ranks_without_partial_files(dataset, tmp_path):
    Path(dataset.name(2)).write_bytes(b"bad")
    results = on_ranks(
        [2, 1], lambda world, exchange: opened(dataset, "disk", [tmp_path / "home"], world, exchange)
    )
    assert all(isinstance(error, TrainerError) for error in results)
    assert {str(Path(dataset.name(2))) in error.message for error in results} == {True}
    assert not cache_files(tmp_path / "home")


def huge(monkeypatch):
    data = Digits("train", 32, pages=40)
    monkeypatch.setattr(data, "size", lambda _: (100_000, 100_000))
    return data


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_an_error_reports_the_missing_space(tmp_path, monkeypatch, kind):
    data = huge(monkeypatch)
    home = tmp_path / "home"
    results = on_ranks([2], lambda world, exchange: opened(data, kind, [home], world, exchange, side=100_000))
    for error in results:
        assert isinstance(error, TrainerError)
        assert f"--cache {kind}: the decoded images need 1117.6 GiB" in error.message
        assert "GiB free" in error.message or "GiB of memory is free" in error.message
        assert "--cache none" in error.hint
    assert not cache_files(home)


def test_auto_does_without_a_cache_that_needs_more_than_half_of_the_memory(dataset, monkeypatch):
    need = opened(dataset, "auto")._bytes.nbytes
    loader = loader_of(dataset)
    said = []
    for free, is_cached in ((2 * need, True), (2 * need - 2, False)):
        monkeypatch.setattr(image_cache, "memory_free", lambda free=free: free)
        loader.cache("auto", [], World(), alone, 1, said.append)
        assert bool(loader._collate.cached) == is_cached
        assert_equal(list(loader.epoch(0)), list(loader_of(dataset).epoch(0)))
    assert "cached in memory" in said[0]
    assert "not cached" in said[1]


def test_the_message_names_the_nodes_if_they_differ(dataset, monkeypatch):
    data = dataset
    said = []
    monkeypatch.setattr(
        image_cache, "memory_free", lambda: 2**40 if threading.current_thread().name == "big" else 1
    )

    def work(world, exchange):
        threading.current_thread().name = "small" if world.node else "big"
        images, reason = cache_images(data, Layout(data, 32), "auto", [], world, exchange, 1)
        said.append(reason)
        return images

    large, also, small = on_ranks([2, 1], work)
    assert large
    assert also
    assert small is None
    assert len(set(said)) == 1
    assert "node 0: images are cached in memory" in said[0]
    assert "node 1: images are not cached" in said[0]


def test_auto_stores_no_more_images_when_memory_runs_out(dataset, monkeypatch, decoded):
    images = opened(dataset, "auto")
    free = 2**40
    monkeypatch.setattr(image_cache, "memory_free", lambda: free)
    images.image(0, 32)
    free = 1
    for k in range(len(dataset)):
        np.testing.assert_array_equal(images.image(k, 32), Yolo.image(dataset, k, 32))
    assert images._shapes.all(1).tolist() == [True] + [False] * 7
    free = 2**40
    for _ in range(2):
        images.image(1, 32)
    assert decoded == [0, 1, 2, 3, 4, 5, 6, 7, 1]


@pytest.mark.parametrize("kind", ["auto", "ram"])
def test_memory_that_the_kernel_refuses(dataset, monkeypatch, kind):
    """Only `ram` is an error then."""
    images = opened(dataset, kind)
    expected = dataset.image(3, 32)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    if kind == "auto":
        np.testing.assert_array_equal(images.image(3, 32), expected)
        assert not images._shapes.any()
    else:
        with pytest.raises(TrainerError, match=r"--cache ram.*003\.jpg.*No space left") as caught:
            images.image(3, 32)
        assert "--cache auto" in caught.value.hint


GIB = 2**30


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        ("0::/\n", {}, 100),
        ("0::/\n", {"": ("max", 90, 0)}, 100),
        ("0::/\n", {"": (64, 40, 10)}, 34),  # of the used memory, 10 GiB can be given up
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7": (32, 30, 0), "slurm/job_7/step_0": ("max", 1, 0)}, 2),
        ("0::/slurm/job_7\n", {"slurm": (50, 20, 0), "slurm/job_7": (40, 20, 0)}, 20),
        ("0::/docker/of-the-host\n", {"": (8, 9, 0)}, 0),
        ("4:cpu:/a\n5:memory:/a/b\n0::/a\n", {"memory/a": (16, 4, 1)}, 13),  # version 1
    ],
)
def test_free_memory_is_within_the_limits_of_control_groups(tmp_path, cgroup, files, free):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {2 << 27} kB\nMemAvailable: {100 * GIB >> 10} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for group, (limit, used, cache) in files.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        is_first = group.startswith("memory")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if is_first
            else ("memory.max", "memory.current")
        )
        for name, value in zip(names, (limit, used), strict=True):
            (folder / name).write_text(f"{value if value == 'max' else value * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{'total_' * is_first}inactive_file {cache * GIB}\n")
    assert memory_free(tmp_path) == free * GIB


def test_free_memory_is_at_most_that_of_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_free() <= total


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_generated_images_are_cached(tmp_path, kind):
    pages = Digits("train", 32, pages=5)
    cached = opened(pages, kind, [tmp_path])
    for k in [*range(5), *range(5)]:
        np.testing.assert_array_equal(cached.image(k, 32), pages.image(k))
    assert cached._shapes.all()
    assert len(cache_files(tmp_path)) == (kind == "disk")


def test_a_dataset_that_ignores_the_wanted_side_is_cached_in_full(dataset, decoded):
    dataset.decodes_reduced = False
    images = opened(dataset)
    dataset.image, reduced = (
        lambda index, side=0: decoded.append(index) or Yolo.image(dataset, index),
        dataset.image,
    )
    for _ in range(2):
        assert images.image(7, 32).shape[:2] == dataset.size(7) != reduced(7, 32).shape[:2]
    assert decoded == [7, 7, 7]  # the first by the cache
