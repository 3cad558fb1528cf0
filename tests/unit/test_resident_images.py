"""Images that stay on the training device: whatever a batch samples there are the decoded images, and each goes once.

The painter of these tests paints nothing. It compares the places of a batch's sources in the pool with the images.
"""

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from tests.unit.yolo_folder import make_yolo_set, write_image
from trainer.config import Hyp
from trainer.data.augment.device_painter import DevicePainter
from trainer.data.cache import image_cache, resident_images
from trainer.data.cache.image_cache import Layout
from trainer.data.cache.resident_images import PASS, ResidentImages, ResidentTable
from trainer.data.loading import dataloader
from trainer.data.loading.detection_loader import TrainLoader
from trainer.data.registry import open_dataset
from trainer.distributed.comm import World
from trainer.errors import TrainerError

CPU = torch.device("cpu")
SIDE = 32
COUNT = 100  # more than the window of a mosaic


class SourceChecker(DevicePainter):
    """Compares the sources of each batch in the pool with the decoded images, and records what a batch brings."""

    def __init__(self):
        self.device, self.resident = CPU, None  # without a kernel
        self.expected = []  # the decoded images
        self.uploads = []  # of each batch: the numbers of its images, None if its pool travels with it

    def __call__(self, painting):
        assert (painting.uploads is None) == bool(painting.pixels.numel())
        self.uploads.append(None)
        if painting.uploads:
            self.resident.receive(painting.uploads)
            self.uploads[-1] = painting.uploads.images[:, 0].tolist()
            firsts = np.array([self.resident.table.first_pixel(k) for k in range(len(self.expected))])
            for first, stride in painting.tables()[1].view(-1, 3)[:, :2].unique(dim=0).tolist():
                image = self.expected[int(np.searchsorted(firsts, first))]
                assert stride == image.shape[1]
                found = self.resident.pixels[first : first + image.shape[0] * stride]
                np.testing.assert_array_equal(found.numpy().reshape(image.shape), image)
        return torch.zeros((painting.images, *painting.shape, 3), dtype=torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of many sizes: rotated by EXIF, and decoded at a half or a quarter, rounded up (JPEG) or down (PNG)."""
    root = tmp_path_factory.mktemp("set")
    path = make_yolo_set(root, train=COUNT - 20)
    for k in range(20):
        file = root / f"images/train/big{k:02}.{'jpg' if k % 2 else 'png'}"
        write_image(file, height=65 + 3 * k, width=129 + 5 * k, seed=k)
        if k % 4 == 1:
            exif = Pillow.Exif()
            exif[0x0112] = 6  # a quarter turn
            Pillow.open(file).save(file, exif=exif)
    return path


def loader_of(path, kind="auto", painter=None, workers=0, rank=0, world=1, opened=True, say=print, **options):
    data = open_dataset(str(path), "train", imgsz=SIDE)
    options = {"hyp": Hyp(mosaic=0.7, mixup=0.3), "batch": 6, **options}
    share = {"rank": rank, "world": world, "workers": workers}
    loader = TrainLoader(data, imgsz=SIDE, seed=0, painter=painter or SourceChecker(), **share, **options)
    painter = loader._painter
    painter.expected = [data.image(k, loader._collate.min_side) for k in range(len(data))]
    loader.cache(kind, [Path(path).parent], World(), lambda value: [value], 1, say)
    if opened:
        painter.resident.open()
    return loader


def test_the_images_of_this_file_have_all_kinds_of_sizes(folder):
    data = open_dataset(str(folder), "train", imgsz=SIDE)
    layout = Layout(data, SIDE)
    shapes = [data.image(k, SIDE).shape for k in range(COUNT)]
    assert len(set(shapes)) > 30
    exact = [
        height * width == room for (height, width, _), room in zip(shapes, np.diff(layout.first), strict=True)
    ]
    assert 5 <= exact.count(False) <= 15  # PNG
    assert any(np.subtract(*shape[:2]) > 20 for shape in shapes)  # rotated


def repeats_of(uploads):
    """Return for each image that travels again after how many batches it does so."""
    last = {}
    again = []
    for number, images in enumerate(uploads):
        assert len(images) == len(set(images))
        again += [number - last[k] for k in images if k in last]
        last |= dict.fromkeys(images, number)
    return again


def in_flight(loader):
    return loader._workers * loader._prefetch


OPTIONS = [{}, {"multi_scale": True}, {"rect": True}, {"image_weights": True}]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "options"), [("auto", options) for options in OPTIONS] + [("ram", {}), ("disk", {})], ids=str
)
def test_every_batch_finds_its_sources_in_the_pool(folder, kind, workers, options):
    loader = loader_of(folder, kind, workers=workers, **options)
    plain = loader_of(folder, "none", workers=0, opened=False, **options)
    for epoch in range(3):
        for batch, same in itertools.zip_longest(loader.epoch(epoch), plain.epoch(epoch)):
            assert torch.equal(batch.labels, same.labels)
            assert torch.equal(batch.ids, same.ids)
    again = repeats_of(loader._painter.uploads)
    assert all(0 < later <= in_flight(loader) for later in again)
    assert again == [] or workers
    assert len({k for batch in loader._painter.uploads for k in batch}) > COUNT / 2
    assert plain._painter.uploads == [None] * 3 * loader.steps


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_takes_what_its_batches_need(folder, workers):
    for rank in range(2):
        loader = loader_of(folder, workers=workers, rank=rank, world=2)
        for epoch in range(3):
            list(loader.epoch(epoch))
        uploads = loader._painter.uploads
        assert all(later <= in_flight(loader) for later in repeats_of(uploads))
        first, later = (
            {k for batch in part for k in batch}
            for part in (uploads[: loader.steps], uploads[loader.steps :])
        )
        assert later - first  # a mosaic of another epoch draws other images


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_goes_back_or_resumes_finds_its_sources(folder, workers):
    """The batches that were prefetched and dropped have taken nothing to the device."""
    loader = loader_of(folder, workers=workers)
    for epoch, first, count in (
        (0, 7, 4),
        (0, 7, 3),
        (0, 0, 9),
        (2, 16, 1),
        (0, 0, 17),
        (1, 3, 5),
        (1, 0, 17),
    ):
        batches = list(itertools.islice(loader.epoch(epoch, first), count))
        assert len(batches) == min(count, loader.steps - first)
    loader.close()  # other workers
    list(loader.epoch(1))
    seen = {k for batch in loader._painter.uploads[: -loader.steps] for k in batch}
    assert len(seen) > 0.9 * COUNT
    assert not seen & {k for batch in loader._painter.uploads[-loader.steps :] for k in batch}


def test_after_a_batch_that_was_not_painted_its_images_travel_again(folder):
    loader = loader_of(folder)
    painter = loader._painter
    painting = type(painter).__call__
    calls = itertools.count()

    class Failing(SourceChecker):
        def __call__(self, batch):
            if next(calls) == 2:
                raise RuntimeError("CUDA out of memory")
            return painting(self, batch)

    painter.__class__ = Failing
    with pytest.raises(RuntimeError):
        list(loader.epoch(0))
    list(loader.epoch(0, 3))
    list(loader.epoch(1))
    assert next(calls) == 3 + 14 + 17


def test_an_image_counts_as_present_only_when_it_has_been_copied(folder):
    loader = loader_of(folder)
    resident = loader._painter.resident
    table = loader._collate.resident
    uploads = table.uploads([3, 4], PASS, loader._collate.image)

    class Lost:
        def __getitem__(self, _):
            raise RuntimeError("CUDA error")

    pool = resident.pixels
    resident.pixels = Lost()
    with pytest.raises(RuntimeError):
        resident.receive(uploads)
    resident.pixels = pool
    again = table.uploads([3, 4], 2 * PASS, loader._collate.image)
    assert again.images[:, 0].tolist() == [3, 4]
    resident.receive(again)
    assert not len(table.uploads([3, 4], 3 * PASS, loader._collate.image).images)


def test_a_batch_relies_on_earlier_batches_of_its_pass_only(folder):
    data = open_dataset(str(folder), "train", imgsz=SIDE)
    table = ResidentTable(data, Layout(data, SIDE))
    other = pickle.loads(pickle.dumps(table))  # as in another worker

    def taken(table, needed, number):
        uploads = table.uploads(needed, number, lambda k: data.image(k, SIDE))
        assert uploads.images[:, 1].tolist() == [
            np.prod(data.image(k, SIDE).shape[:2]) for k in uploads.images[:, 0]
        ]
        return uploads.images[:, 0].tolist()

    assert taken(table, [5, 2], PASS + 4) == [5, 2]
    assert taken(other, [2, 3, 5], PASS + 5) == [3]
    assert taken(other, [2, 3], PASS + 4) == [2, 3]  # also what is claimed by the batch of this number
    assert taken(table, [2, 9], PASS + 3) == [2, 9]
    assert taken(table, [2, 3, 9], PASS + 9) == []
    assert taken(table, [2], 2 * PASS) == [2]
    table.mark([3])
    assert taken(other, [2, 3, 9], 3 * PASS) == [2, 9]


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (None, (480, 640), "decoded to 640 x 480 px, but it had 72 x 48 px"),  # no room for it
        ((24, 36), (36, 24), "decoded to 24 x 36 px, but it had 36 x 24 px"),
        ((24, 36), (20, 30), "decoded to 30 x 20 px, but it had 36 x 24 px"),
    ],
)
def test_an_image_whose_size_changes_during_the_training_is_an_error(tmp_path, first, later, message):
    data = open_dataset(str(make_yolo_set(tmp_path)), "train", imgsz=SIDE)
    table = ResidentTable(data, Layout(data, SIDE))
    if first:
        table.uploads([1], PASS, lambda _: np.zeros((*first, 3), np.uint8))
    with pytest.raises(TrainerError, match=rf"001\.jpg: {message}") as caught:
        table.uploads([1], 2 * PASS, lambda _: np.zeros((*later, 3), np.uint8))
    assert "start the command again" in caught.value.hint


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_decoded_is_named(tmp_path, workers):
    path = make_yolo_set(tmp_path)
    loader = loader_of(path, workers=workers, batch=1, hyp=Hyp(mosaic=0.0))
    (tmp_path / "images/train/002.jpg").write_bytes(b"gone bad")
    with pytest.raises(TrainerError, match=r"002\.jpg: cannot be decoded") as caught:
        list(loader.epoch(0))
    assert "replace the image" in caught.value.hint


@pytest.mark.parametrize("options", [*OPTIONS, {"hyp": Hyp(mixup=1.0)}, {"batch": 2}], ids=str)
def test_no_batch_needs_more_shared_memory_than_was_reserved_for_it(folder, options):
    loader = loader_of(folder, **options)
    most = 0
    for spec in itertools.islice(loader.sampler.specs_from(0, 0), loader.steps):
        painting = loader._collate.collate(spec).images
        most = max(most, painting.uploads.pixels.nbytes)
        loader._painter.resident.table._states[:] = 0  # as if nothing had been taken before
    assert 0 < most <= loader._batch_pixels * loader._collate.channels


def test_with_a_full_shared_memory_the_training_process_packs(folder, monkeypatch):
    monkeypatch.setattr(dataloader.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 16}))
    loader = loader_of(folder, workers=2)
    assert "--shm-size" in loader.notes[0]
    list(loader.epoch(0))
    assert loader._workers == 0
    assert None not in loader._painter.uploads


def test_the_pool_opens_after_the_first_steps(folder):
    said = []
    loader = loader_of(folder, opened=False, say=said.append)
    for epoch in range(3):
        list(loader.epoch(epoch))
    uploads = loader._painter.uploads
    assert [k for k, images in enumerate(uploads) if images is None] == [0, 1, 2]
    assert repeats_of(uploads[3:]) == []
    assert len(said) == 1
    assert "images stay on cpu" in said[0]


def test_without_room_beside_the_training_the_images_stay_in_memory(folder, monkeypatch):
    said = []
    free = 2**40
    monkeypatch.setattr(resident_images, "memory_free", lambda: free)
    loader = loader_of(folder, opened=False, say=said.append)
    free = 2 * loader._collate.layout.nbytes - 2
    for epoch in range(2):
        list(loader.epoch(epoch))
    assert loader._painter.uploads == [None] * 2 * loader.steps
    assert loader._collate.cached._shapes.all()
    assert len(said) == 2
    assert "images do not stay on cpu beside the training" in said[1]
    assert "images are cached in memory" in said[1]


def test_too_many_images_for_the_device_are_cached_in_memory_or_not_at_all(folder, monkeypatch):
    said = []
    monkeypatch.setattr(resident_images, "memory_free", lambda: 1)
    loader = loader_of(folder, opened=False, say=said.append)
    assert loader._painter.resident is None
    assert "images are cached in memory" in said[0]
    assert "do not stay on cpu" in said[0]
    monkeypatch.setattr(image_cache, "memory_free", lambda: 1)
    assert loader_of(folder, opened=False, say=said.append)._collate.cached is None
    assert "images are not cached" in said[1]
    assert "do not stay on cpu" in said[1]


@pytest.mark.parametrize(
    ("fits", "message"),
    [
        ([True, True, True], "images stay on cpu: decoded"),
        ([True, False, True, False], "images stay on cpu (not on the devices of ranks 1, 3): decoded"),
        ([False, False, True], "; they do not stay on cpu (but on the devices of ranks 2): decoded"),
    ],
)
def test_the_message_names_the_ranks_whose_devices_differ(folder, monkeypatch, fits, message):
    said = []
    if not fits[0]:
        monkeypatch.setattr(resident_images, "memory_free", lambda: 1)
    loader = loader_of(folder, "none", opened=False)

    def exchange(value):
        return [value, *(fits[1:] if isinstance(value, bool) else [])]

    loader.cache("auto", [], World(), exchange, 1, said.append)
    assert len(said) == 1
    assert message in said[0]


def test_the_pool_leaves_what_the_largest_batch_needs(folder, monkeypatch):
    """With --multi-scale the first steps may be small ones."""
    data = open_dataset(str(folder), "train", imgsz=SIDE)
    for name, value in (("mem_get_info", (60, 80)), ("memory_reserved", 15), ("max_memory_reserved", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    sizes = {"largest_batch": 900, "local_size": 2}
    resident = ResidentImages(data, Layout(data, SIDE), torch.device("cuda", 0), refused=print, **sizes)
    assert resident.free() == 60  # before the first step
    resident.step_done(400)
    resident.step_done(300)
    assert resident.free() == 60 + 15 - 20 * 900 / 400
    resident._seen = 900
    assert resident.free() == 60 + 15 - 20


def test_ranks_on_cpus_share_the_memory_of_their_node(folder, monkeypatch):
    data = open_dataset(str(folder), "train", imgsz=SIDE)
    monkeypatch.setattr(resident_images, "memory_free", lambda: 2**30)
    resident = ResidentImages(data, Layout(data, SIDE), CPU, largest_batch=1, local_size=4, refused=print)
    assert resident.free() == 2**28


@pytest.mark.parametrize(
    ("kind", "local_size", "both"), [("auto", 1, False), ("auto", 2, True), ("ram", 1, True)]
)
def test_a_second_copy_in_memory_is_for_several_ranks(folder, kind, local_size, both):
    loader = loader_of(folder, "none", opened=False)
    loader.cache(
        kind, [], World(local_size=local_size, size=local_size), lambda value: [value] * local_size, 1, print
    )
    loader._painter.resident.open()
    list(loader.epoch(0))
    stored = loader._collate.cached._shapes.all(1).sum()
    assert stored > 0.9 * COUNT if both else not stored


@pytest.mark.parametrize("kind", ["auto", "ram"])
@pytest.mark.parametrize("fits", [True, False])
def test_a_filled_cache_needs_no_file(tmp_path, monkeypatch, kind, fits):
    path = make_yolo_set(tmp_path, train=12)
    if not fits:
        monkeypatch.setattr(resident_images, "memory_free", lambda: 1)
    loader = loader_of(path, kind, opened=False)
    loader.fill_cache(World(), lambda value: [value], 2)
    for file in (tmp_path / "images/train").iterdir():
        file.write_bytes(b"gone")
    for epoch in range(2):
        list(loader.epoch(epoch))
    assert loader._painter.uploads == ([[]] if fits else [None]) * 2 * loader.steps
