"""The detector families of transformers."""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

if not importlib.util.find_spec("transformers"):
    assert os.environ.get("CI") != "true", "CI needs the package transformers"
    pytest.skip("needs the package transformers", allow_module_level=True)

import transformers

from tests.unit.settings import settings as small
from tests.unit.test_resume import assert_resumes
from tests.unit.trainer_process import run
from tests.unit.yolo_folder import squares
from trainer.config import Hyp, Settings
from trainer.detectors import Limits, Parts, build, detr, dfine, load_weights, read_cfg, rtdetrv2
from trainer.detectors.detector import Detector
from trainer.detectors.transformers_nets import labels_of
from trainer.engine.optimizer import parameter_groups
from trainer.errors import TrainerError
from trainer.inference.box_predictor import detect_in
from trainer.inference.export import NEEDED, export
from trainer.inference.trained import load_trained
from trainer.losses.criterion import mean_terms
from trainer.tasks import open_task
from trainer.weights import checkpoint_file

NC = 3
SIDE = 96
LABELS = torch.tensor(
    [
        [0, 1, 0.4, 0.4, 0.5, 0.4],
        [0, 2, 0.7, 0.3, 0.5, 0.5],
        [0, 0, 0.5, 0.5, 0.2, 0.3],
        [1, 0, 0.5, 0.6, 0.9, 0.8],
    ]
)
FAMILIES = {
    "dfine-tiny": transformers.DFineForObjectDetection,
    "rtdetrv2-tiny": transformers.RTDetrV2ForObjectDetection,
}
each_family = pytest.mark.parametrize("cfg", FAMILIES)
each_with_detr = pytest.mark.parametrize("cfg", [*FAMILIES, "detr-tiny"])
# Sizes of the families with all their parts, and few channels.
CHANNELS = [16, 16, 16, 16]
TINY: dict[str, Any] = {"encoder_hidden_dim": 32, "encoder_ffn_dim": 32, "d_model": 32, "decoder_ffn_dim": 32}
TINY |= {"decoder_layers": 2, "num_queries": 200}  # more than an image of SIDE px has cells
TINY_DFINE: dict[str, Any] = {
    "encoder_in_channels": [16, 16],
    "encode_proj_layers": [1],
    "depth_mult": 0.34,
    "decoder_in_channels": [32, 32],
    "decoder_n_points": [2, 2],
    "num_feature_levels": 2,
    "feat_strides": [16, 32],
    **TINY,
    "backbone_config": {
        "model_type": "hgnet_v2",
        "stem_channels": [3, 8, 8],
        "hidden_sizes": CHANNELS,
        "out_indices": [3, 4],
        "stage_in_channels": [8, 16, 16, 16],
        "stage_mid_channels": CHANNELS,
        "stage_out_channels": CHANNELS,
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
        "use_learnable_affine_block": True,
    },
}
TINY_RTDETR: dict[str, Any] = {
    "encoder_in_channels": [16, 16, 16],
    "decoder_in_channels": [32, 32, 32],
    **TINY,
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "depths": [1, 1, 1, 1],
        "out_indices": [2, 3, 4],
        "layer_type": "basic",
        "embedding_size": 16,
        "hidden_sizes": CHANNELS,
    },
}
TINY_DETR: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "d_model": 32,
    "num_queries": 20,
    "auxiliary_loss": True,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "backbone_config": {
        "model_type": "resnet",
        "depths": [1, 1, 1, 1],
        "hidden_sizes": CHANNELS,
        "embedding_size": 16,
        "layer_type": "basic",
        "out_features": ["stage4"],
    },
}


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dfine.SIZES, "tiny", TINY_DFINE)
    monkeypatch.setitem(rtdetrv2.SIZES, "tiny", TINY_RTDETR)
    monkeypatch.setitem(detr.SIZES, "tiny", TINY_DETR)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def family(cfg: str) -> Parts:
    """Return the family with weights that tell its layers apart: the heads are initialized alike."""
    torch.manual_seed(0)
    parts = build(read_cfg(cfg), nc=NC, where=cfg, hyp=Hyp(), imgsz=SIDE)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return parts


