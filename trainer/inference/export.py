"""Export of a detector to ONNX or TorchScript, with a comparison of outputs."""

import contextlib
import importlib.util
import io
import json
import logging
import tempfile
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
from trainer.data.augment.paint import letterbox
from trainer.data.loading.detection_loader import check_imgsz
from trainer.data.registry import open_dataset
from trainer.errors import TrainerError
from trainer.inference.trained import load_trained
from trainer.models.yolo import fuse
from trainer.weights import checkpoint_file, download

# The packages that a format needs.
NEEDED: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "torchscript": (),
}
INPUT = "images"
OUTPUTS = ("boxes", "scores")
BOX_TOLERANCE = 1e-4  # of the image's side
SCORE_TOLERANCE = 1e-3

Run = Callable[[Tensor], tuple[Any, ...]]  # images -> boxes, scores, of NumPy


@dataclass(frozen=True)
class Exported:
    """An exported file and the largest differences between its outputs and the model's.

    `any_batch` and `any_size`: its batches may have any number of images, and these any size.
    """

    path: Path
    classes: int
    shape: tuple[int, int, int, int]
    box_difference: float  # pixels
    score_difference: float
    any_batch: bool
    any_size: bool


class Decoded(nn.Module):
    """A detector with decoded outputs: images (b, 3, h, w) in 0..1 -> boxes (b, n, 4) xyxy px, scores (b, n, nc)."""

    def __init__(self, model: nn.Module, decode: Callable[[Any, Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.model = model
        self._decode = decode

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return all candidates before thresholds and NMS."""
        return self._decode(self.model, self.model(images))


def export(
    weights: str,
    kind: str,
    *,
    imgsz: int | None,
    batch: int,
    dynamic: bool,
    image: str,
    out: str,
    cfg: str = "",
) -> Exported:
    """Export the fused EMA model of a checkpoint, and compare the file's outputs with the model's.

    The arguments are the options of `trainer export`. Raises TrainerError, and writes no file, if one is invalid or the
    outputs differ.
    """
    if kind not in NEEDED:
        raise TrainerError(f"--format {kind}: unknown", f"use one of {', '.join(NEEDED)}")
    if missing := [name for name in NEEDED[kind] if not importlib.util.find_spec(name)]:
        raise TrainerError(
            f"--format {kind} requires the package {missing[0]}, which is not installed",
            f"pip install {' '.join(NEEDED[kind])}, or use --format torchscript",
        )
    if batch < 1:
        raise TrainerError(f"--batch must be 1 or more, not {batch}")
    trained = load_trained(weights, cfg)
    if not trained.parts.decode:
        raise TrainerError(
            f"{weights}: models of this family cannot be exported", "use trainer predict or val"
        )
    any_size = dynamic and trained.parts.exports_any_size
    side = trained.imgsz if imgsz is None else imgsz
    stride = trained.stride
    check_imgsz(side, stride)
    file = download.locate(weights)
    if str(file) != weights.partition("#")[0]:
        file = Path(file.name)  # of a downloaded checkpoint: in the current folder
    path = Path(out) if out else file.with_suffix(f".{kind}")
    _check_replaceable(path, image)
    decoded = Decoded(fuse(trained.model.eval()), trained.parts.decode).eval().requires_grad_(False)
    images = torch.from_numpy(_images(image, side)).repeat(batch, 1, 1, 1)
    metadata = {"names": json.dumps(trained.names), "imgsz": str(side), "stride": str(stride)}
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder, _quiet():
            temporary = Path(folder, path.name)
            write = _onnx if kind == "onnx" else _torchscript
            run = write(decoded, images, temporary, metadata, dynamic, stride if any_size else 0)
            swaps = trained.parts.has_ranked_rows
            found = [_compare(decoded, run, images, swaps)]
            if dynamic:  # another shape than the exported one
                more = images.repeat(2, 1, 1, 1)[: batch + 1]
                padding = (0, stride, 0, 2 * stride) if any_size else (0, 0)
                other = nn.functional.pad(more, padding, value=0.4)
                found.append(_compare(decoded, run, other, swaps))
            box, score = (max(each) for each in zip(*found, strict=True))
            # `not <=` also rejects NaN.
            if not (box <= BOX_TOLERANCE * side and score <= SCORE_TOLERANCE):
                raise TrainerError(
                    f"{path}: boxes differ from the model's by {box:.2g} px, scores by {score:.2g}: not written",
                    "report this with the checkpoint and the output of `pip list`",
                )
            temporary.replace(path)
    except OSError as error:
        raise TrainerError(
            f"{path}: cannot be written: {error.strerror}", "use another path with --out"
        ) from error
    return Exported(
        path, len(trained.names), (batch, 3, side, side), box, score, any_batch=dynamic, any_size=any_size
    )


def _check_replaceable(path: Path, image: str) -> None:
    """Raise TrainerError if the file to write is a checkpoint or the image of the comparison."""
    if not path.is_file():
        return
    what = "the image of --image" if image and Path(image).exists() and path.samefile(image) else ""
    with contextlib.suppress(TrainerError):
        checkpoint_file.load(str(path))
        what = "a checkpoint"
    if what:
        raise TrainerError(
            f"--out {path}: it is {what}, which the export would replace", "give another path with --out"
        )


def _images(image: str, side: int) -> Any:
    """Return one letterboxed image, float32 (1, 3, side, side) in 0..1."""
    if image:
        read = cv2.imread(image) if Path(image).is_file() else None
        if read is None:
            raise TrainerError(
                f"--image {image}: not a readable image", "use the path of a .jpg or .png file"
            )
        pixels = cv2.cvtColor(read, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False)
    else:
        pixels = open_dataset(DIGITS, "val", imgsz=side).image(0)
    canvas = np.empty((side, side, 3), np.uint8)
    letterbox(pixels, side, canvas)
    return np.ascontiguousarray(canvas.transpose(2, 0, 1)[None]).astype(np.float32) / 255


def _compare(model: Decoded, run: Run, images: Tensor, swaps: bool) -> tuple[float, float]:
    """Return the largest differences of boxes (pixels) and scores between the model and its file.

    With `swaps` the rows of an image may be in another order; each is then compared with the one most like it.
    """
    with torch.inference_mode():
        expected = [values.numpy() for values in model(images)]
    found = list(run(images))
    if swaps:
        order = [_most_alike(*rows) for rows in zip(*expected, *found, strict=True)]
        found = [np.stack([rows[k] for rows, k in zip(values, order, strict=True)]) for values in found]
    box, score = (float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
    return box, score


def _most_alike(boxes: Any, scores: Any, other_boxes: Any, other_scores: Any) -> Any:
    """Return the numbers of the other rows, (n,), in the order of the rows that they are most like, one to one."""
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    # A pixel counts as much as a thousandth of a score.
    rows, others = (np.column_stack((b / 1000, s)) for b, s in ((boxes, scores), (other_boxes, other_scores)))
    return linear_sum_assignment(cdist(rows, others))[1]


def _onnx(
    model: Decoded, images: Tensor, path: Path, metadata: dict[str, str], any_batch: bool, stride: int
) -> Run:
    """Write an ONNX file. With a `stride`, the sides of the images may be any multiples of it (0: only those)."""
    import onnx
    import onnxruntime

    shapes = None
    if any_batch:
        sizes = {0: torch.export.Dim("batch", min=1, max=4096)}
        if stride:
            rows, columns = (
                torch.export.Dim(name, min=2, max=4096 // stride) for name in ("rows", "columns")
            )
            sizes |= {2: stride * rows, 3: stride * columns}
        shapes = (sizes,)
        images = images.repeat(2, 1, 1, 1)  # the exporter would specialize a batch of one
    how: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False, "dynamic_shapes": shapes}
    source: Any = model
    if any_batch and not stride:
        # Some of these networks call len() on a tensor, which is a constant unless the code itself is traced.
        source = torch.export.export(model, (images,), dynamic_shapes=shapes, strict=True)
    program = torch.onnx.export(source, (images,), input_names=[INPUT], output_names=list(OUTPUTS), **how)
    assert program is not None
    content = program.model_proto
    onnx.helper.set_model_props(content, metadata)
    onnx.checker.check_model(content)
    path.write_bytes(content.SerializeToString())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: tuple(session.run(list(OUTPUTS), {INPUT: images.numpy()}))


def _torchscript(
    model: Decoded, images: Tensor, path: Path, metadata: dict[str, str], any_batch: bool, stride: int
) -> Run:
    """Write a TorchScript file, which takes what the traced model takes."""
    with torch.inference_mode():
        traced = torch.jit.trace(model, images, check_trace=False)  # type: ignore[no-untyped-call]
    torch.jit.save(traced, str(path), _extra_files=metadata)
    loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return lambda images: tuple(output.detach().numpy() for output in loaded(images))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages of the exporters."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
