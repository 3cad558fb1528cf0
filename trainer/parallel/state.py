"""Checkpoints that do not tell which kind of parallelism wrote them: complete, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel.mode import Mode

Names = Sequence[Sequence[str]]  # of the parameters in each of the optimizer's groups, in its order
KERNELS = ("fused", "foreach")  # how an optimizer computes, which is the business of the one that does


def model_state(mode: Mode, part: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """The state of the whole model, `names` in this order, put together from the ranks' parts. A collective."""
    found = {**mode.rest, **mode.whole(part.state_dict())}
    return {name: found[name] for name in names}


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Copy a whole model's state into a whole model, which is returned.

    Not by load_state_dict, where hooks of torchvision's models ask for the version of a file.
    """
    for name, own in model.state_dict().items():
        own.copy_(state[name])
    return model


def load_model(mode: Mode, part: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of a whole model's state into it, and what is in no part."""
    with torch.no_grad():
        for name, own in {**mode.rest, **part.state_dict()}.items():
            if name in state:
                mode.take(own, state[name])


def optimizer_state(mode: Mode, optimizer: torch.optim.Optimizer, own: Names, names: Names) -> dict[str, Any]:
    """The state dict that the whole model's optimizer would have. A collective.

    `own` are the names of this rank's parameters, `names` those of the whole model.
    """
    tensors = {}
    for group, listed in zip(optimizer.param_groups, own, strict=True):
        for parameter, name in zip(group["params"], listed, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value
    found = mode.whole(tensors)
    number = {name: k for k, name in enumerate(name for listed in names for name in listed)}
    state: dict[int, dict[str, Tensor]] = {}
    for label, value in sorted(found.items(), key=lambda item: number[item[0].split("/", 1)[1]]):
        key, name = label.split("/", 1)
        state.setdefault(number[name], {})[key] = value
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [number[name] for name in listed]}
        for group, listed in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer(
    mode: Mode, optimizer: torch.optim.Optimizer, own: Names, names: Names, content: Mapping[str, Any]
) -> None:
    """Give this rank's optimizer its part of a whole one's state dict."""
    number = {name: k for k, name in enumerate(name for listed in names for name in listed)}
    for group, saved, listed in zip(optimizer.param_groups, content["param_groups"], own, strict=True):
        group.update({k: v for k, v in saved.items() if k != "params" and k not in KERNELS})
        for parameter, name in zip(group["params"], listed, strict=True):
            kept = content["state"].get(number[name])
            if not kept:  # from before its first move: what later ones left must not stay
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state[parameter]
            for key, value in kept.items():
                if key not in state:
                    one_each = value.shape == parameter.shape  # else a count, of which every rank keeps its own
                    state[key] = (
                        torch.zeros_like(parameter, requires_grad=False)
                        if one_each
                        else torch.zeros_like(value, device=parameter.device)
                    )
                mode.take(state[key], value)