def targets(parts: Parts, labels: Tensor, images: int) -> dict[str, Tensor]:
    return parts.criterion.assigner(parts.model)(labels.numpy(), images, SIDE, SIDE)  # type: ignore[no-any-return]


def terms(parts: Parts, sums: Tensor, counts: Tensor) -> Tensor:
    return mean_terms(sums, parts.criterion.divisors(counts), parts.criterion.gains)


@each_family
@pytest.mark.parametrize("noise", [True, False], ids=["noise", "plain"])
def test_loss_and_gradients_are_the_librarys(cfg: str, noise: bool) -> None:
    parts = family(cfg)
    images = torch.rand(2, 3, SIDE, SIDE)
    if not noise:
        parts.criterion.without_noise()
    whole = FAMILIES[cfg](parts.model.net.config)
    whole.model = parts.model.net
    wanted = targets(parts, LABELS, 2)
    torch.manual_seed(1)
    mine = terms(
        parts, *parts.criterion(parts.criterion.outputs_of(parts.model, images, wanted), wanted, (SIDE, SIDE))
    )
    mine.sum().backward()
    gradients = {name: p.grad for name, p in parts.model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    parts.model.zero_grad()
    torch.manual_seed(1)
    own = whole(images, labels=labels_of(wanted["labels"], 2))
    own.loss.backward()
    for term, value in zip(parts.criterion.terms, mine, strict=True):
        expected = sum(v.detach() for name, v in own.loss_dict.items() if name.split("_")[1] == term)
        assert float(value.detach()) == pytest.approx(float(expected), rel=1e-5, abs=1e-8), term
    scale = torch.cat([p.grad.flatten() for p in parts.model.parameters() if p.grad is not None]).norm()
    for name, parameter in parts.model.named_parameters():
        if parameter.requires_grad:
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradients[name], expected, rtol=1e-5, atol=float(1e-6 * scale))


def test_the_loss_and_gradients_of_detr_are_the_librarys() -> None:
    parts = family("detr-tiny")
    images = torch.rand(2, 3, SIDE, SIDE)
    wanted = targets(parts, LABELS, 2)
    torch.manual_seed(1)
    mine = terms(
        parts, *parts.criterion(parts.criterion.outputs_of(parts.model, images, wanted), wanted, (SIDE, SIDE))
    )
    mine.sum().backward()
    gradients = {name: p.grad for name, p in parts.model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    parts.model.zero_grad()
    torch.manual_seed(1)  # of the dropout
    own = parts.model.net(
        (images - parts.model.mean) / parts.model.std, labels=labels_of(wanted["labels"], 2)
    ).loss
    own.backward()
    assert float(mine.sum().detach()) == pytest.approx(float(own.detach()), rel=1e-5)
    for name, parameter in parts.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_affine_blocks_of_dfine_are_the_librarys_and_keep_bf16() -> None:
    blocks = [m for m in family("dfine-tiny").model.modules() if isinstance(m, dfine.Affine)]
    library = dfine.HGNetV2LearnableAffineBlock()
    features = torch.rand(2, 3, 4, 4)
    library.load_state_dict(blocks[0].state_dict())
    assert torch.equal(blocks[0](features), library(features))
    assert blocks[0](features.bfloat16()).dtype == torch.bfloat16


def test_detr_starts_from_the_weights_of_its_paper_with_smaller_branches() -> None:
    """The library's are so small that all queries find nearly the same box; the paper's make all cells alike."""
    torch.manual_seed(0)
    net: Any = build(read_cfg("detr-tiny"), nc=NC, where="detr-tiny", hyp=Hyp(), imgsz=SIDE).model.net
    assert float(net.model.query_position_embeddings.weight.detach().std()) == pytest.approx(1, rel=0.2)
    for transformer, branches in ((net.model.encoder, 2), (net.model.decoder, 3)):
        for name, weight in transformer.named_parameters():
            if weight.dim() > 1:
                share = (
                    (branches * len(transformer.layers)) ** -0.5 if "o_proj" in name or "fc2" in name else 1
                )
                assert float(weight.detach().std()) == pytest.approx(
                    share * (2 / sum(weight.shape)) ** 0.5, rel=0.2
                )
    for layer in net.bbox_predictor.layers:  # as PyTorch draws a layer
        assert float(layer.weight.detach().std()) == pytest.approx((3 * layer.in_features) ** -0.5, rel=0.2)


def test_detr_without_noise_has_no_dropout() -> None:
    parts = family("detr-tiny")
    images = torch.rand(2, 3, SIDE, SIDE)
    parts.criterion.without_noise()
    first = parts.model(images)
    second = parts.model(images)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("hyp", "expected"), [(Hyp(), 0.1), (Hyp(dropout=0.0), 0.0), (Hyp(dropout=0.3), 0.3)]
)
def test_dropout_is_a_hyper_parameter_of_detr(hyp: Hyp, expected: float) -> None:
    parts = build(read_cfg("detr-tiny"), nc=NC, where="detr-tiny", hyp=hyp, imgsz=SIDE)
    parts.check(Settings(hyp=hyp), "detr-tiny")
    layers: Any = [*parts.model.net.model.encoder.layers, *parts.model.net.model.decoder.layers]
    assert {layer.dropout for layer in layers} == {expected}
    images = torch.rand(2, 3, SIDE, SIDE)
    first, second = (parts.model(images)["intermediate_logits"] for _ in range(2))
    assert torch.equal(first, second) == (not expected)


