"""Writes a trained detector for other programs, and keeps the file only if it computes what the model computes."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import DIGITS
from trainer.data import open_dataset
from trainer.data.augment import letterbox
from trainer.errors import TrainerError
from trainer.models.yolo import Yolo, fuse
from trainer.tasks.inference import load_trained
from trainer.weights import download

SUFFIXES = {"onnx": ".onnx", "torchscript": ".torchscript"}
INPUT, OUTPUTS = "images", ("boxes", "scores")
BOX_TOLERANCE = 1e-4  # of the picture's side
SCORE_TOLERANCE = 1e-3

Arrays = tuple[Any, Any]  # boxes, scores


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the model's at most."""

    path: Path
    classes: int
    shape: tuple[int, int, int, int]
    box_difference: float  # pixels
    score_difference: float


class Decoded(nn.Module):
    """Pictures (b, 3, h, w) in 0..1, RGB -> boxes (b, n, 4) x1 y1 x2 y2 in pixels, scores (b, n, nc)."""

    def __init__(self, model: Yolo) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Every candidate box, before any threshold or suppression; score = objectness * class probability."""
        decoded = self.model.detect.decode(self.model(images))
        centre, half = decoded[..., :2], decoded[..., 2:4] / 2
        return torch.cat((centre - half, centre + half), -1), decoded[..., 4:5] * decoded[..., 5:]


def export(
    weights: str, kind: str, *, imgsz: int | None, batch: int, dynamic: bool, picture: str, out: str, cfg: str = ""
) -> Exported:
    """Write the fused averaged model of a checkpoint as `kind`; raises TrainerError, and then there is no file.

    `imgsz` None is the side it was trained at; `dynamic` leaves batch, height and width open; `picture` is a file to
    compare the outputs on, "" one of the built-in data set; `out` "" is beside the checkpoint; `cfg` as for training.
    """
    write = {"onnx": _onnx, "torchscript": _torchscript}.get(kind)
    if not write:
        raise TrainerError(f"--format {kind}: unknown", f"use one of {', '.join(SUFFIXES)}")
    if kind == "onnx":
        _need_onnx()
    if batch < 1:
        raise TrainerError(f"--batch is {batch}, it must be 1 or more")
    trained = load_trained(weights, cfg)
    side, stride = imgsz or trained.imgsz, trained.stride
    trained.check_imgsz(side)
    path = Path(out) if out else _beside(weights).with_suffix(SUFFIXES[kind])
    decoded = Decoded(fuse(trained.model.eval())).eval().requires_grad_(False)
    images = torch.from_numpy(_pictures(picture, side)).repeat(batch, 1, 1, 1)
    about = {"names": json.dumps(trained.names), "imgsz": str(side), "stride": str(stride)}
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{SUFFIXES[kind]}")
    try:
        temporary.touch()  # before the work, as a place that takes no file is a waste of it
        with _quiet():
            run = write(decoded, images, temporary, dynamic, stride, about)
        found = [_compare(decoded, run, images)]
        if dynamic:  # a size that the exporter has not seen
            more = images.repeat(2, 1, 1, 1)[: batch + 1]
            found.append(_compare(decoded, run, nn.functional.pad(more, (0, stride, 0, 2 * stride), value=0.4)))
        box, score = (max(each) for each in zip(*found, strict=True))
        # Written so that NaN fails too.
        if not (box <= BOX_TOLERANCE * side and score <= SCORE_TOLERANCE):
            raise TrainerError(
                f"{path}: its boxes are up to {box:.2g} px and its scores up to {score:.2g} off the model's: not kept",
                "please report this with the checkpoint and the versions (pip list)",
            )
        temporary.replace(path)
    except OSError as error:
        raise TrainerError(f"{path}: cannot be written: {error.strerror}", "choose another place with --out") from error
    finally:
        for left in path.parent.glob(f"{temporary.name}*"):
            left.unlink(missing_ok=True)
    return Exported(path, len(trained.names), (batch, 3, side, side), box, score)


def _beside(weights: str) -> Path:
    """The checkpoint's place; for one that was fetched, its name in the current folder."""
    file = download.locate(weights)
    return file if str(file) == weights.partition("#")[0] else Path(file.name)


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise TrainerError(
            f"--format onnx needs the package {error.name}, which is not installed",
            "pip install onnx onnxruntime onnxscript, or use --format torchscript",
        ) from error


def _pictures(picture: str, side: int) -> Any:
    """One letterboxed picture, float32 (1, 3, side, side) in 0..1."""
    if picture:
        read = cv2.imread(picture) if Path(picture).is_file() else None
        if read is None:
            raise TrainerError(f"--picture {picture}: not a picture that can be read")
        image = cv2.cvtColor(read, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False)
    else:
        image = open_dataset(DIGITS, "val", imgsz=side).image(0)
    canvas = np.empty((side, side, 3), np.uint8)
    letterbox(image, side, canvas)
    return np.ascontiguousarray(canvas.transpose(2, 0, 1)[None]).astype(np.float32) / 255


def _compare(model: Decoded, run: Callable[[Tensor], Arrays], images: Tensor) -> tuple[float, float]:
    """The largest differences of boxes (pixels) and scores between the model and its file."""
    with torch.inference_mode():
        wanted = model(images)
    found = run(images)
    differences = []
    for a, b in zip(wanted, found, strict=True):
        if tuple(a.shape) != tuple(b.shape):
            raise TrainerError(
                f"the exported model gives {tuple(b.shape)} values instead of {tuple(a.shape)}: not kept"
            )
        differences.append(float(np.abs(a.numpy() - np.asarray(b)).max()))
    return differences[0], differences[1]


def _onnx(
    model: Decoded, images: Tensor, path: Path, dynamic: bool, stride: int, about: dict[str, str]
) -> Callable[[Tensor], Arrays]:
    import onnx
    import onnxruntime

    shapes = None
    if dynamic:
        rows, columns = (torch.export.Dim(name, min=2, max=4096 // stride) for name in ("rows", "columns"))
        shapes = ({0: torch.export.Dim("batch", min=1, max=4096), 2: stride * rows, 3: stride * columns},)
        images = images.repeat(2, 1, 1, 1)  # a batch of one would be taken for a constant
    program = torch.onnx.export(
        model,
        (images,),
        dynamo=True,
        input_names=[INPUT],
        output_names=list(OUTPUTS),
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
    )
    assert program is not None
    content = program.model_proto
    onnx.helper.set_model_props(content, about)
    onnx.checker.check_model(content)
    path.write_bytes(content.SerializeToString())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(pictures: Tensor) -> Arrays:
        boxes, scores = session.run(list(OUTPUTS), {INPUT: pictures.numpy()})
        return boxes, scores

    return run


def _torchscript(
    model: Decoded, images: Tensor, path: Path, dynamic: bool, stride: int, about: dict[str, str]
) -> Callable[[Tensor], Arrays]:
    with torch.inference_mode():
        traced = torch.jit.trace(model, images, check_trace=False)  # type: ignore[no-untyped-call]
    torch.jit.save(traced, str(path), _extra_files=about)
    loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]

    def run(pictures: Tensor) -> Arrays:
        with torch.inference_mode():
            boxes, scores = loaded(pictures)
        return boxes, scores

    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own running commentary, which is not about the user's model."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
