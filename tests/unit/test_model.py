import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import TrainerError
from trainer.models import freeze
from trainer.models.blocks import SPPF
from trainer.models.heads import Detect, DetectDFL
from trainer.models.yolo import Yolo, build_yolo, fuse, load_cfg

# parameters, and those with batch norm folded in (nc = 80)
PARAMETERS = {
    "yolov5n": (1_872_157, 1_867_405),
    "yolov5s": (7_235_389, 7_225_885),
    "yolov5m": (21_190_557, 21_172_173),
    "yolov5l": (46_563_709, 46_533_693),
    "yolov5x": (86_749_405, 86_705_005),
    # with a fourth level; published, rounded: 3.2, 12.6, 35.7, 76.8 (unfused) and 140.7 million
    "yolov5n6": (3_246_940, 3_239_884),
    "yolov5s6": (12_626_620, 12_612_508),
    "yolov5m6": (35_731_932, 35_704_908),
    "yolov5l6": (76_770_172, 76_726_332),
    "yolov5x6": (140_794_780, 140_730_220),
    # with the anchor-free head; published, rounded: 2.6, 9.1, 25.1, 53.2 and 97.2 million, with 16 constants among them
    "yolov5nu": (2_654_800, None),
    "yolov5su": (9_153_136, None),
    "yolov5mu": (25_111_440, None),
    "yolov5lu": (53_225_008, None),
    "yolov5xu": (97_276_432, None),
    # published, rounded: 3.2, 11.2, 25.9, 43.7 and 68.2 million
    "yolov8n": (3_157_184, None),
    "yolov8s": (11_166_544, None),
    "yolov8m": (25_902_624, None),
    "yolov8l": (43_691_504, None),
    "yolov8x": (68_229_632, None),
    # published, rounded: 2.6, 9.4, 20.1, 25.3 and 56.9 million
    "yolo11n": (2_624_064, None),
    "yolo11s": (9_458_736, None),
    "yolo11m": (20_114_672, None),
    "yolo11l": (25_372_144, None),
    "yolo11x": (56_966_160, None),
    # published without the branches that only train: 2.4, 9.5, 20.4, 24.8 and 55.7 million
    "yolo26n": (2_572_280, None),
    "yolo26s": (10_009_784, None),
    "yolo26m": (21_896_248, None),
    "yolo26l": (26_299_704, None),
    "yolo26x": (58_993_368, None),
}


def nano(nc: int = 80) -> Yolo:
    torch.manual_seed(0)
    return build_yolo(load_cfg("yolov5n.yaml"), nc=nc)


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_those_of_the_published_models(name: str) -> None:
    with torch.device("meta"):  # no memory, no arithmetic: only the shapes count here
        model = build_yolo(load_cfg(f"{name}.yaml"), nc=80)
    whole, fused = PARAMETERS[name]
    assert parameters(model) == whole
    assert model.detect.strides == [8, 16, 32, 64][: 4 if name.endswith("6") else 3]
    if fused:
        assert parameters(fuse(model)) == fused


def test_batch_norm_has_the_published_constants() -> None:
    norms = [
        m
        for m in build_yolo(load_cfg("yolov5n.yaml"), nc=80).modules()
        if isinstance(m, torch.nn.BatchNorm2d)
    ]
    assert len(norms) == 57
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}


def test_the_anchor_free_head_has_its_prior_and_decodes_to_pixels() -> None:
    torch.manual_seed(0)
    model = build_yolo(load_cfg("yolov5nu.yaml"), nc=2).eval()
    head = model.detect
    assert isinstance(head, DetectDFL)
    raw = model(torch.rand(2, 3, 64, 96))
    assert [tuple(t.shape) for t in raw] == [(2, 8, 12, 66), (2, 4, 6, 66), (2, 2, 3, 66)]
    for stride, box, cls in zip((8, 16, 32), head.cv2, head.cv3, strict=True):
        assert set(box[-1].bias.tolist()) == {1.0}
        assert cls[-1].bias.tolist() == pytest.approx([math.log(5 / 2 / (640 / stride) ** 2)] * 2)

    raw = [torch.zeros(1, n, n, 66) for n in (8, 4, 2)]
    certain = raw[1][0, 1, 3].view(-1)  # row 1, column 3 of stride 16: its point is (56, 24)
    for side, distance in enumerate((1, 0, 2, 5)):
        certain[side * 16 + distance] = 100.0
    certain[64:] = torch.tensor([2.0, -2.0])
    decoded = head.decode(raw)
    assert decoded.shape == (1, 64 + 16 + 4, 7)
    # All-zero outputs: every distance is the mean of 0 to 15, so that the box stands around its point.
    assert decoded[0, 0].tolist() == pytest.approx([4, 4, 15 * 8, 15 * 8, 1, 0.5, 0.5])
    left = 56 - 16
    top = 24
    right = 56 + 2 * 16
    bottom = 24 + 5 * 16
    sure = 1 / (1 + math.exp(-2))
    not_sure = 1 / (1 + math.exp(2))
    assert decoded[0, 64 + 4 + 3].tolist() == pytest.approx(
        [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top, 1, sure, not_sure], rel=1e-5
    )


