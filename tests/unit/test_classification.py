"""Classification: trainings from the command line, and its datasets, models and loss."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.models import get_model, get_model_weights
from torchvision.transforms.v2.functional import normalize

from tests.unit.settings import settings
from tests.unit.trainer_process import Ended, ranks, start, wait
from trainer.config import Hyp
from trainer.data.dataset import Image
from trainer.data.formats.classification import Arrays, open_classification
from trainer.data.loading.batch_sampler import BatchSpec
from trainer.data.loading.torchvision_loaders import (
    ClassificationCollate,
    mix_batch,
    train_transform,
    val_transform,
)
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer
from trainer.errors import TrainerError
from trainer.losses.criterion import mean_terms
from trainer.metrics.confusion import TopK
from trainer.models import freeze
from trainer.models.torchvision_nets import Classifier, Segmenter, build_classifier
from trainer.strategies.strategy import fill
from trainer.tasks import open_task
from trainer.weights import checkpoint_file

SMALL = "shufflenet_v2_x0_5"  # few parameters, and nothing random in it
NAMES = ("dark", "green", "red")
QUICK = (
    "train",
    "--task",
    "classify",
    "--device",
    "cpu",
    "--imgsz",
    "32",
    "--workers",
    "0",
    "--precision",
    "fp32",
)
QUICK += ("--project", "runs")


def folders(root: Path, train: int = 4, val: int = 2) -> Path:
    """Plain images of three colours, in train/ and test/, of different sizes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", val)):
        for name, colour in zip(NAMES, ((20, 20, 20), (40, 200, 40), (40, 40, 200)), strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                noise = rng.integers(0, 30, (40 + 8 * k, 48, 3), np.uint8)
                cv2.imwrite(str(folder / f"{k}.png"), noise + np.array(colour, np.uint8))
    return root


def trained(cwd: Path, *arguments: str, count: int = 1, plots: bool = False) -> Ended:
    return wait(start(cwd, ranks(count), *QUICK, *arguments, plots=plots))[0]


def table(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def weights(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def test_a_classifier_learns_and_two_ranks_score_like_one(tmp_path: Path) -> None:
    data = folders(tmp_path / "data", train=8)
    options = ("--data", str(data), "--batch", "8", "--epochs", "3", "--optimizer", "AdamW", "--sync-bn")
    (tmp_path / "hyp.yaml").write_text("lr0: 0.0005\nwarmup_epochs: 0\nema_tau: 5\n")
    for count in (1, 2):
        more = ("--hyp", "hyp.yaml", "--name", f"r{count}")
        code, out, err = trained(tmp_path, *options, *more, count=count, plots=count == 2)
        assert code == 0, err
        assert "top-1" in out.splitlines()[-1]
    one, two = (table(tmp_path / f"runs/r{count}/results.csv") for count in (1, 2))
    assert (
        min(row["cls_loss"] for row in one) < one[0]["cls_loss"] / 2
    )  # of three batches of eight: one may stand out
    assert one[-1]["top1"] == 1
    assert [row["top5"] for row in two] == [1] * 3  # there are three classes
    assert two[0]["cls_loss"] == pytest.approx(
        one[0]["cls_loss"], rel=0.02
    )  # later, AdamW has enlarged rounding
    assert two[-1]["top1"] == 1
    for name in ("labels.png", "train_batch0.jpg", "predictions.jpg", "confusion_matrix.png", "results.png"):
        assert cv2.imread(str(tmp_path / "runs/r2" / name)) is not None, name
    val = ("val", "--weights", "runs/r2/best.pt", "--data", str(data), "--device", "cpu", "--json")
    found = [json.loads(wait(start(tmp_path, ranks(count), *val))[0][1]) for count in (1, 2)]
    assert [scores["top1"] for scores in found] == [max(row["top1"] for row in two)] * 2
    assert found[0]["per_class"] == dict.fromkeys(NAMES, 1.0)
    assert (Path(tmp_path, found[0]["folder"]) / "predictions.jpg").is_file()
    code, _, err = wait(start(tmp_path, [{}], *val, "--conf", "0.1"))[0]
    assert (code, "--conf is for boxes" in err) == (2, True)
    content = weights(tmp_path / "runs/r1/best.pt")
    assert (content["task"], content["cfg"], content["names"]) == (
        "classify",
        {"torchvision": "resnet18"},
        [*NAMES],
    )


def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    (tmp_path / "hyp.yaml").write_text("mixup: 0.5\ncutmix: 0.5\n")
    options = ("--data", str(data), "--batch", "4", "--cfg", SMALL, "--epochs", "2", "--log-steps")
    options += ("--hyp", "hyp.yaml", "--save-every", "1steps")
    assert trained(tmp_path, *options, "--name", "whole")[0] == 0
    (process,) = start(tmp_path, ranks(1), *QUICK, *options, "--name", "cut")
    steps = tmp_path / "runs/cut/steps.csv"
    while process.poll() is None and not (steps.exists() and len(steps.read_text().splitlines()) > 4):
        time.sleep(0.005)
    process.kill()
    wait([process])
    code, out, err = trained(tmp_path, *options, "--name", "cut", "--resume", "runs/cut")
    assert code == 0, err
    assert "resuming in epoch" in out
    assert (tmp_path / "runs/whole/steps.csv").read_bytes() == steps.read_bytes()
    whole, cut = (weights(tmp_path / f"runs/{name}/last.pt") for name in ("whole", "cut"))
    for part in ("model", "ema"):
        assert all(torch.equal(value, cut[part][key]) for key, value in whole[part].items())


def test_frozen_layers_stay_constant_until_unfrozen(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    options = ("--data", str(data), "--cfg", SMALL, "--batch", "6", "--epochs", "3")
    options += ("--freeze", "backbone", "--unfreeze", "2")
    for count in (1, 2):
        code, out, err = trained(tmp_path, *options, "--save-period", "1", "--name", f"r{count}", count=count)
        assert code == 0, err
        assert "from epoch 3 on, all layers are trained" in out
        states = [weights(tmp_path / f"runs/r{count}/epoch{k}.pt")["model"] for k in (1, 2, 3)]
        layers = [key for key in states[0] if key == "net.conv1.0.weight"]
        assert all(torch.equal(states[0][key], states[1][key]) for key in layers)
        assert not any(torch.equal(states[1][key], states[2][key]) for key in layers)
        assert not torch.equal(states[0]["net.fc.weight"], states[1]["net.fc.weight"])


def test_micro_batches_of_a_single_value_are_refused(tmp_path: Path) -> None:
    options = (
        "--data",
        str(folders(tmp_path / "data")),
        "--cfg",
        SMALL,
        "--batch",
        "4",
        "--parallel",
        "pipeline",
    )
    code, _, err = trained(tmp_path, *options, "--epochs", "1", count=2)
    assert code == 2, err
    assert "--micro-batches 4: too many for a pipeline's share of a step, 4 images" in err
    assert "use --micro-batches 2" in err
    code, _, err = trained(tmp_path, *options, "--epochs", "1", "--micro-batches", "2", count=2)
    assert code == 0, err


def test_verify_finds_ranks_equal_while_images_are_mixed(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    (tmp_path / "hyp.yaml").write_text("mixup: 0.5\ncutmix: 0.5\nrandaugment: 9\n")
    arguments = (
        "--task",
        "classify",
        "--data",
        str(data),
        "--hyp",
        "hyp.yaml",
        "--imgsz",
        "32",
        "--batch",
        "5",
    )
    done = wait(start(tmp_path, [{}], "verify", *arguments, "--ranks", "1,2", "--steps", "2", "--json"))[0]
    assert done[0] == 0, done
    found = json.loads(done[1])["differences"]
    assert max(d["gradient_off"] for d in found) < 1e-6


def test_a_batch_is_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    hyp = Hyp(mosaic=0.0, mixup=0.5, cutmix=0.5, randaugment=9, pad=4)
    task = open_task(settings(str(folders(tmp_path)), "classify", imgsz=32, batch=5, hyp=hyp))

    def step(world: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for rank in range(world):
            place = {"rank": rank, "world": world, "local_size": world, "workers": 0, "stride": 32}
            loader = task.train_loader(place, torch.device("cpu"))
            batch = list(loader.epoch(1))[number]
            parts.append(task.move(batch, torch.device("cpu")))
        return torch.cat([images for images, _ in parts]), torch.cat(
            [targets["classes"] for _, targets in parts]
        )

    for number in range(3):
        whole = step(1, number)
        parts = step(3, number)
        assert torch.equal(whole[0], parts[0])
        assert torch.equal(whole[1], parts[1])
        assert whole[1].sum(1) == pytest.approx(np.ones(len(whole[1])))
    assert any(step(1, number)[1].max(1).values.min() < 0.999 for number in range(3))  # something was mixed


def test_classes_are_the_folders_of_the_images(tmp_path: Path) -> None:
    data = open_classification(str(folders(tmp_path)), "val")
    assert data.names == [*NAMES]
    for k in range(len(data)):
        assert data.name(k).split("/")[0] == NAMES[data.label(k)]
        brightest = data.image(k).reshape(-1, 3).mean(0).argmax() if data.label(k) else -1
        assert brightest == {0: -1, 1: 1, 2: 0}[data.label(k)]  # RGB


def test_hidden_files_are_no_images_and_hidden_folders_no_classes(tmp_path: Path) -> None:
    root = folders(tmp_path)
    seen = open_classification(str(root), "val")
    (root / "test/red/._0.png").write_bytes(b"what macOS keeps beside a file")
    (root / "test/.ipynb_checkpoints").mkdir()
    (root / "test/.ipynb_checkpoints/0.png").write_bytes((root / "test/red/0.png").read_bytes())
    again = open_classification(str(root), "val")
    assert again.names == seen.names
    assert len(again) == len(seen)
    assert again.fingerprint() == seen.fingerprint()
    only_hidden = tmp_path / "hidden"
    (only_hidden / "train/.class").mkdir(parents=True)
    with pytest.raises(TrainerError, match="fewer than two class folders"):
        open_classification(str(only_hidden), "train")


def test_a_class_whose_folder_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    root = folders(tmp_path / "data")
    (root / "train" / "zebra").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrainerError, match="zebra: broken symbolic link"):
        open_classification(str(root), "train")


def test_a_single_class_folder_is_refused(tmp_path: Path) -> None:
    root = folders(tmp_path)
    (root / "train").rename(root / "images")
    (root / "train").mkdir()
    (root / "images").rename(root / "train/images")
    with pytest.raises(TrainerError, match=r"train: fewer than two class folders: \['images'\]") as caught:
        open_classification(str(root), "train")
    assert "move them up" in caught.value.hint


def test_a_large_jpeg_is_decoded_at_a_reduced_size(tmp_path: Path) -> None:
    root = folders(tmp_path)
    cv2.imwrite(str(root / "train/red/large.jpg"), np.full((400, 640, 3), (40, 40, 200), np.uint8))
    data = open_classification(str(root), "train")
    k = next(k for k in range(len(data)) if data.name(k) == "red/large.jpg")
    assert data.image(k).shape == (400, 640, 3)
    assert data.image(k, 32).shape == (50, 80, 3)
    assert data.image(k, 32)[20, 20].tolist() == pytest.approx([200, 40, 40], abs=4)


class Asked(Arrays):
    """Images that note how large they are wanted."""

    def __init__(self) -> None:
        super().__init__("image", ["a"], np.zeros((2, 120, 160, 3), np.uint8), [0, 0])
        self.sides: set[int] = set()

    def image(self, index: int, min_side: int = 0) -> Image:
        self.sides.add(min_side)
        return super().image(index, min_side)


def test_files_are_decoded_at_the_size_of_the_transform() -> None:
    for imgsz, pad, trained_at, validated_at in (
        (32, None, 32, 32),
        (96, None, 192, 110),
        (96, 4.0, 96, 110),
    ):
        data = Asked()
        spec = BatchSpec(np.arange(2), (imgsz, imgsz))
        ClassificationCollate(data, imgsz, 0, Hyp(pad=pad))[spec]
        assert data.sides == {trained_at}
        ClassificationCollate(data, imgsz)[spec]
        assert data.sides == {trained_at, validated_at}


def test_embedded_digits_are_all_there_and_split() -> None:
    train = open_classification("digits", "train")
    val = open_classification("digits", "val")
    assert (len(train), len(val)) == (1438, 359)
    assert train.image(0).shape == (32, 32, 3)
    seen = {train.image(k).tobytes() for k in range(len(train))}
    assert sum(val.image(k).tobytes() in seen for k in range(len(val))) == 0


def test_crops_move_images_and_keep_their_size() -> None:
    image = (
        torch.arange(32 * 32, dtype=torch.int64)
        .remainder(251)
        .to(torch.uint8)
        .view(1, 32, 32)
        .expand(3, -1, -1)
    )
    results = []
    for seed in range(8):
        torch.manual_seed(seed)
        results.append(train_transform(32, Hyp(fliplr=0.0))(image))
    assert all(result.shape == (3, 32, 32) for result in results)
    assert len({result.numpy().tobytes() for result in results}) > 4
    assert train_transform(96, Hyp())(image).shape == (3, 96, 96)


def test_images_are_mirrored() -> None:
    image = torch.arange(32 * 32 * 3).remainder(251).to(torch.uint8).view(3, 32, 32)
    assert torch.equal(train_transform(32, Hyp(fliplr=1.0, pad=0.0))(image), image.flip(2))
    assert torch.equal(train_transform(32, Hyp(fliplr=0.0, flipud=1.0, pad=0.0))(image), image.flip(1))


def test_validation_uses_a_center_crop_of_large_images() -> None:
    image = torch.zeros(3, 220, 440, dtype=torch.uint8)
    image[..., :100] = image[..., -100:] = 255
    middle = val_transform(96)(image)
    whole = val_transform(32)(image)
    assert (middle.shape, int(middle.max())) == ((3, 96, 96), 0)
    assert (whole.shape, int(whole.max())) == ((3, 32, 32), 255)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_images_are_mixed_as_their_labels_are(kind: str) -> None:
    values = torch.tensor([0.1, 0.3, 0.9, 0.4])
    images = values.view(4, 1, 1, 1).expand(4, 3, 16, 16).clone()
    most = []
    for seed in range(8):
        blended, shares = mix_batch(images.clone(), torch.arange(4), 4, seed, Hyp(**{kind: 1.0}))
        torch.testing.assert_close(blended.mean((1, 2, 3)), shares @ values)
        most.append(float(shares.max()))
    assert min(most) < 0.9


def test_images_are_normalised_as_for_torchvisions_weights() -> None:
    class Out(torch.nn.Identity):
        def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"out": input}

    images = torch.rand(2, 3, 4, 4)
    wanted = normalize(images, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    for model in (Classifier(torch.nn.Identity()), Segmenter(Out())):
        torch.testing.assert_close(model(images), wanted)


def test_top_k_of_merged_ranks_is_that_of_all_images() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 12, generator=generator)
    labels = torch.randint(0, 12, (200,), generator=generator)
    parts = [TopK([str(k) for k in range(12)]) for _ in range(3)]
    for part, rows in zip(parts, torch.arange(200).split([120, 79, 1]), strict=True):
        part.update(logits[rows], labels[rows])
    whole = TopK(parts[0].names)
    for part in parts:
        whole.merge(part)
    scores = whole.compute()
    assert scores.top1 == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    among = (logits.topk(5, 1).indices == labels[:, None]).any(1)
    assert scores.top5 == pytest.approx(float(among.float().mean()))
    assert 0 < scores.top1 < scores.top5 < 1
    by_hand = (logits.argmax(1)[labels == 3] == 3).float().mean()
    assert scores.per_class["3"].recall == pytest.approx(float(by_hand))
    assert sum(score.images for score in scores.per_class.values()) == scores.images == 200


def test_the_loss_is_torchs_cross_entropy() -> None:
    task = open_task(settings("digits", "classify", hyp=Hyp(mosaic=0.0, label_smoothing=0.1), imgsz=32))
    loss = task.criterion()
    logits = torch.randn(6, 10)
    labels = torch.arange(6)
    terms = mean_terms(*loss(logits, {"classes": labels}, (32, 32)), loss.gains)
    assert float(terms.sum()) == pytest.approx(
        float(F.cross_entropy(logits, labels, label_smoothing=0.1)), rel=1e-6
    )


def test_a_vit_is_built_for_the_image_size() -> None:
    with torch.device("meta"):
        for imgsz in (32, 96):
            model = build_classifier("vit_b_16", 3, imgsz)
            assert model.training
            assert model(torch.rand(2, 3, imgsz, imgsz)).shape == (2, 3)
        assert build_classifier("alexnet", 3, 64).training


def test_freezing_by_number_and_all_but_the_head() -> None:
    model = build_classifier("resnet18", 3, 32)
    assert [name for name, _ in model.parts] == ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"]
    assert freeze(model, [0]) == 3 * 64 * 49
    freeze(model, [-1])
    assert [p.requires_grad for p in model.net.fc.parameters()] == [True, True]  # type: ignore[union-attr]
    assert not any(p.requires_grad for p in model.net.layer4.parameters())  # type: ignore[union-attr]
    with pytest.raises(TrainerError, match="no layer 7"):
        freeze(model, [7])
    with pytest.raises(TrainerError, match="no layer is left"):
        freeze(model, range(7))
    with torch.device("meta"):
        vit = build_classifier("vit_b_16", 3, 32)
    freeze(vit, [-1])
    trained = [name for name, p in vit.named_parameters() if p.requires_grad]
    assert trained == ["net.heads.head.weight", "net.heads.head.bias"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rect": True}, "--rect is for boxes"),
        ({"cache": "ram"}, "--cache is for boxes"),
        ({"noautoanchor": True}, "--noautoanchor is for boxes"),
        ({"hyp": Hyp(mosaic=1.0)}, "mosaic has no effect"),
        ({"hyp": Hyp(mosaic=0.0, mixup=0.6, cutmix=0.6)}, "together at most 1"),
        ({"hyp": Hyp(mosaic=0.0, randaugment=31)}, "randaugment must be a whole number from 0 to 30, not 31"),
        ({"hyp": Hyp(mosaic=0.0, randaugment=0.5)}, "randaugment must be a whole number"),
        ({"cfg": "resnet19"}, "no classification model"),
        ({"cfg": "inception_v3"}, "not supported"),
        (
            {"cfg": "alexnet"},
            "--cfg alexnet with --imgsz 32: the network does not accept such images: .*too small",
        ),
        ({"cfg": "vit_h_14"}, "--cfg vit_h_14 with --imgsz 32: .*indivisible by patch size"),
        ({"data": "nowhere"}, "no such folder"),
    ],
)
def test_invalid_settings_of_classification_are_refused(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    values = {"data": str(folders(tmp_path)), "imgsz": 32, **more}
    with pytest.raises(TrainerError, match=said):
        open_task(settings(task="classify", **values)).build(print)


def test_errors_name_the_folder_or_file(tmp_path: Path) -> None:
    root = folders(tmp_path)
    (root / "test/red").rename(root / "test/blue")
    with pytest.raises(TrainerError, match="different classes: blue, red"):
        open_task(settings(str(root), "classify"))
    (root / "test/blue/0.png").write_bytes(b"no image")
    data = open_classification(str(root), "val")
    with pytest.raises(TrainerError, match=r"blue/0\.png: cannot be decoded"):
        data.image(next(k for k in range(len(data)) if data.name(k) == "blue/0.png"))
    (root / "train/red").rename(root / "train/empty")
    for image in (root / "train/empty").iterdir():
        image.unlink()
    with pytest.raises(TrainerError, match="no image in empty"):
        open_classification(str(root), "train")
    with pytest.raises(TrainerError, match="no folder train"):
        open_classification(str(root / "test"), "train")


def test_a_side_of_0_is_an_error(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    assert trained(tmp_path, "--data", str(data), "--batch", "12", "--epochs", "1", "--noval")[0] == 0
    arguments = (
        "val",
        "--weights",
        "runs/train/best.pt",
        "--data",
        str(data),
        "--device",
        "cpu",
        "--imgsz",
        "0",
    )
    done = wait(start(tmp_path, ranks(1), *arguments), code=2)[0]
    assert "--imgsz 0 is not a multiple of 32" in done.stderr


def test_without_validation_no_validation_images_are_needed(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    for name in ("val", "test"):
        shutil.rmtree(data / name, ignore_errors=True)
    arguments = ("--data", str(data), "--batch", "12", "--epochs", "1")
    assert trained(tmp_path, *arguments)[0] == 2
    assert trained(tmp_path, *arguments, "--noval")[0] == 0


def test_weights_of_the_other_task_are_refused(tmp_path: Path) -> None:
    data = folders(tmp_path / "data")
    assert trained(tmp_path, "--data", str(data), "--batch", "12", "--epochs", "1", "--noval")[0] == 0
    best = str(tmp_path / "runs/train/best.pt")
    with pytest.raises(TrainerError, match="trained with --task classify, not detect"):
        open_task(settings("digits", weights=best))
    again = open_task(settings(str(data), "classify", weights=best, imgsz=32)).build(print).state_dict()
    assert torch.equal(again["net.fc.weight"], weights(Path(best))["ema"]["net.fc.weight"])
    code, _, err = wait(start(tmp_path, [{}], "export", "--weights", best, "--format", "torchscript"))[0]
    assert code == 2, err
    assert "trained with --task classify" in err
    assert "trainer predict and val take all weights" in err


def own_file(home: Path, name: str) -> Path:
    """Return the path of a model's weights in the cache of torch.hub."""
    path = home / "hub/checkpoints" / Path(get_model_weights(name).DEFAULT.url).name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


OLD_NAMES = {
    "densenet121": [(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.")],
    "vit_b_16": [(r"mlp\.0\.", "mlp.linear_1."), (r"mlp\.3\.", "mlp.linear_2.")],
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_torchvisions_older_weights_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with torch.device("meta"):
        shapes = get_model(name).state_dict()
    values = {key: torch.tensor(k).to(tensor.dtype) for k, (key, tensor) in enumerate(shapes.items())}
    body = [key for key in values if not key.startswith(("classifier.", "heads."))]
    file = {
        key: value.expand(shapes[key].shape) for key, value in values.items()
    }  # of one number each on disk
    for now, then in [*OLD_NAMES[name], (".*num_batches_tracked", "")]:
        file = {re.sub(now, then, key): tensor for key, tensor in file.items()}
    file.pop("", None)  # batch norm did not count then
    torch.save(file, own_file(tmp_path, name))
    said: list[str] = []
    data = str(folders(tmp_path / "data"))
    found = (
        open_task(settings(data, "classify", cfg=name, weights="torchvision")).build(said.append).state_dict()
    )
    assert said == [f"weights from torchvision: {len(body)}/{len(values)} tensors"]
    for key in body:
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(found[f"net.{key}"], values[key].expand_as(found[f"net.{key}"]))


class Malicious:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_file_of_torchvisions_weights_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    task = open_task(settings(str(folders(tmp_path / "data")), "classify", cfg=SMALL, weights="torchvision"))
    file = own_file(tmp_path, SMALL)
    touched = tmp_path / "touched"
    torch.save({"conv1.0.weight": Malicious(touched)}, file)
    whole = file.read_bytes()
    for content in (whole, whole[: len(whole) // 2], b"", b"no weights", b"\x80"):
        file.write_bytes(content)
        with pytest.raises(
            TrainerError, match=f"--weights torchvision: the weights of {SMALL} are not available"
        ) as error:
            task.build(print)
        assert str(tmp_path) in error.value.hint
    assert not touched.exists()


def test_weights_transfer_to_a_model_with_versioned_state() -> None:
    models = [build_classifier("mnasnet0_5", 3, 32) for _ in range(3)]
    state = models[0].state_dict()
    fit, of = checkpoint_file.transfer(models[1], state, "best.pt")
    assert fit == of == len(state)
    for model in (models[1], fill(models[2], state)):
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def made(data: Path, **more: Any) -> Trainer:
    config = settings(str(data), "classify", **{"cfg": SMALL, "imgsz": 32, **more})
    run = Trainer(config, World(), torch.device("cpu"), Events({}))
    run.start()
    return run


def test_gathered_batches_have_the_gradient_of_their_mean(tmp_path: Path) -> None:
    data = folders(tmp_path)
    norms = []
    for batch, nbs in ((12, 0.0), (6, 12.0), (4, 12.0)):
        hyp = Hyp(mosaic=0.0, nbs=nbs, warmup_epochs=0.0)
        run = made(data, batch=batch, hyp=hyp)
        run.local_model.eval()  # batch norm's own statistics: a batch does not know how large it is
        for images in run.train_loader.epoch(0):
            run.step(images)
        assert run.state.step == 12 // batch
        norms.append(float(run.update.grad_norm))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