@each_with_detr
@pytest.mark.parametrize("split", [1, 2])
def test_shares_of_uneven_ranks_add_up_to_the_whole(cfg: str, split: int) -> None:
    """The third image has no boxes, so nor has the second share if it begins there."""
    parts = family(cfg)
    parts.criterion.without_noise()
    outputs = parts.model(torch.rand(3, 3, SIDE, SIDE))
    whole = terms(parts, *parts.criterion(outputs, targets(parts, LABELS, 3), (SIDE, SIDE)))
    first = LABELS[LABELS[:, 0] < split]
    second = LABELS[LABELS[:, 0] >= split].clone()
    second[:, 0] -= split
    shares = []
    for labels, place in ((first, slice(split)), (second, slice(split, 3))):
        mine = {name: value if name == "unused" else value[place] for name, value in outputs.items()}
        shares.append(parts.criterion(mine, targets(parts, labels, len(range(3)[place])), (SIDE, SIDE)))
    counts = shares[0][1] + shares[1][1]
    together = sum(terms(parts, sums, counts) for sums, _ in shares)
    torch.testing.assert_close(together, whole, rtol=1e-5, atol=1e-7)
    assert bool((whole > 0).all())


@each_with_detr
def test_a_batch_without_boxes_gives_every_parameter_a_gradient(cfg: str) -> None:
    parts = family(cfg)
    none = targets(parts, LABELS[:0], 2)
    sums, counts = parts.criterion(
        parts.criterion.outputs_of(parts.model, torch.rand(2, 3, SIDE, SIDE), none), none, (SIDE, SIDE)
    )
    sums.sum().backward()
    assert all(p.grad is not None for p in parts.model.parameters() if p.requires_grad)
    assert counts[0] == 0
    assert float(sums[0].sum().detach()) > 0
    assert bool((sums[1:3] == 0).all())


def test_a_network_without_noise_is_trained_too() -> None:
    config = {
        **build(read_cfg("dfine-tiny"), nc=NC, where="", hyp=Hyp(), imgsz=SIDE).model.net.config.to_dict()
    }
    parts = build({"dfine": {**config, "num_denoising": 0}}, nc=NC, where="", hyp=Hyp(), imgsz=SIDE)
    wanted = targets(parts, LABELS, 2)
    sums, _ = parts.criterion(
        parts.criterion.outputs_of(parts.model, torch.rand(2, 3, SIDE, SIDE), wanted), wanted, (SIDE, SIDE)
    )
    assert bool(sums.isfinite().all())


@each_with_detr
def test_the_loss_of_outputs_that_are_not_finite_is_not_finite(cfg: str) -> None:
    parts = family(cfg)
    images = torch.rand(1, 3, SIDE, SIDE)
    images[0, 0, 0, 0] = torch.nan
    wanted = targets(parts, LABELS[:3], 1)
    sums, _ = parts.criterion(parts.criterion.outputs_of(parts.model, images, wanted), wanted, (SIDE, SIDE))
    assert bool(sums.isnan().all())


