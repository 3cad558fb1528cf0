"""Segmentation: trainings from the command line, and its datasets, models and loss."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import tv_tensors

from tests.unit.settings import settings
from tests.unit.test_classification import table
from tests.unit.trainer_process import ranks, start, wait
from trainer.config import Hyp
from trainer.data.formats.segmentation import MaskFolder, open_segmentation
from trainer.data.loading.torchvision_loaders import (
    mask_transform,
)
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError
from trainer.losses.criterion import mean_terms
from trainer.losses.cross_entropy import SegmentationLoss
from trainer.metrics.confusion import Confusion
from trainer.models.torchvision_nets import build_segmenter
from trainer.plots import segment
from trainer.tasks import open_task
from trainer.weights import checkpoint_file

COLOURS = ((30, 30, 30), (40, 220, 40), (40, 40, 220))  # BGR of each class; the first is the background
LRASPP = "lraspp_mobilenet_v3_large"
QUICK = ("--task", "segment", "--device", "cpu", "--imgsz", "64", "--workers", "0", "--precision", "fp32")


def folders(root: Path, train: int = 7, val: int = 3) -> Path:
    """Two coloured rectangles on a dark ground in images of 80 x 64 px, with a strip that does not count."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for k in range(count):
            mask = np.zeros((64, 80), np.uint8)
            for cls, left in ((1, 0), (2, 40)):
                x = left + rng.integers(0, 8)
                y = rng.integers(0, 24)
                mask[y : y + 36, x : x + 32] = cls
            image = np.array(COLOURS, np.uint8)[mask] + rng.integers(0, 30, (64, 80, 3), np.uint8)
            mask[:3] = 255
            cv2.imwrite(str(root / "images" / split / f"{k}.png"), image)
            Image.fromarray(mask).save(root / "masks" / split / f"{k}.png")
    return root


def loader(data: Path, rank: int, world: int, hyp: Hyp, split: str = "train") -> Any:
    task = open_task(settings(str(data), "segment", batch=5, seed=1, hyp=hyp))
    place: dict[str, Any] = {"rank": rank, "world": world, "local_size": world, "workers": 0, "stride": 16}
    return task.train_loader(place, torch.device("cpu")) if split == "train" else task.val_loader(place)


def test_segmentation_learns_and_two_ranks_score_like_one(tmp_path: Path) -> None:
    data = folders(tmp_path / "data", train=24)
    (data / "classes.txt").write_text("ground\ngreen\nred\n")
    (tmp_path / "hyp.yaml").write_text("lr0: 0.004\nwarmup_epochs: 0\nscale: 0.2\n")
    options = ("--data", str(data), "--batch", "6", "--epochs", "12", "--optimizer", "AdamW")
    options += ("--hyp", "hyp.yaml", "--val-period", "12", "--project", "runs")
    code, out, err = wait(start(tmp_path, ranks(1), "train", *QUICK, *options, plots=True))[0]
    assert code == 0, err
    assert "mIoU" in out.splitlines()[-1]
    names = ["ground", "green", "red"]
    assert [line.split()[0] for line in out.splitlines() if line.strip().startswith(tuple(names))] == names
    rows = table(tmp_path / "runs/train/results.csv")
    assert len(rows) == 12
    assert rows[-1]["cls_loss"] < rows[0]["cls_loss"] / 2
    assert rows[-1]["miou"] > 0.6
    assert rows[-1]["accuracy"] > 0.7
    for name in ("labels.png", "train_batch0.jpg", "predictions.jpg", "confusion_matrix.png", "results.png"):
        assert cv2.imread(str(tmp_path / "runs/train" / name)) is not None, name
    content = torch.load(tmp_path / "runs/train/best.pt", weights_only=True)
    assert (content["task"], content["cfg"]) == ("segment", {"torchvision": "lraspp_mobilenet_v3_large"})
    best = str(tmp_path / "runs/train/best.pt")
    asked = ("--weights", best, "--data", str(data), "--device", "cpu", "--precision", "fp32", "--batch", "2")
    code, out, err = wait(start(tmp_path, ranks(2), "val", *asked, "--json"))[0]
    assert code == 0, err
    scores = json.loads(out)
    assert scores["miou"] == pytest.approx(rows[-1]["miou"], abs=2e-3)
    assert list(scores["per_class"]) == names
    with pytest.raises(TrainerError, match="trained with --task segment, not classify"):
        open_task(settings("digits", "classify", weights=best))


