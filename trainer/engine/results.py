"""Results: results.csv, steps.csv, and the events and lines of an epoch and of the run's end."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from trainer import contract
from trainer.config import Settings
from trainer.engine.run_logger import RunLogger
from trainer.engine.timing import SHARES
from trainer.engine.trackers import Tracker
from trainer.engine.trainer import Trainer
from trainer.tasks import Scores
from trainer.weights import checkpoint_file

SLOWER = 1.15  # minimum ratio of the slowest rank's own time to the median rank's


def write_table(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Rewrite results.csv: one row per epoch."""
    out = io.StringIO()
    if rows:
        # A run that an earlier version started can have rows with fewer columns.
        columns = list(dict.fromkeys(name for row in reversed(rows) for name in row))
        table = csv.DictWriter(out, columns, restval="nan")
        table.writeheader()
        table.writerows({k: v if isinstance(v, int) else f"{v:.6g}" for k, v in row.items()} for row in rows)
    checkpoint_file.write_bytes(path, out.getvalue().encode())


def write_options(path: Path, settings: Settings) -> None:
    """Write the value of each option and hyper-parameter of a run, defaults included, as YAML."""
    values = dataclasses.asdict(settings)
    # As --hyp reads it.
    values["hyp"] = {key: value for key, value in values["hyp"].items() if value is not None}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    checkpoint_file.write_bytes(
        path, f"# All options of this run. To reuse hyp, save its keys as a file for --hyp.\n{text}".encode()
    )


@dataclasses.dataclass
class Results:
    """What a run has reported: a row for each finished epoch; on rank 0, the loggers too."""

    run_dir: Path
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    logger: RunLogger | None = None
    tracker: Tracker | None = None

    def write_table(self) -> None:
        """Rewrite results.csv."""
        write_table(self.history, self.run_dir / "results.csv")


def report(
    results: Results,
    training: Trainer,
    losses: list[float],
    scores: Scores | None,
    shares: list[dict[str, float]],
) -> None:
    """Report a finished epoch: `losses` are its means, `shares` each rank's times as fractions."""
    epoch = training.state.epoch
    first = shares[0]
    found = scores.columns() if scores else dict.fromkeys(training.task.columns, math.nan)
    named = dict(zip((f"{t}_loss" for t in training.task.terms), losses, strict=True))
    validation = training.evaluator.losses if scores else {}
    terms = training.task.terms if training.validates_loss else ()
    validated = {f"val/{term}_loss": validation.get(term, math.nan) for term in terms}
    row: dict[str, float] = {
        "epoch": epoch + 1,
        **named,
        **validated,
        **found,
        "lr": training.schedule.at((epoch + 1) * training.train_loader.steps - 1).lr,
        **{k: first[k] for k in ("images_per_s", "seconds", *SHARES)},
    }
    results.history.append(row)
    if not results.logger:
        return
    results.logger.epoch(epoch + 1, row, training.evaluator.samples)
    if results.tracker and (problem := results.tracker.log(results.history)):
        training.display.print(problem)
    slow = slowest_rank(shares)
    training.events.emit(
        contract.METRIC,
        epoch=epoch + 1,
        epochs=training.settings.epochs,
        **{key: found[key] for key in training.task.headlines},
        **named,
        images_per_s=first["images_per_s"],
        seconds=first["seconds"],
        shares={k: first[k] for k in SHARES},
        **({} if slow is None else {"slowest_rank": slow}),
    )
    spent = "  ".join(f"{k} {first[k]:.0%}" for k in SHARES)
    scored = (
        "".join(f"{title} {found[key]:.3f}  " for key, title in training.task.headlines.items())
        if scores
        else ""
    )
    slowest = "" if slow is None else f"  slowest rank {slow}"
    done = f"epoch {epoch + 1}/{training.settings.epochs}"
    speed = f"{first['images_per_s']:.0f} images/s"
    loss = f"loss {sum(losses):.3f}  "
    if validation:
        loss += f"val loss {sum(validation.values()):.3f}  "
    training.display.end_epoch(f"{done}  {scored}{loss}{speed}  {spent}{slowest}")


def slowest_rank(shares: Sequence[Mapping[str, float]]) -> int | None:
    """Return the rank whose own time (all but waiting for others) is clearly the longest, or None."""
    own = [share["data"] + share["transfer"] + share["compute"] for share in shares]
    rank = max(range(len(own)), key=own.__getitem__)
    median_low = sorted(own)[(len(own) - 1) // 2]
    return rank if len(own) > 1 and own[rank] >= SLOWER * median_low else None


def write_step(path: Path, names: Sequence[str], number: int, terms: Sequence[float]) -> None:
    """Append the loss terms of global step `number` (from 1) to steps.csv, at full precision."""
    is_new = not path.exists()
    with path.open("a", encoding="ascii", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if is_new:
            table.writerow(("step", *names))
        table.writerow((number, *terms))


def finish(results: Results, training: Trainer, seconds: float) -> None:
    """Draw the run's plots and report its result."""
    assert results.logger
    table = results.logger.finish(training.state.epoch)
    if table:
        training.display.print(table)
    if results.tracker and (problem := results.tracker.finish(results.history)):
        training.display.print(problem)
    scores = training.state.best_scores or dict.fromkeys(training.task.headlines, math.nan)
    training.events.emit(contract.DONE, seconds=seconds, **scores, best=str(results.run_dir / "best.pt"))
    if not training.events.launched:  # a launcher prints this with its own paths
        titled = ((title, scores[key]) for key, title in training.task.headlines.items())
        scored = "".join(f"   {title} {score:.3f}" for title, score in titled if math.isfinite(score))
        training.display.print(f"done in {_duration(seconds)}{scored}   {results.run_dir / 'best.pt'}")


def _duration(seconds: float) -> str:
    """Format a duration as the launcher does: `42 s`, `2 min 31 s`, `3 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
