"""Dataloaders: the global batch does not depend on ranks and workers, and an epoch has every image once."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch

from tests.unit import test_augment
from tests.unit.yolo_folder import make_yolo_set
from trainer.config import Hyp
from trainer.data.formats.digits import Digits
from trainer.data.loading.batch_sampler import neighbours, rect_shape, scales
from trainer.data.loading.dataloader import fit_workers
from trainer.data.loading.detection_loader import TrainLoader, ValLoader
from trainer.data.registry import open_dataset
from trainer.errors import TrainerError


class Photos(test_augment.Photos):
    """Smooth images of many shapes; image k has k % 3 boxes of class k % 3 - 1 and none if that is negative."""

    def __init__(self, count=40):
        rng = np.random.default_rng(1)
        sizes = [tuple(rng.integers(40, 160, 2).tolist()) for _ in range(count)]
        sizes[: count // 2] = [(60, 80)] * (count // 2)
        super().__init__(sizes=sizes)
        self.names = ("one", "two")

    def labels(self, index):
        kind = index % 3
        return np.array([[kind - 1, 0.5, 0.5, 0.4, 0.6]] * kind, np.float32).reshape(-1, 5)

    def segments(self, index):
        return [np.zeros((0, 2), np.float32)] * (index % 3)


def train_loader(dataset, *, rank=0, world=1, batch=6, workers=0, seed=3, hyp=None, **options):
    share = {"rank": rank, "world": world, "workers": workers}
    hyp = hyp or Hyp(mixup=0.3, degrees=5.0)
    return TrainLoader(dataset, imgsz=64, batch=batch, seed=seed, hyp=hyp, **share, **options)


def assert_equal(batches, expected):
    for batch, other in zip(batches, expected, strict=True):
        for name in ("ids", "images", "labels"):
            assert torch.equal(getattr(batch, name), getattr(other, name))


def global_epoch(dataset, epoch, world, workers, **options):
    """Per step: ids, images and labels of all ranks, joined in the order of the ranks."""
    ranks = [
        list(train_loader(dataset, rank=r, world=world, workers=workers, **options).epoch(epoch))
        for r in range(world)
    ]
    steps = []
    for batches in zip(*ranks, strict=True):
        ids = torch.cat([b.ids for b in batches])
        images = torch.cat([b.images for b in batches])
        rows = []
        first = 0
        for b in batches:
            shifted = b.labels.clone()
            shifted[:, 0] += first
            rows.append(shifted)
            first += len(b.ids)
        assert {b.global_size for b in batches} == {first}
        sizes = [len(b.ids) for b in batches]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        steps.append((ids, images, torch.cat(rows)))
    return steps


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (3, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"rect": True}, {"rect": True, "multi_scale": True}, {"image_weights": True}]
)
def test_the_global_batch_is_the_same_for_any_ranks_and_workers(world, workers, options):
    dataset = Photos() if options else Digits("train", 64, pages=16)  # 6 + 6 + 4
    reference = global_epoch(dataset, 5, 1, 0, **options)
    steps = global_epoch(dataset, 5, world, workers, **options)
    assert len(steps) == len(reference) == (7 if options else 3)
    for step, expected in zip(steps, reference, strict=True):
        assert all(torch.equal(part, part1) for part, part1 in zip(step, expected, strict=True))
        assert len(step[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_resumes_at_any_step_with_the_same_batches(workers):
    dataset = Digits("train", 64, pages=16)
    whole = list(train_loader(dataset, batch=4, multi_scale=True).epoch(2))
    for first in (0, 1, 3, 4):
        rest = list(train_loader(dataset, batch=4, multi_scale=True, workers=workers).epoch(2, first))
        assert_equal(rest, whole[first:])


def test_a_dropped_loader_is_freed_without_garbage_collection():
    """Garbage collection would close the queues of its workers first, and torch waits 10 s for each."""
    dataset = Digits("train", 64, pages=16)
    loaders = [
        train_loader(dataset, workers=2),
        ValLoader(dataset, imgsz=64, batch=4, rank=0, world=1, workers=2),
    ]
    freed = [weakref.ref(loader) for loader in loaders]
    gc.disable()
    try:
        list(loaders[0].epoch(0))
        list(loaders[1])
        began = time.monotonic()
        del loaders
        assert [each() for each in freed] == [None, None]
        assert time.monotonic() - began < 5
    finally:
        gc.enable()


def test_multi_scale_draws_the_same_side_on_all_ranks():
    dataset = Digits("train", 64, pages=40)
    ranks = [train_loader(dataset, rank=r, world=2, batch=2, multi_scale=True) for r in range(2)]
    epochs = [[[b.images.shape[1:3] for b in loader.epoch(e)] for loader in ranks] for e in (0, 1)]
    assert all(one == other for one, other in epochs)
    sides = epochs[0][0]
    assert set(sides) == {(32, 32), (64, 64), (96, 96)}  # 0.5 to 1.5 x 64
    assert sides != epochs[1][0]
    assert sides != [
        b.images.shape[1:3] for b in train_loader(dataset, batch=2, multi_scale=True, seed=4).epoch(0)
    ]
    assert list(scales(320, 64)) == [192, 256, 320, 384, 448]  # P6: 160 and 480 are no multiples of 64
    assert (scales(640, 32)[0], scales(640, 32)[-1]) == (320, 960)


def test_augmentation_depends_on_epoch_and_seed():
    dataset = Digits("train", 64, pages=4)

    def images(epoch, seed):
        batch = next(train_loader(dataset, batch=4, seed=seed).epoch(epoch))
        return {int(k): image for k, image in zip(batch.ids, batch.images, strict=True)}

    same = images(1, 3)
    again = images(1, 3)
    assert all(torch.equal(same[k], again[k]) for k in same)
    for other in (images(2, 3), images(1, 4)):
        assert not any(torch.equal(same[k], other[k]) for k in same)


@pytest.mark.parametrize(("pages", "batch", "sizes"), [(12, 6, [6, 6]), (13, 6, [5, 4, 4]), (3, 6, [3])])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_image_comes_once_in_steps_of_nearly_one_size(pages, batch, sizes, world):
    """The steps do not depend on the number of ranks."""
    dataset = Digits("train", 64, pages=pages)
    loaders = [train_loader(dataset, rank=rank, world=world, batch=batch) for rank in range(world)]
    steps = list(zip(*(loader.epoch(0) for loader in loaders), strict=True))
    assert [sum(len(part.ids) for part in step) for step in steps] == sizes
    assert [part.global_size for step in steps for part in step[:1]] == sizes
    order = [k for step in steps for part in step for k in part.ids.tolist()]
    assert sorted(order) == list(range(pages))
    assert order != [k for loader in loaders[:1] for batch in loader.epoch(1) for k in batch.ids.tolist()]


KILLED = """
import os, signal, time
from trainer.config import Hyp
from trainer.data.loading.detection_loader import TrainLoader
from trainer.data.formats.digits import Digits

