"""What the detectors of Hugging Face's `transformers` share: DETR's descendants, whose queries each find one object."""

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from torchvision.ops import box_convert
from transformers import AutoModelForObjectDetection
from transformers.loss.loss_rt_detr import RTDetrHungarianMatcher, RTDetrLoss
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from trainer.config import ModelCfg, named_families
from trainer.data.batch import Targets
from trainer.detectors import Detections, Limits, Parts, best_pairs
from trainer.errors import TrainerError
from trainer.losses.criterion import Criterion, ImageSize, Outputs
from trainer.weights import checkpoint_file
from trainer.weights.checkpoint import Checkpoint

# The library checks values of tensors in its layers, which a GPU would have to be waited for, and ONNX cannot express.
os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")
disable_progress_bar()
set_verbosity_error()  # what matters in a snapshot is checked here

HUB = "hf://"
# Families whose snapshots can be loaded, by the hub's name; DETR's backbone would need timm.
SNAPSHOTS = {"d_fine": "dfine", "rt_detr_v2": "rtdetrv2"}
Labels = list[dict[str, Tensor]]  # of each image: class_labels int64 (n,), boxes (n, 4), cx cy w h normalised
# The network's outputs that the loss needs: those of all layers, (b, layers, queries, values), and of the encoder.
LAYERS = {
    "logits": "intermediate_logits",
    "pred_boxes": "intermediate_reference_points",
    "pred_corners": "intermediate_predicted_corners",
    "ref_points": "initial_reference_points",
}
ENCODER = {"logits": "enc_topk_logits", "pred_boxes": "enc_topk_bboxes"}
NOISE = "denoising_meta_values"


