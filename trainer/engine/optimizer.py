"""Optimizer: its parameter groups, and their learning rates and momentum in each step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.config.presets import Hyp, gathered, nominal_batch
from trainer.engine.musgd import MUON, MuSGD
from trainer.engine.schedule import Rates

# Of parameters; scales are the weights of norms. The groups are in this order, then again for a backbone.
KINDS = ("biases", "scales", "weights")


def _kind_of(group: int) -> str:
    """Return the kind of the parameters in a group of `parameter_groups`."""
    return KINDS[group % len(KINDS)]


def _is_backbone(group: int) -> bool:
    return group >= len(KINDS)


def build_optimizer(
    model: nn.Module, name: str, hyp: Hyp, batch: int, groups: Sequence[Sequence[str]]
) -> Optimizer:
    """Create SGD (nesterov), MuSGD, Adam or AdamW over the groups of parameter names that `parameter_groups` returns.

    Only weights other than those of norms decay, by `weight_decay` times the images per optimizer step over the
    nominal batch. A backbone's groups carry the factor of their learning rate.
    """
    parameters = dict(model.named_parameters())
    decay = hyp.weight_decay * batch * gathered(hyp, batch) / nominal_batch(hyp, batch)
    options: list[dict[str, Any]] = []
    for group, names in enumerate(groups):
        option: dict[str, Any] = {
            "params": [parameters[name] for name in names],
            "weight_decay": decay if _kind_of(group) == "weights" else 0.0,
        }
        if _is_backbone(group):
            option["lr_factor"] = hyp.backbone_lr
        options.append(option)
    if name == "SGD":
        return _sgd(options, hyp, parameters.values())
    if name == "MuSGD":
        for group, option in enumerate(options):
            option["muon"] = MUON if _kind_of(group) == "weights" else 0.0
        return MuSGD(options, lr=hyp.lr0, momentum=hyp.momentum)
    kind = torch.optim.Adam if name == "Adam" else torch.optim.AdamW
    return kind(options, lr=hyp.lr0, betas=(hyp.momentum, 0.999), fused=True)


def _sgd(options: list[dict[str, Any]], hyp: Hyp, parameters: Iterable[Tensor]) -> Optimizer:
    # Fused: one kernel for all tensors instead of a Python loop. It does not support shards.
    is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    nesterov = hyp.momentum > 0
    optimizer = torch.optim.SGD(
        options, lr=hyp.lr0, momentum=hyp.momentum, nesterov=nesterov, fused=not is_sharded
    )
    # If fp16's scaler skips the first step, the fused kernel starts from uninitialized memory.
    for option in options:
        for parameter in option["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameter_groups(model: nn.Module, backbone: str = "") -> list[list[str]]:
    """Return the names of a model's biases, norm weights, and other weights: KINDS.

    With `backbone`, the prefix of its parameters' names, these three groups are the rest of the model's, and the
    backbone's follow.
    """
    norms = tuple(kind for kind in vars(nn).values() if isinstance(kind, type) and "Norm" in kind.__name__)
    groups: list[list[str]] = [[] for _ in KINDS]
    backbone_groups: list[list[str]] = [[] for _ in KINDS]
    for path, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            if key == "bias":
                kind = "biases"
            else:
                kind = "scales" if isinstance(module, norms) else "weights"
            name = f"{path}.{key}" if path else key
            is_of_backbone = bool(backbone) and name.startswith(backbone)
            owner = backbone_groups if is_of_backbone else groups
            owner[KINDS.index(kind)].append(name)
    return groups + backbone_groups if backbone else groups


def set_rates(optimizer: Optimizer, rates: Rates) -> None:
    """Set a step's learning rates and momentum in the groups of `parameter_groups`."""
    for number, group in enumerate(optimizer.param_groups):
        lr = rates.lr_bias if _kind_of(number) == "biases" else rates.lr
        group["lr"] = lr * group.get("lr_factor", 1.0)
        if "momentum" in group:
            group["momentum"] = rates.momentum
