"""DETR (Carion et al. 2020), by transformers: --cfg detr-r50 or detr-r101."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss
from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d

from trainer.config import Hyp, ModelCfg
from trainer.data.batch import Targets
from trainer.detectors import Parts
from trainer.detectors.transformers_nets import (
    LAYERS,
    Labels,
    QueryLoss,
    by_layer,
    decode,
    describe,
    in_px,
    postprocess,
)
from trainer.losses.criterion import Criterion, Outputs
from trainer.models.torchvision_nets import Classifier


def _resnet(depths: list[int]) -> dict[str, Any]:
    backbone = {"model_type": "resnet", "depths": depths, "out_features": ["stage4"]}
    return {"backbone_config": backbone, "auxiliary_loss": True}


SIZES = {"r50": _resnet([3, 4, 6, 3]), "r101": _resnet([3, 4, 23, 3])}


def build(cfg: ModelCfg, *, nc: int, where: str, hyp: Hyp, imgsz: int) -> Parts:
    """Build {"detr": a size, or the library's configuration} for `nc` classes."""
    dropout = {} if hyp.dropout is None else {"dropout": hyp.dropout}
    arguments = describe(cfg, SIZES, nc, where) | dropout
    net = DetrForObjectDetection(DetrConfig(**arguments))
    _unfreeze(net.model.backbone)
    _initialize(net)
    return Parts(
        Network(net),
        DetrLoss(net),
        postprocess,
        needs_squares=True,
        can_compile=False,  # the matching runs on the CPU
        reads_values=True,  # of the mask, which is full
        backbone="net.model.backbone.",
        has_dropout=True,
        decode=decode,
        has_ranked_rows=True,
        exports_any_size=False,  # the sides of the images are traced
        can_split=False,
    )


def _unfreeze(backbone: nn.Module) -> None:
    """Let all layers of the backbone learn, and its batch norms see their batches: it has random weights."""
    backbone.requires_grad_(True)
    for module in list(backbone.modules()):
        for name, frozen in module.named_children():
            if isinstance(frozen, DetrFrozenBatchNorm2d):
                setattr(module, name, nn.BatchNorm2d(len(frozen.weight)))


def _initialize(net: Any) -> None:
    """Draw the weights outside of the backbone as the paper does, and scale the residual branches down.

    The library draws all of them with a deviation of 0.02, as is enough for weights that are loaded afterwards: the
    queries are then nearly equal, and so are their boxes. Dividing the last layer of each residual branch by the square
    root of the number of branches is GPT-2's rule (Radford et al. 2019). Without it, the branches add nearly the same
    large vector to all cells, the encoder's outputs hardly differ, and all queries again find one box.
    """
    nn.init.normal_(net.model.query_position_embeddings.weight)
    for transformer in (net.model.encoder, net.model.decoder):
        for weight in transformer.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)
        last = [module for name, module in transformer.named_modules() if name.endswith(("o_proj", "fc2"))]
        for layer in last:
            layer.weight.data /= len(last) ** 0.5
    for head in (net.model.input_projection, net.class_labels_classifier, *net.bbox_predictor.layers):
        head.reset_parameters()


class Network(Classifier):
    """DETR without its loss, behind the normalisation of its images."""

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The backbone, the encoder, and the rest, which is the head."""
        net: Any = self.net
        rest = (
            net.model.query_position_embeddings,
            net.model.decoder,
            net.class_labels_classifier,
            net.bbox_predictor,
        )
        encoder = nn.ModuleList((net.model.input_projection, net.model.encoder))
        return [("backbone", net.model.backbone), ("encoder", encoder), ("decoder", nn.ModuleList(rest))]

    def forward(self, images: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Float (b, 3, h, w) in 0..1 -> logits (b, q, nc), and boxes (b, q, 4) xyxy in px.

        In training the outputs of all layers instead, (b, layers, q, values), with nc + 1 classes.
        """
        net: Any = self.net
        decoded = net.model((images - self.mean) / self.std)
        last = decoded.last_hidden_state  # (b, q, d)
        if self.training:
            hidden = torch.cat((decoded.intermediate_hidden_states[:-1], last[None])).transpose(0, 1)
            return {
                LAYERS["logits"]: net.class_labels_classifier(hidden),
                LAYERS["pred_boxes"]: net.bbox_predictor(hidden).sigmoid(),
            }
        scores = net.class_labels_classifier(last).float().softmax(-1)[..., :-1]
        boxes = net.bbox_predictor(last).sigmoid()
        return {"logits": scores.logit(), "boxes": in_px(boxes, images)}


class DetrLoss(QueryLoss):
    """DETR's loss: the cross entropy is a mean weighted by class, whose weights are added up over all ranks."""

    terms = ("ce", "bbox", "giou")

    def __init__(self, net: Any) -> None:
        c = net.config
        Criterion.__init__(self, [1.0, c.bbox_loss_coefficient, c.giou_loss_coefficient])
        matcher = HungarianMatcher(c.class_cost, c.bbox_cost, c.giou_cost)
        self.loss = ImageLoss(matcher, c.num_labels, c.eos_coefficient, ["labels", "boxes"])
        self._net = (net,)  # in a tuple: its weights are the network's

    def without_noise(self) -> None:
        """Learn without dropout."""
        for module in self._net[0].modules():
            for name in ("dropout", "attention_dropout", "activation_dropout"):
                if hasattr(module, name):
                    setattr(module, name, 0.0)

    def outputs_of(self, network: nn.Module, images: Tensor, targets: Targets, /) -> Outputs:
        """Run the network on the images."""
        return network(images)

    def counts(self, outputs: dict[str, Any], labels: Labels) -> list[float]:
        """Return the boxes, and the weights of the classes of all queries: those of no object count less."""
        images, _, queries, _ = outputs[LAYERS["logits"]].shape
        boxes = [len(image_labels["boxes"]) for image_labels in labels]
        matched = sum(min(count, queries) for count in boxes)
        others = images * queries - matched
        return [sum(boxes), matched + self.loss.eos_coef * others]

    def sums(self, name: str, value: Tensor, counts: Tensor) -> Tensor:
        """Return the sums (2,) whose quotients are a loss of the library."""
        sums = value * counts.clamp(min=1).float()
        is_divisor = [0, 1] if "_ce" in name else [1, 0]  # for each count
        return sums * sums.new_tensor(is_divisor)

    def _by_layer(self, outputs: dict[str, Any]) -> dict[str, Any]:
        whole = {key: outputs[name] for key, name in LAYERS.items() if name in outputs}
        *others, last = by_layer(whole, whole["logits"].shape[1])
        return {**last, "auxiliary_outputs": others}