if __name__ == "__main__":
    loader = TrainLoader(
        Digits("train", 64, pages=8), imgsz=64, batch=1, rank=0, world=1, seed=0, workers=1, hyp=Hyp()
    )
    next(loader.epoch(0))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start_program(folder, text, **options):
    (folder / "program.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, str(folder / "program.py")], env=env, text=True, **options)


def test_workers_exit_with_a_killed_trainer(tmp_path):
    trainer = start_program(tmp_path, KILLED, start_new_session=True)
    assert trainer.wait(240) == -signal.SIGKILL
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(trainer.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(trainer.pid, signal.SIGKILL)
    pytest.fail("processes of a killed trainer are still there after 20 s")


def test_a_program_exits_while_workers_prefetch(tmp_path):
    text = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "print(time.monotonic())")
    program = start_program(tmp_path, text, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = program.communicate(timeout=240)
    assert (program.returncode, err) == (0, "")
    assert time.monotonic() - float(out) < 20  # the exit alone


THREADS = """
import os
import cv2, threadpoolctl, torch
import numpy as np
from trainer.data.loading.batch_sampler import BatchSpec
from trainer.data.loading.dataloader import BatchLoader, Collate

class Threads(Collate):
    def collate(self, spec):
        np.ones((500, 500)) @ np.ones((500, 500))  # OpenBLAS starts its threads when it first has work for them
        pools = [(pool["internal_api"], pool["num_threads"]) for pool in threadpoolctl.threadpool_info()]
        return [*pools, ("torch", torch.get_num_threads()), ("opencv", cv2.getNumThreads())]

if __name__ == "__main__":
    before = dict(os.environ)
    loader = BatchLoader(Threads(None), workers=1, batch_pixels=1, local_size=1)
    loader.start([BatchSpec(np.arange(1), (32, 32))])
    print(*(f"{name}={count}" for name, count in loader.take()))
    assert dict(os.environ) == before
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is one thread anyway")
def test_a_worker_computes_with_one_thread(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    program = start_program(tmp_path, THREADS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = program.communicate(timeout=240)
    assert (program.returncode, err) == (0, "")
    found = [word.split("=") for word in out.split()]
    assert {name for name, _ in found} >= {"openblas", "openmp", "torch", "opencv"}
    assert {count for _, count in found} == {"1"}, out


def test_loading_does_not_change_torchs_random_state():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(train_loader(Digits("train", 64, pages=6)).epoch(0))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_reported_with_its_hint(tmp_path, workers):
    dataset = open_dataset(str(make_yolo_set(tmp_path)), "train", imgsz=64)
    (tmp_path / "images/train/002.jpg").write_bytes(b"gone bad")
    loader = train_loader(dataset, workers=workers, batch=1, hyp=Hyp(mosaic=0.0))
    with pytest.raises(TrainerError, match=r"002\.jpg: cannot be decoded") as caught:
        list(loader.epoch(0))
    assert "\n" not in caught.value.message
    assert "replace the image" in caught.value.hint


def test_invalid_batch_and_imgsz_are_refused():
    dataset = Digits("train", 64, pages=4)
    with pytest.raises(TrainerError, match="--batch 2 is smaller than the number of ranks, 3"):
        train_loader(dataset, batch=2, world=3)
    with pytest.raises(TrainerError, match="4 training images in 1 steps of at most 8: too few for 5 ranks"):
        train_loader(dataset, batch=8, world=5)
    with pytest.raises(TrainerError, match="--imgsz 100 is not a multiple of 32") as caught:
        ValLoader(dataset, imgsz=100, batch=4, rank=0, world=1, workers=0)
    assert "--imgsz 96" in caught.value.hint


def test_workers_are_reduced_to_fit_shared_memory():
    batch = 10 << 20
    assert fit_workers(4, batch, 1, None) == (4, 3, "")
    assert fit_workers(4, batch, 1, 14 * batch) == (4, 3, "")
    # Two ranks share it: 7 batches, 2 of them in transit.
    assert fit_workers(4, batch, 2, 14 * batch) == (4, 1, "")
    workers, ahead, note = fit_workers(8, batch, 1, 64 << 20)  # Docker's default
    assert (workers, ahead) == (4, 1)
    assert "room for 64 MiB, but 8 workers on each of 1 ranks need 101 MiB: starting 4" in note
    assert fit_workers(8, batch, 8, 64 << 20)[0] == 0
    assert fit_workers(0, batch, 1, 0) == (0, 3, "")
    loader = ValLoader(Digits("train", 64, pages=4), imgsz=64000, batch=64, rank=0, world=1, workers=4)
    assert "--shm-size" in loader.notes[0]
    small = train_loader(Digits("train", 64, pages=4), workers=1)
    assert not small.notes
    assert len(list(small.epoch(0))) == 1


def test_mosaic_images_come_from_a_window_and_are_decoded_once():
    data = Photos(200)
    decoded = []
    data.image = lambda index, min_side=0: decoded.append(index) or Photos.image(data, index, min_side)
    loader = train_loader(data, batch=16, hyp=Hyp(mixup=0.3))
    assert sum(len(batch.ids) for batch in loader.epoch(0)) == 200
    assert len(decoded) < 1.25 * len(set(decoded))  # more than 2 without the window
    order = np.random.default_rng(0).permutation(1000)
    near = neighbours(order, np.arange(1000))
    assert all(index in window for index, window in zip(order, near, strict=True))
    assert {len(window) for window in near} == {64}
    assert set(np.concatenate(near).tolist()) == set(range(1000))
    assert len(neighbours(np.arange(3), np.arange(3))[0]) == 3


def test_workers_prefetch_the_next_epoch():
    data = Digits("train", 64, pages=16)
    loader = train_loader(data, workers=2, epochs=6)

    def fresh():
        return train_loader(data)

    for epoch, first in ((0, 0), (1, 0), (2, 0), (4, 1), (5, 0), (0, 2), (5, 0)):
        assert_equal(list(loader.epoch(epoch, first)), list(fresh().epoch(epoch, first)))
    for epoch in (1, 2):  # incomplete
        assert torch.equal(next(loader.epoch(epoch)).images, next(fresh().epoch(epoch)).images)


def test_rect_batches_have_similar_aspects_and_no_mosaics():
    data = Photos()
    loader = train_loader(data, batch=4, rect=True)
    epochs = [list(loader.epoch(e)) for e in (0, 1)]
    for batches in epochs:
        assert sorted(k for b in batches for k in b.ids.tolist()) == list(range(40))
        for batch in batches:
            aspects = [data.sizes[k][0] / data.sizes[k][1] for k in batch.ids.tolist()]
            height, width = batch.images.shape[1:3]
            assert max(height, width) == 64
            assert height == (32 if max(aspects) <= 0.5 else 64)
            assert width == (32 if min(aspects) >= 2 else 64)
        assert {b.images.shape[1:3] for b in batches} > {(64, 64)}
    assert [b.ids.tolist() for b in epochs[0]] != [b.ids.tolist() for b in epochs[1]]
    # The twenty images of 60 x 80 are shuffled in every epoch.
    assert {frozenset(b.ids.tolist()) for b in epochs[0]} != {frozenset(b.ids.tolist()) for b in epochs[1]}
    # Boxes stay in the middle of their images, and there is one image in each.
    still = Hyp(scale=0.0, translate=0.0, fliplr=0.0)
    for batch in train_loader(data, batch=4, rect=True, hyp=still).epoch(0):
        height, width = batch.images.shape[1:3]
        for k, _, cx, cy, w, h in batch.labels.tolist():
            rows, columns = data.sizes[int(batch.ids[int(k)])]
            ratio = 64 / max(rows, columns)
            assert (cx, cy) == pytest.approx((0.5, 0.5))
            assert (w * width, h * height) == pytest.approx((0.4 * columns * ratio, 0.6 * rows * ratio))


def test_image_weights_prefer_rare_classes_and_low_map():
    data = Photos(60)  # 20 images with one box of class 0, 20 with two boxes of class 1, 20 without any
    loader = train_loader(data, batch=6, image_weights=True)

    def drawn():
        ids = np.concatenate([b.ids.numpy() for e in range(10) for b in loader.epoch(e)])
        return np.bincount(ids % 3, minlength=3) / len(ids)

    assert drawn() == pytest.approx([0, 0.5, 0.5], abs=0.06)  # equal by their boxes
    loader.sampler.class_map = [0.8, 0.4]  # (0.2 / 0.6)^2
    assert drawn() == pytest.approx([0, 0.1, 0.9], abs=0.06)
    loader.sampler.class_map = [0.5, float("nan")]  # not measured: the mean of the others
    assert drawn() == pytest.approx([0, 0.5, 0.5], abs=0.06)
    loader.sampler.class_map = [1.0, 1.0]  # equal weights
    assert drawn() == pytest.approx([1 / 3] * 3, abs=0.06)


def test_an_image_drawn_twice_is_augmented_differently():
    batch = next(train_loader(Photos(6), batch=6, image_weights=True, hyp=Hyp(mosaic=0.0)).epoch(0))
    twice = [k for k in set(batch.ids.tolist()) if (batch.ids == k).sum() > 1]
    assert twice
    for k in twice:
        first, second = batch.images[batch.ids == k][:2]
        assert not torch.equal(first, second)


def test_close_mosaic_disables_mosaics_in_the_last_epochs():
    data = Photos(6)
    closing = train_loader(data, hyp=Hyp(mixup=0.5), close_mosaic=2, epochs=5)
    with_mosaic = train_loader(data, hyp=Hyp(mixup=0.5))
    without = train_loader(data, hyp=Hyp(mosaic=0.0))
    for epoch in range(5):
        assert_equal(closing.epoch(epoch), (with_mosaic if epoch < 3 else without).epoch(epoch))


@pytest.mark.parametrize("batch", [5, 32])
def test_validation_shapes_depend_on_the_dataset_alone(batch):
    data = Photos(100)
    pads = {}
    shapes = set()
    for world in (1, 3):
        for rank in range(world):
            loader = ValLoader(data, imgsz=128, batch=batch, rank=rank, world=world, workers=0)
            for b in loader:
                assert len(b.ids) <= batch
                shapes.add(tuple(b.images.shape[1:3]))
                for k, image, pad in zip(b.ids.tolist(), b.images, b.pads.tolist(), strict=True):
                    seen = pads.setdefault(k, (image.shape, pad))
                    assert seen == (image.shape, pad)
    assert len(pads) == 100
    # Images of 60 x 80 at 128 px: 3 strides, and half a one of border; in a group with squarer ones 4.
    assert rect_shape(np.array([0.75]), 128, 32, 0.5) == (128, 160)
    assert rect_shape(np.array([0.75]), 640, 32, 0.5) == (512, 672)  # as YOLOv5 does
    assert rect_shape(np.array([4 / 3]), 640, 32, 0.0) == (640, 480)
    assert rect_shape(np.array([0.5, 2.0]), 640, 64, 0.0) == (640, 640)
    assert len(shapes) > 1
    square = ValLoader(data, imgsz=128, batch=batch, rank=0, world=1, workers=0, rect=False)
    assert {b.images.shape[1:3] for b in square} == {(128, 128)}


@pytest.mark.parametrize(("pages", "world"), [(7, 1), (7, 2), (7, 3), (2, 3)])
def test_validation_has_every_image_once(pages, world):
    dataset = Digits("val", 64, pages=pages)
    ids = []
    for rank in range(world):
        loader = ValLoader(dataset, imgsz=64, batch=2, rank=rank, world=world, workers=0)
        batches = list(loader)
        assert len(batches) == len(loader)
        ids += [k for batch in batches for k in batch.ids.tolist()]
    assert sorted(ids) == list(range(pages))


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_images_map_back_to_the_originals(tmp_path, workers):
    dataset = open_dataset(str(make_yolo_set(tmp_path, val=5)), "val", imgsz=96)
    loader = ValLoader(dataset, imgsz=96, batch=3, rank=0, world=1, workers=workers)
    for _ in range(2):  # workers persist between passes
        seen = 0
        for batch in loader:
            assert batch.images.shape[1:] == (96, 128, 3)
            assert batch.images.dtype == torch.uint8
            assert batch.pads.dtype == torch.float32
            for image, index, shape, pad in zip(
                batch.images, batch.ids, batch.shapes, batch.pads.numpy(), strict=True
            ):
                original = dataset.image(int(index))
                assert shape == original.shape[:2] == dataset.size(int(index))
                rng = np.random.default_rng(seen)
                xy = rng.uniform(8, np.array(shape[::-1]) - 8, (20, 2))  # in the original
                x, y = np.floor(xy * pad[0] + pad[1:]).astype(int).T
                u, v = np.floor(xy).astype(int).T
                assert np.abs(image.numpy()[y, x].astype(int) - original[v, u]).mean() < 12
                seen += 1
        assert seen == 5


def test_a_batch_is_pinned_with_all_its_tensors(monkeypatch):
    """Record the calls of pin_memory(), which does nothing without a GPU."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append(self) or self.clone())
    batch = next(iter(ValLoader(Digits("val", 64, pages=6), imgsz=64, batch=2, rank=0, world=1, workers=0)))
    pinned = batch.pin_memory()
    assert [id(tensor) for tensor in asked] == [
        id(tensor) for tensor in (batch.images, batch.ids, batch.pads)
    ]
    assert pinned.images is not batch.images
    assert torch.equal(pinned.images, batch.images)
    assert pinned.shapes == batch.shapes


def test_a_loader_pins_memory_if_a_gpu_is_in_use(monkeypatch):
    loader = train_loader(Digits("train", 64, pages=6))
    assert not loader._open().pin_memory
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert loader._open().pin_memory