def test_state_dict_has_the_published_names_and_shapes() -> None:
    state = nano().state_dict()
    lines = [f"{k} {'x'.join(map(str, v.shape)) if v.shape else 'scalar'}" for k, v in state.items()]
    assert len(lines) == 349
    assert "model.0.conv.weight 16x3x6x6" in lines
    assert "model.2.m.0.cv2.bn.running_mean 16" in lines
    assert "model.9.cv2.conv.weight 256x512x1x1" in lines
    assert "model.24.anchors 3x3x2" in lines
    assert "model.24.m.2.bias 255" in lines
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest == "c369c6f2ffd7fbeeecd6d0d2734b7c3095242a3cb95e6b42c32a2c2dae452a36"


def test_outputs_have_three_levels_with_strides_8_16_32() -> None:
    model = nano()
    assert model.detect.strides == [8, 16, 32]
    shapes = [tuple(t.shape) for t in model(torch.rand(2, 3, 64, 96))]
    assert shapes == [(2, 3, 8, 12, 85), (2, 3, 4, 6, 85), (2, 3, 2, 3, 85)]
    assert model.detect.anchors[1, 0].tolist() == [30 / 16, 61 / 16]


@pytest.mark.parametrize("nc", [1, 80])
def test_head_biases_get_the_prior_on_top_of_their_default(nc: int) -> None:
    placed = nano(nc)
    plain = nano(nc)
    torch.manual_seed(1)
    plain.detect.m = torch.nn.ModuleList(torch.nn.Conv2d(c, 3 * (nc + 5), 1) for c in (64, 128, 256))
    before = [conv.bias.detach().clone().view(3, -1) for conv in plain.detect.m]
    plain.detect.place([8, 16, 32])
    objectness = (-6.6846, -5.2983, -3.9120)
    cls = math.log(0.6 / (nc - 0.99999))
    for old, conv, obj in zip(before, plain.detect.m, objectness, strict=True):
        added = conv.bias.detach().view(3, -1) - old
        assert added[:, :4].abs().max() == 0
        assert added[:, 4].tolist() == pytest.approx([obj] * 3, abs=1e-4)
        assert added[:, 5:].flatten().tolist() == pytest.approx([cls] * 3 * nc, abs=1e-4)
    assert cls == pytest.approx({80: -4.8803, 1: 11.0021}[nc], abs=1e-3)
    mean = placed.detect.m[2].bias.detach().view(3, -1)[:, 4].mean().item()
    assert mean == pytest.approx(-3.912, abs=0.1)  # the built model has it too


def test_decode_gives_pixels() -> None:
    head = nano(2).detect
    raw = [torch.zeros(1, 3, n, n, 7) for n in (8, 4, 2)]
    raw[1][0, 2, 1, 3] = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.0])
    decoded = head.decode(raw)
    assert decoded.shape == (1, 3 * (64 + 16 + 4), 7)
    # All-zero outputs: the cell's middle, the anchor's size, probability one half.
    assert decoded[0, 9].tolist() == pytest.approx([1.5 * 8, 1.5 * 8, 10, 13, 0.5, 0.5, 0.5])
    row = decoded[0, 3 * 64 + 2 * 16 + 1 * 4 + 3].tolist()

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert row[:2] == pytest.approx([(2 * sigmoid(1) - 0.5 + 3) * 16, (2 * sigmoid(-1) - 0.5 + 1) * 16])
    assert row[2:4] == pytest.approx([(2 * sigmoid(0.5)) ** 2 * 59, (2 * sigmoid(-0.5)) ** 2 * 119], rel=1e-5)
    assert row[4:] == pytest.approx([sigmoid(2), sigmoid(-2), 0.5])


def test_fusing_keeps_the_outputs() -> None:
    model = nano(3).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(module.running_var, 0.05, 0.2)  # keeps the signal alive through the layers
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.uniform_(module.bias, -0.5, 0.5)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        before = model(images)
        after = fuse(model)(images)
    for a, b in zip(before, after, strict=True):
        assert (a[0] - a[1]).abs().max() > 0.01  # the images make a difference
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * a.abs().max().item())