@each_with_detr
def test_queries_are_ranked_without_suppression(cfg: str) -> None:
    parts = family(cfg)
    boxes = torch.tensor([[10.0, 20.0, 30.0, 50.0], [11.0, 20.0, 30.0, 50.0], [12.0, 20.0, 30.0, 50.0]])
    logits = torch.tensor([[[-9.0, 2.0, -9.0], [1.0, 3.0, -9.0], [-9.0, -9.0, -9.0]]])
    outputs = {"logits": logits, "boxes": boxes[None]}
    (found,) = parts.postprocess(parts.model, outputs, Limits(confidence=0.1))
    assert found.classes.tolist() == [1, 1, 0]
    assert found.scores.tolist() == pytest.approx(torch.tensor([3.0, 2.0, 1.0]).sigmoid().tolist())
    assert found.boxes.tolist() == boxes[[1, 0, 1]].tolist()
    (found,) = parts.postprocess(parts.model, outputs, Limits(confidence=0.1, classes=(0,), most=1))
    assert found.classes.tolist() == [0]


@each_family
def test_boxes_are_in_pixels_and_a_small_image_has_fewer_queries(cfg: str) -> None:
    parts = family(cfg)
    model = parts.model.eval()
    with torch.inference_mode():
        small = model(torch.rand(1, 3, 64, 96))
        large = model(torch.rand(1, 3, 320, 320))
    cells = sum((64 // stride) * (96 // stride) for stride in model.net.config.feat_strides)
    assert small["logits"].shape == (1, cells, NC)
    assert large["logits"].shape == (1, 200, NC)
    centre = (large["boxes"][0, :, :2] + large["boxes"][0, :, 2:]) / 2
    assert float(centre.max()) > 200
    assert float(centre.min()) < 100


@each_with_detr
def test_the_backbone_has_groups_with_a_rate_of_its_own(cfg: str) -> None:
    parts = family(cfg)
    groups = parameter_groups(parts.model, parts.backbone)
    assert [all(name.startswith(parts.backbone) for name in group) for group in groups] == [False] * 3 + [
        True
    ] * 3
    assert sum(map(len, groups)) == len(list(parts.model.named_parameters()))
    norms = [n for n, m in parts.model.named_modules() if isinstance(m, (nn.BatchNorm2d, nn.LayerNorm))]
    assert {f"{name}.weight" for name in norms} == {*groups[1], *groups[4]}


@each_family
def test_settings_that_the_family_cannot_train_with_are_errors(cfg: str) -> None:
    parts = family(cfg)
    for parallel in ("pipeline", "dp"):
        with pytest.raises(TrainerError, match=f"--parallel {parallel}: {cfg} cannot"):
            parts.check(Settings(cfg=cfg, parallel=parallel), cfg)
    parts.check(Settings(cfg=cfg), cfg)


@pytest.mark.parametrize(("key", "cfg"), [("backbone_lr", "yolov5n.yaml"), ("dropout", "dfine-tiny")])
def test_hyper_parameters_without_an_effect_are_errors(key: str, cfg: str) -> None:
    parts = build(read_cfg(cfg), nc=NC, where=cfg, hyp=Hyp(), imgsz=64)
    with pytest.raises(TrainerError, match=f"{key} has no effect on {re.escape(cfg)}"):
        parts.check(Settings(hyp=Hyp(**{key: 0.2})), cfg)


# The authors say 4, 10, 19, 31, 62; 20, 31, 42, 76; and 41, 60.
MILLIONS = {"dfine-n": 3.8, "dfine-s": 10.3, "dfine-m": 19.6, "dfine-l": 31.3, "dfine-x": 62.7}
MILLIONS |= {
    "detr-r50": 41.6,
    "detr-r101": 60.6,
    "rtdetrv2-r18": 20.2,
    "rtdetrv2-r34": 31.4,
    "rtdetrv2-r50": 42.9,
    "rtdetrv2-r101": 76.7,
}


@pytest.mark.parametrize("cfg", MILLIONS)
def test_the_sizes_have_as_many_parameters_as_published(cfg: str) -> None:
    with torch.device("meta"):
        model = build(read_cfg(cfg), nc=80, where=cfg, hyp=Hyp(), imgsz=SIDE).model
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(MILLIONS[cfg], abs=0.05)


@pytest.mark.parametrize("cfg", ["dfine-n", "rtdetrv2-r18", "detr-r50"])
def test_parameters_and_gflops_are_printed(cfg: str, tmp_path: Path) -> None:
    shown = run(tmp_path, "info", "--cfg", cfg, "--imgsz", "64", code=0).stdout
    found = re.search(r"layers, ([\d,]+) parameters", shown)
    assert found, shown
    assert int(found[1].replace(",", "")) / 1e6 == pytest.approx(MILLIONS[cfg], abs=0.05)
    assert re.search(r"[1-9.]+ GFLOPs for an image of 64 px", shown)


def test_an_unknown_size_is_named_with_those_that_exist() -> None:
    with pytest.raises(TrainerError, match="no size 'q'") as error:
        build(read_cfg("dfine-q"), nc=NC, where="--cfg dfine-q", hyp=Hyp(), imgsz=64)
    assert error.value.hint.startswith("use dfine-n, dfine-s, dfine-m, dfine-l, dfine-x")


def snapshot(cfg: str, folder: Path, **how: Any) -> Path:
    """Write a snapshot as the hub has it, for four classes."""
    torch.manual_seed(2)
    config = build(read_cfg(cfg), nc=4, where=cfg, hyp=Hyp(), imgsz=SIDE).model.net.config
    FAMILIES[cfg](config).save_pretrained(folder, **how)
    return folder


@each_family
def test_a_snapshot_gives_its_weights_and_other_classes_a_new_head(cfg: str, tmp_path: Path) -> None:
    content = load_weights(str(snapshot(cfg, tmp_path)))
    stored = FAMILIES[cfg].from_pretrained(tmp_path).model.state_dict()
    assert {f"net.{name}" for name in stored} <= set(content["ema"])
    assert all(
        name.endswith("num_batches_tracked") for name in set(content["ema"]) - {f"net.{n}" for n in stored}
    )
    for name, tensor in stored.items():
        torch.testing.assert_close(content["ema"][f"net.{name}"], tensor, rtol=0, atol=0)
    assert len(content["names"]) == 4
    again = build(json.loads(json.dumps(content["cfg"])), nc=4, where="", hyp=Hyp(), imgsz=SIDE)
    assert {k: v.shape for k, v in again.model.state_dict().items()} == {
        k: v.shape for k, v in content["ema"].items()
    }


@each_family
def test_training_from_a_snapshot_says_that_the_head_is_new_and_needs_the_preset(
    cfg: str, tmp_path: Path
) -> None:
    data = str(squares(tmp_path / "squares"))
    weights = str(snapshot(cfg, tmp_path / "snapshot"))
    task = open_task(small(data, cfg=cfg, weights=weights))
    said: list[str] = []
    body = task.build(said.append).state_dict()
    assert said[0].endswith("tensors; a new head for 2 classes instead of 4")
    name = next(name for name in body if name.startswith("net.backbone."))
    torch.testing.assert_close(body[name], load_weights(weights)["ema"][name], rtol=0, atol=0)
    with pytest.raises(TrainerError, match="--cfg is not given") as error:
        open_task(small(data, weights=weights))
    assert "add --cfg" in error.value.hint


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def another_model(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"model_type": "d_fine"', '"model_type": "detr"'))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def more_classes(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["id2label"] = {k: f"c{k}" for k in range(9)}
    config["label2id"] = {f"c{k}": k for k in range(9)}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_config, "a folder without config.json"),
        (another_model, "config.json describes 'detr'"),
        (pickled, r"no .safetensors: pytorch_model.bin is pickled"),
        (cut_off, "cannot be loaded"),
        (more_classes, "cannot be loaded"),
    ],
)
def test_a_snapshot_that_cannot_be_used_is_one_error(
    damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    damage(snapshot("dfine-tiny", tmp_path))
    with pytest.raises(TrainerError, match=said) as error:
        load_weights(str(tmp_path))
    assert error.value.hint


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("hf://ustc-community/dfine-nano-coco", "not hf://OWNER/NAME@COMMIT"),
        ("hf://ustc-community/dfine-nano-coco@main", "not hf://OWNER/NAME@COMMIT"),
        (f"hf://ustc-community/dfine-nano-coco@{'0' * 40}", "cannot be downloaded"),
    ],
)
def test_a_name_of_the_hub_needs_a_commit_and_the_network(
    weights: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # else it tries again for 20 seconds
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TrainerError, match=said) as error:
        load_weights(weights)
    assert error.value.hint


