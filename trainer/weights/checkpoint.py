"""Checkpoint: the content of best.pt, which has weights, and of last.pt, from which a run is resumed."""

from collections.abc import Sequence
from typing import Any, TypedDict

from torch import Tensor

from trainer.config import ModelCfg


class _Weights(TypedDict):
    format: int
    ema: dict[str, Tensor]  # state dict of the averaged model
    epoch: int  # finished epochs; -1 in a snapshot of the Hugging Face hub
    hyp: dict[str, Any]
    cfg: ModelCfg  # with the fitted anchors
    names: list[str]  # of the classes
    imgsz: int  # side of the training images in pixels


KEYS = tuple(_Weights.__annotations__)  # a file without one of them is no checkpoint


class Checkpoint(_Weights, total=False):
    """Content of every file: the averaged weights, and what is needed to use them."""

    task: str  # missing in the file of another trainer, whose task is detect


class BestCheckpoint(Checkpoint):
    """Content of best.pt."""

    scores: dict[str, float]


class ShareState(TypedDict):
    """What the ranks that process the same images add to a checkpoint."""

    pending: Tensor  # float64 (t,): their loss terms of the last step
    statistics: list[
        list[Tensor]
    ]  # batch norm's, of the model and of its average, in the order of the state dict


class TrainerState(Checkpoint):
    """State of a `Trainer`."""

    model: dict[str, Tensor]
    updates: int  # of the averaged model
    optimizer: dict[str, Any]  # torch's state dict
    scaler: dict[str, Any]  # torch's state dict; empty unless fp16
    step: int  # the next one, counted over the whole run
    at: dict[str, Any]  # the fields of TrainState
    total: Tensor  # float64 (t,): the epoch's loss terms
    ranks: list[ShareState]
    class_map: Sequence[float] | None  # for --image-weights
    settings: dict[str, Any]


class RunState(TrainerState):
    """Content of epochN.pt."""

    history: list[dict[str, float]]  # the rows of results.csv
    data: str  # fingerprint of the training images


class RunCheckpoint(RunState, total=False):
    """Content of last.pt and previous.pt, which a run is resumed from."""

    attempt: int  # of the launcher; missing in a renamed epochN.pt