class Network(nn.Module):
    """A network of transformers without its loss, for images in 0..1."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self._queries = net.config.num_queries

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The backbone, the encoder, and the rest, which is the head."""
        children = dict(self.net.named_children())
        backbone, *encoder = (children.pop(name) for name in ("backbone", "encoder_input_proj", "encoder"))
        rest = nn.ModuleList(children.values())
        return [("backbone", backbone), ("encoder", nn.ModuleList(encoder)), ("decoder", rest)]

    def forward(self, images: Tensor, labels: Labels | None = None) -> dict[str, Any]:
        """Float (b, 3, h, w), sides multiples of 32 -> logits (b, q, nc), and boxes (b, q, 4) xyxy in px.

        In training the outputs of all layers instead, also for noisy copies of the `labels`.
        """
        height, width = images.shape[2:]
        # Each query starts from a cell, and a small image has few.
        cells = sum(int(height // stride) * int(width // stride) for stride in self.net.config.feat_strides)
        self.net.config.num_queries = min(self._queries, cells)
        outputs = self.net(images, labels=labels)
        if self.training:
            of_loss = (*LAYERS.values(), *ENCODER.values(), NOISE)
            needed = {name: outputs[name] for name in of_loss if name in outputs}
            # The embedding of noisy classes is used with labels only; a network can be without it.
            embedding = getattr(self.net, "denoising_class_embed", None)
            return {**needed, "unused": embedding.weight.sum() * 0} if embedding else needed
        boxes = in_px(outputs.intermediate_reference_points[:, -1], images)
        return {"logits": outputs.intermediate_logits[:, -1].float(), "boxes": boxes}


def in_px(boxes: Tensor, images: Tensor) -> Tensor:
    """Return boxes (..., 4), cx cy w h normalised, as xyxy in pixels of the images."""
    height, width = images.shape[2:]
    sides = torch.tensor([width, height, width, height], dtype=torch.float32, device=images.device)
    corners: Tensor = box_convert(boxes.float(), "cxcywh", "xyxy")
    return corners * sides


class Matcher(RTDetrHungarianMatcher):  # type: ignore[misc]
    """The library's matcher, which compares the queries of an image with its own boxes: the library's, with all."""

    @torch.no_grad()
    def forward(self, outputs: dict[str, Tensor], targets: Labels) -> list[tuple[Tensor, Tensor]]:
        """Return the matched queries and boxes of each image."""
        predicted = outputs["pred_boxes"]
        logits = outputs["logits"]
        boxes = pad_sequence([image["boxes"] for image in targets], batch_first=True)
        classes = pad_sequence([image["class_labels"] for image in targets], batch_first=True)
        scores = logits.sigmoid() if self.use_focal_loss else logits.softmax(-1)
        score = scores.gather(2, classes[:, None].expand(-1, logits.shape[1], -1))  # of each box's class
        if self.use_focal_loss:
            positive = self.alpha * (1 - score) ** self.gamma * -(score + 1e-8).log()
            negative = (1 - self.alpha) * score**self.gamma * -(1 - score + 1e-8).log()
            class_cost = positive - negative
        else:
            class_cost = -score
        distance = torch.cdist(predicted, boxes, p=1)
        _, giou = overlap(predicted[:, :, None], boxes[:, None])
        cost = self.class_cost * class_cost + self.bbox_cost * distance - self.giou_cost * giou
        most = torch.finfo(cost.dtype).max
        cost = torch.nan_to_num(cost, nan=most, posinf=most, neginf=most).cpu()
        matches = []
        for image_cost, image in zip(cost, targets, strict=True):
            count = len(image["boxes"])  # the columns after them pad
            queries, matched = linear_sum_assignment(image_cost[:, :count])
            matches.append((torch.as_tensor(queries), torch.as_tensor(matched)))
        return matches


class InPairs(RTDetrLoss):  # type: ignore[misc]
    """The library's loss, which compares a matched query with its own box: the library's, with all of them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.matcher = Matcher(config)

    def loss_labels_vfl(
        self, outputs: dict[str, Tensor], targets: Labels, indices: Any, num_boxes: float, log: bool = True
    ) -> dict[str, Tensor]:
        """Return the varifocal loss."""
        matched, boxes = self.matched(targets, indices)
        classes = _of_matched("class_labels", targets, indices)
        logits = outputs["logits"]
        places = (*matched, classes)
        iou, _ = overlap(outputs["pred_boxes"][matched].detach(), boxes)
        score = torch.zeros_like(logits)
        score[places] = iou.to(logits.dtype)
        others = torch.ones_like(logits)
        others[places] = 0
        weight = self.alpha * logits.detach().sigmoid().pow(self.gamma) * others + score
        loss = F.binary_cross_entropy_with_logits(logits, score, weight, reduction="sum")
        return {"loss_vfl": loss / num_boxes}

    def loss_boxes(
        self, outputs: dict[str, Tensor], targets: Labels, indices: Any, num_boxes: float
    ) -> dict[str, Tensor]:
        """Return the L1 and GIoU losses."""
        matched, boxes = self.matched(targets, indices)
        predicted = outputs["pred_boxes"][matched]
        _, giou = overlap(predicted, boxes)
        return {
            "loss_bbox": (predicted - boxes).abs().sum() / num_boxes,
            "loss_giou": (1 - giou).sum() / num_boxes,
        }

    def matched(self, targets: Labels, indices: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the images and numbers of the matched queries, and their boxes (n, 4)."""
        return self._get_source_permutation_idx(indices), _of_matched("boxes", targets, indices)


def _of_matched(key: str, targets: Labels, indices: Any) -> Tensor:
    """Return the boxes or classes that the matched queries should find, of all images together."""
    return torch.cat([image[key][j] for image, (_, j) in zip(targets, indices, strict=True)])


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IoU and GIoU (Rezatofighi et al. 2019) of boxes (..., 4) as cx, cy, w, h, which broadcast."""
    a_low = a[..., :2] - 0.5 * a[..., 2:]
    a_high = a[..., :2] + 0.5 * a[..., 2:]
    b_low = b[..., :2] - 0.5 * b[..., 2:]
    b_high = b[..., :2] + 0.5 * b[..., 2:]
    shared = (torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)).clamp(min=0).prod(-1)
    hull = (torch.maximum(a_high, b_high) - torch.minimum(a_low, b_low)).prod(-1)
    union = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - shared
    iou = shared / union
    return iou, iou - (hull - union) / hull


class QueryLoss(Criterion):
    """A loss of transformers, `InPairs` or a subclass of it, with the boxes of all ranks as its divisor.

    The library divides by the boxes of a process. Here its values are multiplied by them, which gives sums.
    """

    terms: tuple[str, ...] = ("vfl", "bbox", "giou")

    def __init__(self, loss: Any, config: Any) -> None:
        super().__init__([1.0] * len(self.terms))  # the library applies its own weights
        self.loss = loss
        self._config = config

    def without_noise(self) -> None:
        """Learn without noisy copies of the boxes."""
        self._config.num_denoising = 0

    def outputs_of(self, network: nn.Module, images: Tensor, targets: Targets, /) -> Outputs:
        """Run the network on the images and noisy copies of their boxes."""
        return network(images, labels_of(targets["labels"], len(images)))

    def counts(self, outputs: dict[str, Any], labels: Labels) -> Sequence[float]:
        """Return the counts (d,), of which the first are the boxes."""
        return [sum(len(image["boxes"]) for image in labels)]

    def sums(self, name: str, value: Tensor, counts: Tensor) -> Tensor:
        """Return the sums (d,) whose quotients are a loss of the library."""
        total = value * counts[0].clamp(min=1).float()
        return F.pad(total[None], (0, len(counts) - 1))

    def forward(self, outputs: dict[str, Any], targets: Targets, size: ImageSize, /) -> tuple[Tensor, Tensor]:
        """Return the sums (t, d) and the counts (d,)."""
        outputs = {
            name: value.float() if isinstance(value, Tensor) else value for name, value in outputs.items()
        }
        rows = targets["labels"]
        labels = labels_of(rows, len(outputs[LAYERS["logits"]]))
        counts = torch.tensor(self.counts(outputs, labels), dtype=torch.float64, device=rows.device)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        totals = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
        zero = torch.stack(totals).sum() * 0  # every output takes part
        sums = {term: zero.expand(len(counts)) for term in self.terms}
        if torch.isfinite(zero):  # else the matching would fail, and the loss is NaN
            for name, value in self.loss(self._by_layer(outputs), labels).items():
                term = name.split("_")[1]  # loss_TERM, with a suffix for each layer
                sums[term] = sums[term] + self.sums(name, value, counts)
        return torch.stack(list(sums.values())), counts

    def _by_layer(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs as the library's loss takes them: of the last layer, the others, and the noisy copies."""
        whole = {key: outputs[name] for key, name in LAYERS.items() if name in outputs}
        encoder = {key: outputs[name] for key, name in ENCODER.items()}
        whole["pred_boxes"] = whole["pred_boxes"].clamp(0, 1)
        encoder["pred_boxes"] = encoder["pred_boxes"].clamp(0, 1)
        layers = min(values.shape[1] for values in whole.values())
        noise = outputs.get(NOISE)
        extra = dict[str, Any]()
        if noise:
            noisy = dict[str, Tensor]()
            clean = dict[str, Tensor]()
            for key, values in whole.items():
                noisy[key], clean[key] = values.split(noise["dn_num_split"], 2)
            whole = clean
            extra = {"dn_auxiliary_outputs": by_layer(noisy, layers), NOISE: noise}
        last = {key: whole[key][:, -1] for key in ENCODER}
        others = [*by_layer(whole, layers - 1), encoder]
        return {**last, "auxiliary_outputs": others, **extra}


def by_layer(values: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Return the outputs of the first `count` layers, and with corners the last layer's, which teach the others."""
    teacher = {}
    if "pred_corners" in values:
        teacher = {
            "teacher_corners": values["pred_corners"][:, -1],
            "teacher_logits": values["logits"][:, -1],
        }
    layers = []
    for k in range(count):
        layer = {key: of_layers[:, k] for key, of_layers in values.items()}
        layers.append({**layer, **teacher})
    return layers


def labels_of(rows: Tensor, images: int) -> Labels:
    """Return the labels of each image from rows (n, 6), [image, class, cx, cy, w, h] normalised."""
    labels = []
    for k in range(images):
        own = rows[rows[:, 0] == k]
        labels.append({"class_labels": own[:, 1].long(), "boxes": own[:, 2:]})
    return labels


def decode(model: Any, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the boxes (b, q, 4) xyxy px and the scores (b, q, nc) of all queries."""
    return outputs["boxes"], outputs["logits"].sigmoid()


def postprocess(model: Any, outputs: dict[str, Tensor], limits: Limits) -> list[Detections]:
    """Return the detections of each image, without suppression: the best pairs of a query and a class."""
    return best_pairs(*decode(model, outputs), limits)


def describe(cfg: ModelCfg, sizes: Mapping[str, dict[str, Any]], nc: int, where: str) -> dict[str, Any]:
    """Return the arguments of the library's configuration, from {family: a size, or a stored configuration}."""
    family = next(name for name in named_families() if name in cfg)
    described = cfg[family]
    if isinstance(described, str):
        if described not in sizes:
            names = ", ".join(f"{family}-{size}" for size in sizes)
            missing = f"no size {described!r}" if described else "a size is missing"
            raise TrainerError(f"{where}: {missing}", f"use {names}")
        described = sizes[described]
    # Only pretrained networks can do with frozen batch norms.
    return {**copy.deepcopy(described), "num_labels": nc, "freeze_backbone_batch_norms": False}


def parts_of(net: Any, loss: QueryLoss) -> Parts:
    """Return the parts of a family of these networks."""
    return Parts(
        Network(net),
        loss,
        postprocess,
        needs_squares=True,
        can_compile=False,  # the matching runs on the CPU
        backbone="net.backbone.",
        decode=decode,
        has_ranked_rows=True,
        exports_any_size=False,  # the number of queries depends on it
        needs_targets=True,  # for its noisy queries
        can_split=False,
    )


def load_snapshot(weights: str) -> Checkpoint:
    """Load a snapshot of the Hugging Face hub as checkpoint_file.load does a checkpoint.

    `weights` is its folder, with config.json and .safetensors, or hf://OWNER/NAME@COMMIT. Nothing in it is executed.
    """
    where = f"--weights {weights}"
    folder = _fetch(weights) if weights.startswith(HUB) else Path(weights)
    config = _config(folder, where)
    kind = str(config.get("model_type"))
    if kind not in SNAPSHOTS:
        families = ", ".join(SNAPSHOTS.values())
        raise TrainerError(f"{where}: config.json describes {kind!r}", f"use one of {families}")
    family = SNAPSHOTS[kind]
    if not any(folder.glob("*.safetensors")):
        pickled = [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt*"))]
        reason = f": {pickled[0]} is pickled, and could run code when it is loaded" if pickled else ""
        raise TrainerError(f"{where}: no .safetensors{reason}", "use a revision with model.safetensors")
    try:
        net, report = AutoModelForObjectDetection.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            freeze_backbone_batch_norms=False,
            output_loading_info=True,
        )
    except Exception as error:  # the library raises anything on damaged files
        raise TrainerError(f"{where}: cannot be loaded: {_first_line(error)}", "download it again") from None
    missing = sorted(key for key in report["missing_keys"] if not key.endswith("num_batches_tracked"))
    if missing:
        what = f"{where}: {len(missing)} tensors of the network are missing, the first is {missing[0]}"
        raise TrainerError(what, "download it again")
    state = {f"net.{key}": tensor for key, tensor in net.model.state_dict().items()}
    names = [str(net.config.id2label[k]) for k in range(net.config.num_labels)]
    return {
        "format": checkpoint_file.FORMAT,
        "task": "detect",
        "cfg": {family: json.loads(net.config.to_json_string())},
        "names": names,
        "imgsz": 640,  # as these families were trained
        "ema": state,
        "hyp": {},
        "epoch": -1,
    }


def _config(folder: Path, where: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path}: cannot be read: {error}", "download it again") from None
    if not isinstance(content, dict):
        raise TrainerError(f"{path}: not a mapping", "download it again")
    return content


def _fetch(weights: str) -> Path:
    """Download the snapshot hf://OWNER/NAME@COMMIT, or find it in the library's cache; return its folder."""
    address = re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})", weights.removeprefix(HUB))
    if not address:
        raise TrainerError(
            f"--weights {weights}: not {HUB}OWNER/NAME@COMMIT",
            "a branch can move, so give the commit's 40 digits, from the list of commits on the model's page",
        )
    name, commit = address.groups()
    files = ["config.json", "*.safetensors", "*.index.json"]
    try:
        return Path(snapshot_download(name, revision=commit, allow_patterns=files))
    except Exception as error:  # of the network, the hub and the disk
        raise TrainerError(
            f"--weights {weights}: cannot be downloaded: {_first_line(error)}",
            "download it on a machine with network, and give its folder: --weights FOLDER",
        ) from None


def _first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
