"""The two painters make the same image of a recipe: OpenCV, and torch, here on the CPU."""

import cv2
import numpy as np
import pytest
import torch

from tests.unit.test_augment import Trapezoids, every
from trainer.config import Hyp
from trainer.data.augment import recipe_of
from trainer.data.device_painter import DevicePainter, pack
from trainer.data.image_cache import Layout
from trainer.data.paint import paint
from trainer.data.resident_images import PASS, ResidentImages

CPU = torch.device("cpu")


class Scenes(Trapezoids):
    """Images with soft structures of all sizes, as photographs have, each with a trapezoid."""

    def image(self, index, min_side=0):
        height, width = self.sizes[index]
        rng, image = np.random.default_rng(index), np.zeros((height, width, 3), np.float32)
        for cells in (3, 9, 27):
            coarse = rng.uniform(0, 85, (cells, cells, 3)).astype(np.float32)
            image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        points = np.rint(self.corners * (width, height) - 0.5).astype(np.int32)
        return cv2.fillPoly(image.clip(0, 255).astype(np.uint8), [points], (200, 90, 40))


def recipes(data, hyp, shape=(160, 160), count=24):
    return [recipe_of(data, k % len(data), every(data), hyp, np.random.default_rng(k), shape) for k in range(count)]


def painted(data, made):
    images = np.empty((len(made), made[0].height, made[0].width, 3), np.uint8)
    for recipe, out in zip(made, images, strict=True):
        paint(recipe, data.image, out)
    return images


def difference(data, made):
    return np.abs(painted(data, made).astype(int) - DevicePainter(CPU)(pack(made, data.image)).numpy())


@pytest.mark.parametrize(
    ("hyp", "shape"),
    [
        (Hyp(), (160, 160)),
        (Hyp(mosaic=0.0), (96, 160)),
        (Hyp(mosaic=0.5, mixup=0.5), (160, 160)),
        (Hyp(degrees=20.0, shear=5.0), (160, 160)),
        (Hyp(perspective=0.001), (160, 160)),
        (Hyp(copy_paste=1.0, flipud=0.5), (160, 160)),
        (Hyp(degrees=30.0, mixup=1.0, copy_paste=0.5, flipud=0.5), (160, 160)),
    ],
    ids=["default", "no mosaic", "mixup", "degrees", "perspective", "copy-paste", "all"],
)
def test_both_painters_agree_within_two_gray_levels(hyp, shape):
    data = Scenes()
    near = (difference(data, recipes(data, hyp, shape)) <= 2).mean((1, 2, 3))
    print(f"within 2: {near.mean():.4%} of all pixels, {near.min():.2%} of the worst image")
    assert near.mean() >= 0.99
    assert near.min() >= 0.96


def test_an_image_does_not_depend_on_its_batch():
    data = Scenes()
    for hyp in (Hyp(mixup=0.5), Hyp(copy_paste=0.2), Hyp(degrees=20.0, copy_paste=0.2, mixup=0.5)):
        made = recipes(data, hyp, count=12)
        whole = DevicePainter(CPU)(pack(made, data.image))
        # Alone, a batch can be upright or without mixup, and takes another path.
        for recipe, image in zip(made, whole, strict=True):
            assert torch.equal(DevicePainter(CPU)(pack([recipe], data.image))[0], image)


def test_resident_sources_give_the_same_images():
    data, painter = Scenes(), DevicePainter(CPU)
    painter.resident = ResidentImages(data, Layout(data, 160), CPU, largest_batch=1, local_size=1, refused=print)
    painter.resident.open()
    for number, hyp in enumerate((Hyp(mixup=0.5), Hyp(degrees=20.0), Hyp(mosaic=0.0)), PASS):
        made = recipes(data, hyp)
        packed = pack(made, data.image, painter.resident.table, number)
        assert not packed.pixels.numel()
        assert len(packed.uploads.images) == (len(data) if number == PASS else 0)
        assert torch.equal(painter(packed), DevicePainter(CPU)(pack(made, data.image)))


def test_a_tile_whose_bounds_alone_are_visible_paints_nothing():
    """Turned tiles, of which a corner of the box around them reaches the result."""
    data = Scenes()
    for seed in range(20):
        hyp = Hyp(degrees=45.0, scale=0.9, translate=0.4)
        made = [recipe_of(data, k % 6, every(data), hyp, np.random.default_rng([seed, k]), (64, 64)) for k in range(8)]
        assert (difference(data, made) <= 2).mean() >= 0.99


def test_the_host_never_waits_for_the_device():
    """On the device "meta", which has no values, a wait is an error."""
    data, meta = Scenes(), torch.device("meta")
    for hyp in (Hyp(mixup=0.5), Hyp(degrees=20.0, perspective=0.001, copy_paste=1.0)):
        images = DevicePainter(meta)(pack(recipes(data, hyp), data.image))
        assert (images.device, tuple(images.shape)) == (meta, (24, 160, 160, 3))