def test_sppf_pools_over_5_9_and_13_px() -> None:
    torch.manual_seed(0)
    block = SPPF(8, 8).eval()
    x = torch.rand(1, 8, 16, 16)
    hidden = block.cv1(x)
    pooled = [torch.nn.functional.max_pool2d(hidden, size, 1, size // 2) for size in (5, 9, 13)]
    torch.testing.assert_close(block(x), block.cv2(torch.cat((hidden, *pooled), 1)))


def test_gradients_of_joined_maps_are_dense_on_a_cpu() -> None:
    """Of 16 channels, SiLU's gradient of a slice takes 20 times as long."""
    slices = list[str]()
    seen = set[str]()

    class Gradients(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name in ("silu_backward", "upsample_nearest2d_backward"):
                seen.add(name)
                if not args[0].is_contiguous(memory_format=torch.channels_last):
                    slices.append(f"{name} of {tuple(args[0].shape)}")
            return func(*args, **(kwargs or {}))

    model = nano(3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    raw = model(torch.rand(2, 64, 64, 3).permute(0, 3, 1, 2))
    with Gradients():
        torch.stack([t.sum() for t in raw]).sum().backward()
    assert len(seen) == 2
    assert slices == []


def user_file(**changes: object) -> dict[str, object]:
    cfg: dict[str, object] = {
        "nc": 4,
        "depth_multiple": 0.5,
        "width_multiple": 0.25,
        "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
        "backbone": [
            [-1, 1, "Conv", [32, 3, 2]],
            [-1, 1, "Conv", [64, 3, 2]],
            [-1, 4, "Bottleneck", [64]],
            [-1, 1, "nn.MaxPool2d", [2, 2]],
        ],
        "head": [
            [-1, 1, "Conv", [64, 3, 2]],
            [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
            [[-1, 3], 1, "Concat", [1]],
            [[6, 4], 1, "Detect", ["nc", "anchors"]],
        ],
    }
    return {**cfg, **changes}


def test_a_users_own_file_works(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(user_file()))
    model = build_yolo(load_cfg(str(path)), nc=7)
    assert model.detect.strides == [8, 16]
    assert [tuple(t.shape) for t in model(torch.rand(1, 3, 32, 32))] == [(1, 2, 4, 4, 12), (1, 2, 2, 2, 12)]
    assert len(model.model[2]) == 2  # 4 repeats at half the depth
    assert isinstance(model.model[-1], Detect)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activation": "relu"}, ":1: unknown key `activation`"),
        ({"nc": "many"}, "nc must be a number above 0, not 'many'"),
        (
            {"anchors": [[10, 13, 16]] * 2},
            "head row 3: [[6, 4], 1, 'Detect', ['nc', 'anchors']] cannot be built",
        ),
        ({"backbone": [[-1, 1, "os.system", ["true"]]]}, "cannot be built: unknown module 'os.system'"),
        ({"backbone": [[-1, 1, "Conv", [8, 3, 0]]]}, "cannot be built"),
        ({"width_multiple": float("inf")}, "cannot be built"),
        ({"backbone": [[-1, 1, "Conv"]]}, "backbone row 0: [-1, 1, 'Conv'] cannot be built"),
        ({"backbone": [[-1, 0, "Conv", [8]]]}, "the number of repeats is 0"),
        ({"backbone": [[5, 1, "Conv", [8]]]}, "it takes its input from layer 5"),
        (
            {"backbone": [[-1, 1, "Conv", [8, "wide"]]] * 4},
            "backbone row 0: [-1, 1, 'Conv', [8, 'wide']] cannot",
        ),
        ({"anchors": []}, "it needs the key `anchors`"),
        ({"head": [[-1, 1, "Conv", [8, 3, 2]]]}, "the last row of the head"),
        ({"head": [[-1, 1, "Detect", ["nc", "anchors"]]]}, "1 inputs, but 2 levels"),
        (
            {"head": [[[0, 3], 1, "Concat", [1]], [[-1, 3], 1, "Detect", ["nc", "anchors"]]]},
            "do not fit together",
        ),
    ],
)
def test_bad_model_files_are_named_with_their_row(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(user_file(**change)))
    with pytest.raises(TrainerError) as error:
        build_yolo(load_cfg(str(path)), nc=2, where=str(path))
    assert said in error.value.message
    assert str(path) in error.value.message


def test_a_missing_model_file_names_the_packaged_ones() -> None:
    with pytest.raises(TrainerError) as error:
        load_cfg("yolov5q.yaml")
    assert "yolov5n.yaml" in error.value.hint


def test_frozen_layers_stay_as_they_are_and_the_others_train() -> None:
    model = nano(3)
    assert freeze(model, (0, 1, 5)) == sum(parameters(model.model[k]) for k in (0, 1, 5))
    before = {k: v.clone() for k, v in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
    sum(t.square().mean() for t in model(torch.rand(2, 3, 64, 64))).backward()
    optimizer.step()
    for name, value in model.named_parameters():
        frozen = name.split(".")[1] in ("0", "1", "5")
        assert torch.equal(value, before[name]) is frozen, name


@pytest.mark.parametrize(("numbers", "said"), [((25,), "no layer 25"), (range(25), "no layer is left")])
def test_what_cannot_be_frozen_is_an_error(numbers: tuple[int, ...], said: str) -> None:
    with pytest.raises(TrainerError, match=said):
        freeze(nano(3), numbers)
