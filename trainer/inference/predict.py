"""`trainer predict`: predictions on images and videos, with drawn images, labels, masks and JSON as output."""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.inference import PredictSettings
from trainer.data.progress import bar
from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.inference.formats import mp4, unique_stems
from trainer.inference.model import Model
from trainer.inference.predictors import Prediction, Predictor
from trainer.inference.sources import SourceError, find_sources, frames, is_video
from trainer.plots import write_image
from trainer.weights import checkpoint_file


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
    saves_found = s.save_txt or s.save_masks
    writes = not s.nosave or saves_found or s.save_json
    folder = checkpoint_file.make_run_dir(os.environ, s.project, s.name, s.exist_ok) if writes else None
    done = Predictions(folder, predictor)
    entries: list[dict[str, Any]] = []  # for predictions.json
    with bar(len(paths)) as move:
        for path, stem in zip(paths, unique_stems([str(path) for path in paths]), strict=True):
            counts = Counter[int]()
            begin = time.perf_counter()
            count = 0
            error = ""
            text = ""
            with mp4(folder / f"{stem}.mp4", path) if folder else contextlib.nullcontext() as append_frame:
                try:
                    for frame in frames(path):
                        move(description=f"{path.name} {frame.number or ''}")
                        found = predictor(frame, side, limits)
                        entry = entry_of(found, predictor)
                        if as_json:
                            print(json.dumps(entry), flush=True)
                        if s.save_json:
                            entries.append(entry)
                        if folder and saves_found:
                            name = stem if frame.number is None else f"{stem}_{frame.number}"
                            predictor.write(found, folder, name, with_score=s.save_conf)
                        counts.update(predictor.counted(found))
                        text = predictor.text(found)
                        if folder and not s.nosave:
                            drawn = predictor.draw(found)
                            if append_frame and frame.number:
                                append_frame(drawn, frame.fps)
                            else:
                                write_image(drawn, folder / f"{stem}{path.suffix.lower()}")
                        count += 1
                except SourceError as reason:
                    error = reason.message
            move(advance=1, description="")
            done.counts.update(counts)
            if is_video(path):
                done.frames += count
            else:
                done.images += count
            if error:
                done.unreadable.append(str(path))
                print(f"error: {error}", file=sys.stderr, flush=True)
            elif not as_json:
                each = 1000 * (time.perf_counter() - begin) / count
                if is_video(path):
                    text = f"{count} frames, {predictor.summary(counts)}"
                print(f"{path}: {text} ({each:.0f} ms{' each' if is_video(path) else ''})", flush=True)
    if folder and s.save_json:
        checkpoint_file.write_bytes(folder / "predictions.json", json.dumps(entries).encode())
    return done


def entry_of(found: Prediction, predictor: Predictor) -> dict[str, Any]:
    """Return the entry for JSON of an image, or of a video's frame."""
    number = {} if found.frame is None else {"frame": found.frame}
    size = {"width": found.rgb.shape[1], "height": found.rgb.shape[0]}
    return {"source": found.source, **number, **size, **predictor.entries(found)}
