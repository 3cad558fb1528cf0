"""`trainer predict`: predictions on images and videos, with drawn images, labels, masks and JSON as output."""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.inference import PredictSettings
from trainer.data.dataset import Image
from trainer.data.progress import bar
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.inference.formats import mp4, unique_stems
from trainer.inference.model import Model
from trainer.inference.predictors import Prediction, Predictor
from trainer.inference.sources import Frame, SourceError, find_sources, frames, is_video
from trainer.plots import write_image
from trainer.weights import checkpoint_file

AppendFrame = Callable[[Image, float], None]  # a drawn frame and the frames per second


@dataclass
class _SourceResult:
    """Result of one source: an image or a video."""

    frames: int = 0  # 1 for an image
    counts: Counter[int] = field(default_factory=Counter)  # of the found classes
    text: str = ""  # of the last frame
    error: str = ""


@dataclass
class Predictions:
    """Result of the command: numbers of images, video frames and found classes, and the unreadable sources."""

    folder: Path | None
    predictor: Predictor
    images: int = 0
    frames: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """The found classes with their numbers, for example `3 cat, 1 dog`."""
        return self.predictor.summary(self.counts)

    def add(self, path: Path, result: _SourceResult) -> None:
        """Count a source."""
        self.counts.update(result.counts)
        if is_video(path):
            self.frames += result.frames
        else:
            self.images += result.frames
        if result.error:
            self.unreadable.append(str(path))


@dataclass
class _Outputs:
    """Prints and writes predictions as the settings say."""

    settings: PredictSettings
    folder: Path | None
    predictor: Predictor
    as_json: bool
    entries: list[dict[str, Any]] = field(default_factory=list)  # for predictions.json

    def video(self, path: Path, stem: str) -> AbstractContextManager[AppendFrame | None]:
        """Return the context in which the frames of the source `path` are appended to an MP4 file."""
        return mp4(self.folder / f"{stem}.mp4", path) if self.folder else contextlib.nullcontext()

    def add(
        self, prediction: Prediction, frame: Frame, path: Path, stem: str, append_frame: AppendFrame | None
    ) -> None:
        """Print and write the prediction of an image, or of a video's frame, of the source `path`."""
        s = self.settings
        entry = entry_of(prediction, self.predictor)
        if self.as_json:
            print(json.dumps(entry), flush=True)
        if s.save_json:
            self.entries.append(entry)
        if self.folder is None:
            return
        if s.save_txt or s.save_masks:
            name = stem if frame.number is None else f"{stem}_{frame.number}"
            self.predictor.write(prediction, self.folder, name, with_score=s.save_conf)
        if s.nosave:
            return
        drawn = self.predictor.draw(prediction)
        if append_frame and frame.number:
            append_frame(drawn, frame.fps)
        else:
            write_image(drawn, self.folder / f"{stem}{path.suffix.lower()}")

    def finish(self) -> None:
        """Write predictions.json."""
        if self.folder and self.settings.save_json:
            checkpoint_file.write_bytes(self.folder / "predictions.json", json.dumps(self.entries).encode())


def predict(
    settings: PredictSettings, sources: Sequence[str], typed: Collection[str], as_json: bool
) -> Predictions:
    """Predict on all sources and write the files that the settings name; `typed` are the settings that the user gave.

    Print one line per source, or with `as_json` one line of JSON per image. Sources that fail are printed on stderr.
    """
    s = settings
    if comm.world_of(os.environ).size > 1:
        raise TrainerError("predict runs in one process", "start it without torchrun")
    paths = find_sources(sources)
    model = Model(s.weights, device=s.device, precision=s.precision, half=s.half, cfg=s.cfg)
    comm.limit_threads(comm.World(), model.device)
    model.check_options(typed)
    side = model.side(s.imgsz)
    limits = model.limits(s.conf, s.iou, s.max_det, s.classes)
    predictor = model.predictor
    writes = not s.nosave or s.save_txt or s.save_masks or s.save_json
    folder = checkpoint_file.make_run_dir(os.environ, s.project, s.name, s.exist_ok) if writes else None
    outputs = _Outputs(s, folder, predictor, as_json)
    done = Predictions(folder, predictor)
    stems = unique_stems([str(path) for path in paths])
    with bar(len(paths)) as move:
        for path, stem in zip(paths, stems, strict=True):
            begin = time.perf_counter()
            result = _SourceResult()
            with outputs.video(path, stem) as append_frame:
                try:
                    for frame in frames(path):
                        move(description=f"{path.name} {frame.number or ''}")
                        prediction = predictor(frame, side, limits)
                        result.counts.update(predictor.counted(prediction))
                        result.text = predictor.text(prediction)
                        outputs.add(prediction, frame, path, stem, append_frame)
                        result.frames += 1
                except SourceError as error:  # the frames before it are kept
                    result.error = error.message
            move(advance=1, description="")
            done.add(path, result)
            if result.error:
                print(f"error: {result.error}", file=sys.stderr, flush=True)
            elif not as_json:
                line = _line_of(path, result, predictor, time.perf_counter() - begin)
                print(line, flush=True)
    outputs.finish()
    return done


def _line_of(path: Path, result: _SourceResult, predictor: Predictor, seconds: float) -> str:
    """Return the line that is printed for a source."""
    frame_ms = 1000 * seconds / result.frames
    if is_video(path):
        return f"{path}: {result.frames} frames, {predictor.summary(result.counts)} ({frame_ms:.0f} ms each)"
    return f"{path}: {result.text} ({frame_ms:.0f} ms)"


def entry_of(prediction: Prediction, predictor: Predictor) -> dict[str, Any]:
    """Return the entry for JSON of an image, or of a video's frame."""
    number = {} if prediction.frame is None else {"frame": prediction.frame}
    height, width = prediction.rgb.shape[:2]
    size = {"width": width, "height": height}
    return {"source": prediction.source, **number, **size, **predictor.entries(prediction)}
