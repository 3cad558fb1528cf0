"""The two painters make the same image of a recipe: OpenCV, and the GPU's kernel, here in Triton's interpreter.

The interpreter takes milliseconds for each block of pixels, so the images are small.
"""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.fake_gpu import simulated_gpus
from tests.unit.settings import settings
from tests.unit.test_augment import Trapezoids, every
from tests.unit.trainer_process import TINY, call, run
from tests.unit.yolo_folder import squares
from trainer.config import Hyp
from trainer.data.augment.device_painter import DevicePainter, choose_painter, pack
from trainer.data.augment.paint import paint
from trainer.data.augment.recipe import recipe_of
from trainer.data.cache.image_cache import Layout
from trainer.data.cache.resident_images import PASS, ResidentImages
from trainer.data.loading.detection_loader import TrainLoader
from trainer.data.registry import open_dataset
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError

CPU = torch.device("cpu")
SIDE = 160  # to which a cache decodes images; those of Scenes are too small to be reduced
KERNEL = "trainer.data.augment.paint_kernel"
#: Types of GPU that the kernel is compiled for, by compute capability: T4, A100, L4, H100, RTX 50.
GPUS = (75, 80, 89, 90, 120)
ALL = Hyp(degrees=30.0, mixup=1.0, copy_paste=0.5, flipud=0.5, perspective=0.001)


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Import the kernel with the variable that makes it run in the interpreter, and remove it afterwards."""
    importlib.import_module("triton.language")  # without the variable, as torch may have done in a trainer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        sys.modules.pop(KERNEL, None)
        yield
        sys.modules.pop(KERNEL, None)


class Scenes(Trapezoids):
    """Images with soft structures of all sizes, as photographs have, each with a trapezoid."""

    def image(self, index, min_side=0):
        height, width = self.sizes[index]
        rng = np.random.default_rng(index)
        image = np.zeros((height, width, 3), np.float32)
        for cells in (3, 9, 27):
            coarse = rng.uniform(0, 85, (cells, cells, 3)).astype(np.float32)
            image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        points = np.rint(self.corners * (width, height) - 0.5).astype(np.int32)
        return cv2.fillPoly(image.clip(0, 255).astype(np.uint8), [points], (200, 90, 40))


def recipes(data, hyp, shape=(64, 64), count=12):
    return [
        recipe_of(data, k % len(data), every(data), hyp, np.random.default_rng(k), shape)
        for k in range(count)
    ]


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
        (Hyp(), (64, 64)),
        (Hyp(mosaic=0.0), (40, 64)),
        (Hyp(mosaic=0.0, scale=0.2), (97, 65)),
        (Hyp(mosaic=0.5, mixup=0.5), (64, 64)),
        (Hyp(mosaic=0.5, fliplr=1.0, flipud=1.0), (64, 64)),
        (Hyp(hsv_h=0.3, hsv_s=0.9, hsv_v=0.9), (64, 64)),
        (Hyp(hsv_h=0.0, hsv_s=0.0, hsv_v=0.0), (64, 64)),
        (Hyp(degrees=20.0, shear=5.0), (64, 64)),
        (Hyp(perspective=0.001), (64, 64)),
        (Hyp(copy_paste=1.0, flipud=0.5), (64, 64)),
        (ALL, (64, 64)),
    ],
    ids=[
        *("default", "no mosaic", "odd size", "mixup", "flips", "colours", "no colours"),
        *("degrees", "perspective", "copy-paste", "all"),
    ],
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
        made = recipes(data, hyp, count=6)
        made += recipes(data, Hyp(mosaic=0.0), count=2)  # of a single layer
        painter = DevicePainter(CPU)
        for recipe, image in zip(made, painter(pack(made, data.image)), strict=True):
            assert torch.equal(painter(pack([recipe], data.image))[0], image)


def test_an_image_does_not_depend_on_the_size_of_the_blocks(monkeypatch):
    """On a GPU the blocks are smaller than in the interpreter, and most layers are elsewhere."""
    data = Scenes()
    packed = pack(recipes(data, ALL, (40, 65), count=3), data.image)
    whole = DevicePainter(CPU)(packed)
    monkeypatch.setattr("trainer.data.augment.device_painter._INTERPRETED_BLOCK", (8, 32))
    assert torch.equal(DevicePainter(CPU)(packed), whole)


def test_a_pool_may_exceed_2_gib():
    data = Scenes()
    packed = pack(recipes(data, ALL, count=2), data.image)
    beyond = 2**31 // 3 + 1
    pool = torch.empty(
        (beyond + len(packed.pixels), 3), dtype=torch.uint8
    )  # its first pages are never touched
    pool[beyond:] = packed.pixels
    moved = replace(packed, pixels=pool, table=packed.table.clone())
    moved.tables()[1].view(-1, 3)[:, 0] += beyond  # places
    assert torch.equal(DevicePainter(CPU)(moved), DevicePainter(CPU)(packed))


def test_resident_sources_give_the_same_images():
    data = Scenes()
    painter = DevicePainter(CPU)
    painter.resident = ResidentImages(
        data, Layout(data, SIDE), CPU, largest_batch=1, local_size=1, refused=print
    )
    painter.resident.open()
    for number, hyp in enumerate((Hyp(mixup=0.5), Hyp(degrees=20.0, copy_paste=1.0)), PASS):
        made = recipes(data, hyp)
        packed = pack(made, data.image, painter.resident.table, number)
        assert not packed.pixels.numel()
        assert torch.equal(painter(packed), DevicePainter(CPU)(pack(made, data.image)))


@pytest.mark.parametrize("cache", ["none", "ram"])
def test_a_loader_has_the_same_boxes_with_both_painters(cache, tmp_path):
    data = open_dataset(str(squares(tmp_path / "set", train=9)), "train", imgsz=64)
    loaders = []
    for painter in (None, DevicePainter(CPU)):
        loader = TrainLoader(
            data, imgsz=64, seed=0, hyp=Hyp(mixup=0.5), batch=4, rank=0, world=1, workers=0, painter=painter
        )
        loader.cache(cache, [], World(), lambda value: [value], 1, print)
        loaders.append(loader)
    for workers, device in zip(*(loader.epoch(0) for loader in loaders), strict=True):
        assert torch.equal(workers.labels, device.labels)
        assert torch.equal(workers.ids, device.ids)
        assert ((workers.images.int() - device.images.int()).abs() <= 2).float().mean() >= 0.99
    assert len(workers.labels)


def test_a_tile_whose_bounds_alone_are_visible_paints_nothing():
    """Turned tiles, of which a corner of the box around them reaches the result."""
    data = Scenes()
    hyp = Hyp(degrees=45.0, scale=0.9, translate=0.4)
    for seed in range(3):
        made = [
            recipe_of(data, k % 6, every(data), hyp, np.random.default_rng([seed, k]), (64, 64))
            for k in range(16)
        ]
        assert (difference(data, made) <= 2).mean() >= 0.99


def test_an_image_without_a_visible_layer_is_gray():
    data = Scenes()
    hyp = Hyp(mosaic=0.0, translate=9.0, mixup=1.0)
    made = [each for each in recipes(data, hyp) if not any(each.scenes)]
    assert made
    assert difference(data, made).max() == 0


def test_without_a_gpu_the_device_does_not_paint(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert choose_painter("auto", CPU) == (None, "")
    data = squares(tmp_path / "set")
    words = ["--data", str(data), "--device", "cpu", "--augment-on", "device", "--epochs", "1"]
    ended = run(tmp_path, "train", *words, code=2)
    assert "the kernel that paints the images needs a GPU" in ended.stderr
    assert "--augment-on workers" in ended.stderr
    assert "Traceback" not in ended.stderr


def start_on_simulated_gpu(data):
    """Start a training whose GPU Triton cannot use, and print where the images are painted."""
    gpu = torch.device("cuda", 0)
    os.environ.pop("CC", None)
    with simulated_gpus():
        training = Trainer(settings(data=data, cfg=TINY, hyp=Hyp()), World(), gpu, Events({}))
        print("painted on", next(training.train_loader.epoch(0, 0)).images.device)
        with pytest.raises(TrainerError, match="C compiler") as error:
            choose_painter("device", gpu)
        print(error.value.hint)


def test_on_a_gpu_that_triton_cannot_use_the_workers_paint(tmp_path):
    """Triton compiles a module for the driver before it opens a GPU, so the missing compiler is its first error."""
    data = squares(tmp_path / "set")
    without = {
        "PATH": "/nowhere",
        "TRITON_LIBCUDA_PATH": "/nowhere",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    (ended,) = call(start_on_simulated_gpu, tmp_path, [{**without, "TRITON_INTERPRET": "0"}], str(data))
    *notes, device, hint = ended.stdout.splitlines()
    (note,) = (line for line in notes if "the dataloader workers paint" in line)
    assert "cuda:0" in note
    assert "C compiler" in note
    assert device == "painted on cpu"
    assert "--augment-on workers" in hint


def compile_for_gpus():
    """Compile the kernel for each type of GPU, and print its registers and the bytes that are spilled to memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainer.data.augment.device_painter import _BLOCK
    from trainer.data.augment.paint_kernel import paint_batch

    kinds = dict.fromkeys(("images", "pool", "masks"), "*u8") | dict.fromkeys(("ranges", "places"), "*i64")
    kinds |= dict.fromkeys(("changes", "maps"), "*fp32") | dict.fromkeys(("height", "width"), "i32")
    signature = {name: kinds.get(name, "constexpr") for name in paint_batch.arg_names}
    block = dict(zip(("ROWS", "COLUMNS"), _BLOCK, strict=True))
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for gpu in GPUS:
        source = ASTSource(paint_batch, signature, block)
        how = {"num_warps": 4, "enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=how)
        Path("kernel.cubin").write_bytes(made.asm["cubin"])
        words = [dump, "--dump-resource-usage", "kernel.cubin"]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        print(gpu, *(word for word in usage.split() if word.startswith(("REG:", "STACK:", "LOCAL:"))))


def test_the_kernel_compiles_for_each_gpu_without_spills(tmp_path):
    """ptxas is in triton's package, and needs no GPU."""
    more = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    (ended,) = call(compile_for_gpus, tmp_path, [more])
    print(ended.stdout)
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [int(gpu) for gpu, *_ in lines] == list(GPUS)
    for _, registers, *spilled in lines:
        assert (
            int(registers.removeprefix("REG:")) <= 64
        )  # a multiprocessor of 65,536 has room for 1,024 threads
        assert spilled == ["STACK:0", "LOCAL:0"]