@pytest.mark.slow
def test_two_killed_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    assert_resumes(tmp_path, "dfine-n")


def write_checkpoint(cfg: str, path: Path) -> str:
    """Write a checkpoint of the family's untrained network."""
    state = family(cfg).model.state_dict()
    names = [f"c{k}" for k in range(NC)]
    rest = {
        "optimizer": {},
        "epoch": 1,
        "step": 1,
        "hyp": {},
        "cfg": read_cfg(cfg),
        "names": names,
        "imgsz": SIDE,
    }
    checkpoint_file.save(path, {"format": checkpoint_file.FORMAT, "model": {}, "ema": state, **rest})
    return str(path)


@pytest.mark.parametrize("cfg", [*FAMILIES, "detr-tiny", "torchvision:ssdlite320_mobilenet_v3_large"])
def test_images_are_padded_to_squares_as_in_the_training(
    cfg: str, tmp_path: Path, run_trainer: Callable[..., tuple[int, str, str]]
) -> None:
    """The boxes are fractions of the sides, which the network knows for squares only."""
    data = squares(tmp_path / "squares", widths=(96,))
    data.write_text(data.read_text().replace("[green, red]", "[c0, c1, c2]"))
    best = write_checkpoint(cfg, tmp_path / "best.pt")
    arguments = ("val", "--weights", best, "--data", data, "--device", "cpu", "--no-plots", "--save-json")
    boxes = []
    for name in ("rect", "no-rect"):
        assert run_trainer(*arguments, f"--{name}", "--project", tmp_path, "--name", name)[0] == 0
        boxes.append(json.loads((tmp_path / name / "predictions.json").read_text()))
    assert boxes[0]
    assert boxes[0] == boxes[1]
    trained = load_trained(best)
    seen = list[torch.Size]()
    trained.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    detector = Detector(trained.model, trained.parts, torch.device("cpu"), torch.float32, Limits())
    detect_in(detector, np.zeros((64, 96, 3), np.uint8), SIDE, trained.parts)
    assert [tuple(shape[2:]) for shape in seen] == [(SIDE, SIDE)]
    with pytest.raises(TrainerError, match=r"--rect: .* squares"):
        trained.parts.check(Settings(cfg=cfg, rect=True), cfg)


