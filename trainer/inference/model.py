"""Model: trained weights of any task that predict on images and videos, for `trainer predict` and for Python."""

import pkgutil
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trainer.config.inference import PredictSettings
from trainer.config.settings import option_of
from trainer.data.loading.detection_loader import check_imgsz
from trainer.detectors import Limits, load_weights
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.inference.predictors import PREDICTORS, TASK_OPTIONS, Prediction, Predictor
from trainer.inference.sources import Frame, find_sources, frame_of_array, frames
from trainer.inference.trained import type_for

Source: TypeAlias = str | Path | np.ndarray[Any, Any]  # a path, or an image uint8 (h, w, 3) in BGR
Classes: TypeAlias = str | int | Sequence[str | int]  # names or numbers
_NUMBERS: dict[str, type | tuple[type, ...]] = {
    "conf": (int, float),
    "iou": (int, float),
    "max_det": int,
    "imgsz": int,
}


class Model:
    """Trained weights on a device: `names` of the classes, `imgsz` of the training, and `task`."""

    def __init__(
        self, weights: str, *, device: str = "", precision: str = "auto", half: bool = False, cfg: str = ""
    ) -> None:
        """Load weights; the arguments are options of `trainer predict`. Nothing in the file is executed."""
        self.device = comm.pick_device(device, comm.World())
        dtype = type_for(precision, half, self.device)
        content = load_weights(weights)
        self.task = str(content.get("task", "detect"))
        if self.task not in PREDICTORS:
            raise TrainerError(
                f"--weights {weights}: their task, {self.task}, is unknown", "use weights of this trainer"
            )
        if cfg:
            self.check_options(["cfg"])
        make = pkgutil.resolve_name(PREDICTORS[self.task].path)
        self.predictor: Predictor = make(content, weights, self.device, dtype, cfg)
        self.names: list[str] = self.predictor.names
        self.imgsz: int = self.predictor.imgsz

    def predict(
        self,
        sources: Source | Sequence[Source],
        *,
        conf: float | None = None,
        iou: float | None = None,
        max_det: int | None = None,
        classes: Classes | None = None,
        imgsz: int | None = None,
    ) -> Iterator[Prediction]:
        """Yield a prediction for each image and each frame of a video, computed when it is asked for.

        Arguments are checked at once. TrainerError is raised for invalid ones, and in turn for a file that cannot be
        decoded.

        Args:
            sources: paths as `trainer predict --source` takes them (files, folders, patterns, .txt lists), or images
                as numpy arrays, uint8 (h, w, 3) in BGR as cv2.imread returns them; or a list of these
            conf: lowest score of a box, by default 0.25
            iou: IoU threshold of the non-maximum suppression, by default 0.45
            max_det: most boxes per image, by default 1000
            classes: detect only these, by name or number, by default all
            imgsz: longer side of the scaled images in pixels, by default as in training
        """
        options: dict[str, Any] = {"conf": conf, "iou": iou, "max_det": max_det, "classes": classes}
        given = {name: value for name, value in options.items() if value is not None}
        self.check_options(given)
        limits = self.limits(**given)
        side = self.side(imgsz)
        found = _frames_of(sources)
        return (self.predictor(frame, side, limits) for frame in found)

    def check_options(self, names: Collection[str]) -> None:
        """Raise TrainerError for the first of some settings that has an effect on weights of another task only."""
        if wrong := sorted((TASK_OPTIONS - PREDICTORS[self.task].options) & set(names)):
            option = option_of(wrong[0])
            raise TrainerError(
                f"{option} has no effect on weights of --task {self.task}", f"leave {option} out"
            )

    def limits(
        self,
        conf: float = PredictSettings.conf,
        iou: float = PredictSettings.iou,
        max_det: int = PredictSettings.max_det,
        classes: Classes = "",
    ) -> Limits:
        """Return the limits of detections."""
        for name, value in (("conf", conf), ("iou", iou), ("max_det", max_det)):
            _check_number(name, value)
        return Limits(conf, iou, max_det, class_numbers(classes, self.names))

    def side(self, imgsz: int | None) -> int:
        """Return the longer side of the scaled images, by default that of the training."""
        if imgsz is None:
            return self.imgsz
        _check_number("imgsz", imgsz)
        check_imgsz(imgsz, self.predictor.stride)
        return imgsz


def _check_number(name: str, value: Any) -> None:
    """Raise TrainerError for a value that is not a number of the setting's kind: Python checks no types."""
    kind = _NUMBERS[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = "a whole number" if kind is int else "a number"
        raise TrainerError(f"{option_of(name)} must be {expected}, not {value!r}")


def class_numbers(classes: Classes, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the numbers of the given classes, or None for all classes.

    In a text, numbers may be separated by spaces, as in YOLOv5, and names by commas; names may contain spaces. A text
    that is both is a name.
    """
    if isinstance(classes, str):
        words: Sequence[Any] = classes.split() if classes.replace(" ", "").isdecimal() else classes.split(",")
    else:
        words = [classes] if isinstance(classes, int) else classes
        if not isinstance(words, (list, tuple)) or not words:
            raise TrainerError(
                f"--classes must be names or numbers, not {classes!r}", "leave it out for all classes"
            )
    numbers = []
    for given in words:
        word = str(given).strip()
        if not word:
            continue
        if word in names and not isinstance(given, int):
            numbers.append(names.index(word))
        elif word.isdecimal() and int(word) < len(names):
            numbers.append(int(word))
        else:
            known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise TrainerError(f"--classes {word}: no such class", f"the weights have {known}")
    return tuple(numbers) or None


def _frames_of(sources: Source | Sequence[Source]) -> Iterator[Frame]:
    """Return the images of a user's sources; raise TrainerError at once for those that do not exist."""
    listed = [sources] if isinstance(sources, (str, Path, np.ndarray)) else sources
    if not isinstance(listed, (list, tuple)):
        raise _no_source(listed)
    parts: list[Iterator[Frame]] = []
    for source in listed:
        if isinstance(source, np.ndarray):
            parts.append(iter([frame_of_array(source)]))
        elif isinstance(source, (str, Path)):
            parts += [frames(path) for path in find_sources([str(source)])]
        else:
            raise _no_source(source)
    if not parts:
        raise TrainerError(
            "predict() got an empty list of sources", "give a path, an array, or a list of them"
        )
    return chain.from_iterable(parts)


def _no_source(value: Any) -> TrainerError:
    hint = "a PIL image: numpy.asarray(image.convert('RGB'))[..., ::-1]" if hasattr(value, "convert") else ""
    what = f"predict() got {type(value).__name__}, expected a path, a numpy array, or a list of them"
    return TrainerError(what, hint)