def test_without_validation_no_validation_images_are_needed(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    for kind in ("images", "masks"):
        shutil.rmtree(data / kind / "val")
    arguments = ("train", *QUICK, "--data", str(data), "--batch", "4", "--epochs", "1")
    assert wait(start(tmp_path, ranks(1), *arguments))[0].returncode == 2
    done = wait(start(tmp_path, ranks(1), *arguments, "--noval"))[0]
    assert done.returncode == 0, done


@pytest.mark.parametrize("size", [(2, 700), (700, 2), (1, 64), (3, 1)])
def test_an_elongated_image_keeps_a_pixel(tmp_path: Path, size: tuple[int, int]) -> None:
    data = folders(tmp_path / "data")
    mask = np.zeros(size, np.uint8)
    half = max(size) // 2
    mask[(slice(half, None), slice(None)) if size[0] > size[1] else (slice(None), slice(half, None))] = 1
    for split in ("train", "val"):
        cv2.imwrite(str(data / "images" / split / "long.png"), np.full((*size, 3), 200, np.uint8))
        Image.fromarray(mask).save(data / "masks" / split / "long.png")
    for hyp in (Hyp(mosaic=0.0, scale=0.0), Hyp(mosaic=0.0, scale=0.9)):
        batches = list(loader(data, 0, 1, hyp).epoch(0))
        assert sum(len(batch.ids) for batch in batches) == 8
    found = {
        int(k): m
        for batch in loader(data, 0, 1, Hyp(mosaic=0.0), "val")
        for k, m in zip(batch.ids, batch.masks, strict=True)
    }
    task = open_task(settings(str(data), "segment"))
    (long,) = (k for k in range(len(task.val_set)) if task.val_set.name(k) == "long.png")
    assert set(found[long].unique().tolist()) == {0, 1, 255}


def test_verify_finds_the_gradients_of_ranks_equal(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    mask = (
        tmp_path / "data/masks/train/3.png"
    )  # one image counts little: the mean is not one of the ranks' means
    half = np.array(Image.open(mask))
    half[:, 20:] = 255
    Image.fromarray(half).save(mask)
    arguments = ("--task", "segment", "--data", str(data), "--imgsz", "64", "--batch", "5")
    done = wait(start(tmp_path, [{}], "verify", *arguments, "--ranks", "1,2", "--steps", "2", "--json"))[0]
    assert done[0] == 0, done
    found = json.loads(done[1])["differences"]
    assert max(d["gradient_off"] for d in found) < 1e-5


def test_a_batch_is_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    data = folders(tmp_path, train=11)
    hyp = Hyp(mosaic=0.0, scale=0.5, fliplr=0.5, flipud=0.5)
    for number in range(3):
        whole = list(loader(data, 0, 1, hyp).epoch(1))[number]
        parts = [list(loader(data, rank, 3, hyp).epoch(1))[number] for rank in range(3)]
        assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
        assert torch.equal(whole.masks, torch.cat([part.masks for part in parts]))


def test_image_and_mask_are_moved_together(tmp_path: Path) -> None:
    data = folders(tmp_path)
    seen = set()
    for epoch in range(4):
        for batch in loader(data, 0, 1, Hyp(mosaic=0.0, scale=0.5, fliplr=0.5, flipud=0.5)).epoch(epoch):
            for image, mask in zip(batch.images.numpy(), batch.masks.numpy(), strict=True):
                seen.add(float((mask == 1).mean()))
                for cls, colour in enumerate(COLOURS):
                    inside = cv2.erode((mask == cls).astype(np.uint8), np.ones((5, 5), np.uint8)).astype(bool)
                    if inside.any():
                        assert image[inside].mean(0) == pytest.approx(np.add(colour[::-1], 14.5), abs=12)
    assert len(seen) > 15  # in another size or crop every time


def test_image_and_mask_are_mirrored() -> None:
    source = tv_tensors.Image(torch.arange(64 * 64 * 3).remainder(251).to(torch.uint8).view(3, 64, 64))
    truth = tv_tensors.Mask(torch.arange(64 * 64).remainder(7).to(torch.uint8).view(64, 64))
    for hyp, side in ((Hyp(scale=0.0, fliplr=1.0), -1), (Hyp(scale=0.0, fliplr=0.0, flipud=1.0), -2)):
        image, mask = mask_transform(64, hyp)(source, truth)
        assert torch.equal(image, source.flip(side))
        assert torch.equal(mask, truth.flip(side))


def test_deeplab_refuses_batches_of_one_image(tmp_path: Path) -> None:
    data = str(folders(tmp_path))
    for cfg, refused in (("deeplabv3_mobilenet_v3_large", True), (LRASPP, False)):
        config = settings(data, "segment", cfg=cfg, batch=1)
        with (
            pytest.raises(TrainerError, match="batch norm cannot compute the variance")
            if refused
            else nullcontext()
        ):
            Trainer(config, World(), torch.device("cpu"), Events({}))


def test_validation_has_whole_images_each_on_one_rank(tmp_path: Path) -> None:
    root = folders(tmp_path)
    _, data = open_segmentation(str(root), 64)
    batches = [batch for rank in range(2) for batch in loader(root, rank, 2, Hyp(mosaic=0.0), "val")]
    assert torch.cat([batch.ids for batch in batches]).tolist() == [0, 1, 2]
    mask = batches[0].masks[0]
    assert (mask[52:] == 255).all()  # 64 x 51 px of it are the image
    share = (mask[:51] == 1).float().mean()
    true = (data.mask(0) == 1).mean()
    assert float(share) == pytest.approx(float(true), abs=0.02)


def test_the_scores_equal_manual_counts() -> None:
    true = torch.tensor([[[0, 0, 1, 1], [0, 255, 1, 2]]], dtype=torch.uint8)
    found = torch.tensor([[[0, 1, 1, 1], [0, 2, 0, 3]]], dtype=torch.uint8)
    parts = [Confusion(["a", "b", "c", "d", "e"]) for _ in range(2)]
    parts[0].update(found[..., :2], true[..., :2])
    parts[1].update(found[..., 2:], true[..., 2:])
    whole = Confusion(parts[0].names)
    for part in parts:
        whole.merge(part)
    scores = whole.compute()
    assert scores.pixels == 7
    assert scores.accuracy == pytest.approx(4 / 7)
    # a: 2 right of 3 true and 3 found; b: 2 of 3 and 3; c: none of 1; d and e do not occur
    assert {name: one.iou for name, one in scores.per_class.items()} == {"a": 0.5, "b": 0.5, "c": 0.0}
    assert scores.fitness == scores.columns()["miou"] == pytest.approx(1 / 3)
    assert scores.per_class["a"].pixels == 3
    assert np.isnan(scores.by_class(whole.names)).tolist() == [False, False, False, True, True]


def test_the_loss_is_torchs_cross_entropy_and_zero_where_nothing_counts() -> None:
    loss = SegmentationLoss(0.1, 1)
    logits = torch.randn(3, 4, 8, 8)
    masks = torch.randint(0, 4, (3, 8, 8)).to(torch.uint8)
    masks[0, :5] = 255
    sums, counts = loss(logits, {"masks": masks}, (8, 8))
    assert counts.tolist() == [3, 3 * 64 - 40]
    mine = mean_terms(sums, counts, loss.gains)
    torchs = F.cross_entropy(logits, masks.long(), ignore_index=255, label_smoothing=0.1)
    assert float(mine.sum()) == pytest.approx(float(torchs), rel=1e-5)
    nothing = loss(logits, {"masks": torch.full_like(masks, 255)}, (8, 8))
    assert float(mean_terms(*nothing, loss.gains)) == 0


def test_embedded_masks_cover_the_digits() -> None:
    train, val = open_segmentation("digits", 64)
    assert train.names == val.names == ["background", "digit"]
    mask = val.mask(0)
    image = val.image(0).astype(int)
    assert np.unique(mask).tolist() == [0, 1]
    paper = np.median(image[mask == 0], 0)
    off = np.abs(image - paper).sum(2)
    assert off[mask > 0].mean() > 3 * off[mask == 0].mean()
    assert val.pixels().sum() == len(val) * 64 * 64


@pytest.mark.parametrize(
    "name",
    ["lraspp_mobilenet_v3_large", "fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large"],
)
def test_torchvision_models_predict_every_pixel(name: str) -> None:
    with torch.device("meta"):
        model = build_segmenter(name, 5).eval()
        assert model(torch.rand(1, 3, 64, 96)).shape == (1, 5, 64, 96)
    assert [part for part, _ in model.parts] == ["backbone", "classifier"]
    assert model.pools == name.startswith("deeplab")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rect": True}, "--rect is for boxes, but this is --task segment"),
        ({"hyp": Hyp(mosaic=1.0)}, "mosaic has no effect"),
        ({"hyp": Hyp(mosaic=0.0, scale=1.0)}, "scale must be below 1, not 1"),
        ({"cfg": "resnet18"}, "no segmentation model"),
        ({"data": "nowhere"}, "no such folder"),
    ],
)
def test_invalid_settings_of_segmentation_are_refused(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    values = {"data": str(folders(tmp_path)), **more}
    with pytest.raises(TrainerError, match=said):
        open_task(settings(task="segment", **values)).build(print)


def test_errors_name_the_file_of_the_dataset(tmp_path: Path) -> None:
    root = folders(tmp_path)
    mask = root / "masks/train/1.png"
    good = Image.open(mask).copy()

    def refused(said: str) -> None:
        with pytest.raises(TrainerError, match=said):
            open_segmentation(str(root), 64)

    good.resize((40, 64)).save(mask)
    refused(r"masks/train/1\.png: 40 x 64 px, but its image has 80 x 64")
    good.convert("RGB").save(mask)
    refused(r"1\.png: its pixels are RGB, but a mask must have one channel")
    mask.write_bytes(b"no image")
    refused(r"1\.png: not a readable PNG")
    mask.unlink()
    refused(r"masks/train/1\.png: not a readable PNG: .*No such file")
    good.save(mask)
    (root / "classes.txt").write_text("ground\ngreen\n")
    refused(r"masks/train/0\.png: a pixel has the value 2, but the classes are 0 to 1")
    (root / "classes.txt").write_text("ground\ngreen\ngreen\n")
    refused(r"classes\.txt: 3 names, of which only 2 are different")
    (root / "classes.txt").unlink()
    for split in ("val", "train"):
        masks = {path: path.read_bytes() for path in (root / "masks" / split).iterdir()}
        for path in masks:
            Image.fromarray(np.full((64, 80), 255, np.uint8)).save(path)
        refused(rf"too few classes in masks/{split} \(values: 255\)")
        if split == "train":  # 0 and 255, as drawing programs save binary masks
            for path in masks:
                Image.fromarray(np.repeat(np.uint8([0, 255]), 40)[None].repeat(64, 0)).save(path)
            refused(r"too few classes in masks/train \(values: 0, 255\)")
        for path, content in masks.items():
            path.write_bytes(content)
    assert open_segmentation(str(root), 64)[1].names == ["0", "1", "2"]
    (root / "images/train/2.png").write_bytes(b"no image")
    refused(r"images/train/2\.png: not a readable image")
    (root / "masks/val").rename(root / "masks/test")
    refused("no folder masks/val|images/train/2")


def test_images_are_listed_recursively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folders(tmp_path / "data")
    other = folders(tmp_path / "other", train=2)
    for kind in ("images", "masks"):
        (root / kind / "train/more").symlink_to(other / kind / "train")
    (root / "images/train/._0.jpg").write_bytes(b"what macOS leaves on other disks")
    (root / "here").mkdir()
    monkeypatch.chdir(root / "here")
    train, _ = open_segmentation("..", 64)
    assert [train.name(k) for k in range(len(train))] == [
        *(f"{k}.png" for k in range(7)),
        "more/0.png",
        "more/1.png",
    ]
    assert train.mask(7).shape == (64, 80)


def test_a_mask_with_a_palette_has_its_indices(tmp_path: Path) -> None:
    root = folders(tmp_path)
    path = root / "masks/train/0.png"
    mask = np.array(Image.open(path))
    coloured = Image.fromarray(mask, mode="L").convert("P")
    coloured.putdata(mask.reshape(-1).tolist())
    coloured.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0] + [255] * 759)
    coloured.save(path)
    data = MaskFolder(str(root), "train")
    data.check_classes(["a", "b", "c"])
    assert np.array_equal(data.mask(0), mask)