@each_with_detr
@pytest.mark.parametrize("kind", [pytest.param("onnx", marks=pytest.mark.slow), "torchscript"])
def test_an_exported_file_computes_the_boxes_without_suppression(cfg: str, kind: str, tmp_path: Path) -> None:
    """`export` compares the file's outputs with the model's, and writes nothing if they differ."""
    if missing := [name for name in NEEDED[kind] if not importlib.util.find_spec(name)]:
        pytest.skip(f"needs {missing[0]}")
    best = write_checkpoint(cfg, tmp_path / "best.pt")
    done = export(best, kind, imgsz=None, batch=1, dynamic=False, image="", out="")
    assert done.path == tmp_path / f"best.{kind}"
    assert done.path.exists()


@pytest.mark.slow
def test_an_exported_file_takes_any_number_of_images(tmp_path: Path) -> None:
    """`export` compares the outputs of one and of two images, too."""
    if missing := [name for name in NEEDED["onnx"] if not importlib.util.find_spec(name)]:
        pytest.skip(f"needs {missing[0]}")
    import onnxruntime

    best = write_checkpoint("dfine-n", tmp_path / "best.pt")
    done = export(best, "onnx", imgsz=None, batch=1, dynamic=True, image="", out="")
    assert (done.any_batch, done.any_size) == (True, False)
    session = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    boxes, scores = session.run(None, {"images": np.zeros((5, *done.shape[1:]), np.float32)})
    assert len(boxes) == len(scores) == 5
