"""A training's progress and scores in words, the same on the terminal, on the page of `serve` and in the report. Pure.

A program reports what it wants to. Words for what it did not report are "".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.agent.app.node_agent.events import Progress

#: Keys of the trainer's events and columns of its results.csv, and what they are called on the terminal, in the report
#: and in TensorBoard.
SCORES = {
    "map50": "mAP50",
    "map": "mAP50-95",
    "top1": "top-1",
    "top5": "top-5",
    "miou": "mIoU",
    "accuracy": "pixel accuracy",
}


@dataclass(frozen=True)
class ProgressText:
    """The last step that a rank reported: `epoch 7/12`, `step 39/63`, `loss 1.830`, `214 images/s`.

    `percent` is the part of the epoch that is done, None if that is not known. `time_left` has both the epoch and the
    run: `epoch ends in 0:06, run in 1:02:05`.
    """

    epoch: str
    step: str
    percent: int | None
    loss: str
    speed: str
    time_left: str

    @property
    def position(self) -> str:
        """Where the training is: `epoch 7/12, step 39/63`."""
        return ", ".join(filter(None, (self.epoch, self.step))) or "unknown"


def describe(progress: Progress) -> ProgressText:
    """Return the words for a progress event."""
    speed_known = progress.images_per_s is not None
    return ProgressText(
        epoch="" if progress.epoch is None else f"epoch {out_of(progress.epoch, progress.epochs)}",
        step="" if progress.step is None else f"step {out_of(progress.step, progress.steps)}",
        percent=100 * (progress.step or 0) // progress.steps if progress.steps else None,
        loss="" if progress.loss is None else f"loss {progress.loss:.3f}",
        speed=f"{progress.images_per_s:.0f} images/s" if speed_known else "",
        time_left=_time_left(progress),
    )


def _time_left(progress: Progress) -> str:
    if progress.run_eta_s is None:
        return "" if progress.eta_s is None else f"epoch ends in {_clock(progress.eta_s)}"
    run_ends_in = _clock(progress.run_eta_s)
    if progress.eta_s is None:
        return f"run ends in {run_ends_in}"
    return f"epoch ends in {_clock(progress.eta_s)}, run in {run_ends_in}"


def _clock(seconds: float) -> str:
    """Format a duration: `0:42`, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def out_of(number: float, total: int | None) -> str:
    """Format the number of an epoch or a step: `7/12`, or `7` if the total is not known."""
    return f"{number:.0f}" if total is None else f"{number:.0f}/{total}"


def last_step(progress: Progress | None) -> tuple[int, int]:
    """Return the epoch and the step of a progress event as numbers; 0 for what is not known."""
    if progress is None:
        return 0, 0
    return progress.epoch or 0, progress.step or 0


def named_scores(scores: Mapping[str, float | None]) -> dict[str, str]:
    """Return the names and texts of the scores that an event has: `{"mAP50": "0.912"}`."""
    values = {name: scores.get(key) for key, name in SCORES.items()}
    return {name: f"{value:.3f}" for name, value in values.items() if value is not None}