def test_the_image_of_predictions_shows_the_classes_colours(tmp_path: Path) -> None:
    image = np.full((64, 64, 3), 90, np.uint8)
    mask = np.zeros((64, 64), np.uint8)
    mask[:32] = 1
    segment.shown([(image, mask, np.zeros_like(mask))], ["a", "b"], tmp_path / "p.png")
    image = cv2.imread(str(tmp_path / "p.png"))
    assert image is not None
    true = image[10:250, 10:250].astype(int)
    found = image[10:250, 250:490].astype(int)
    assert np.abs(true[20:100] - 90).max() > 30  # class 1 has a colour
    assert np.abs(true[140:220] - 90).max() <= 2  # class 0 has none
    assert np.abs(found[20:220] - 90).max() <= 2


def test_a_split_without_images_cannot_be_scored(tmp_path: Path) -> None:
    data = folders(tmp_path / "data", val=0)
    state = build_segmenter(LRASPP, 3).state_dict()
    content = dict.fromkeys(checkpoint_file.KEYS) | {"format": checkpoint_file.FORMAT, "task": "segment"}
    content |= {"imgsz": 64, "ema": state, "names": ["0", "1", "2"], "cfg": {"torchvision": LRASPP}}
    checkpoint_file.save(tmp_path / "best.pt", content)
    asked = ("--weights", "best.pt", "--data", str(data), "--device", "cpu")
    code, _, err = wait(start(tmp_path, ranks(1), "val", *asked))[0]
    assert (code, f"error: --data {data}: the split val has no images" in err) == (2, True), err
    code, _, err = wait(start(tmp_path, ranks(1), "val", *asked, "--task", "segment"))[0]
    assert (code, "the weights contain the task" in err) == (2, True), err
