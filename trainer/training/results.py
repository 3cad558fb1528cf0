"""What an epoch leaves behind: a row in results.csv, an event, a line on the screen; at the end, pictures."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import contract, dist
from trainer.metrics import BoxScores
from trainer.training import advice
from trainer.training.run import Run
from trainer.training.timing import SHARES
from trainer.weights import checkpoint


def write_table(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Write results.csv anew: a row for each epoch."""
    out = io.StringIO()
    if rows:
        table = csv.DictWriter(out, list(rows[0]))
        table.writeheader()
        table.writerows({k: v if isinstance(v, int) else f"{v:.6g}" for k, v in row.items()} for row in rows)
    checkpoint.write_bytes(path, out.getvalue().encode())


def report(run: Run, losses: list[float], scores: BoxScores | None, shares: list[dict[str, float]]) -> None:
    """Tell of the epoch that has just ended: `losses` are its means, `shares` each rank's seconds and their use."""
    s, epoch, first = run.settings, run.at.epoch, shares[0]
    map50, map_ = (scores.map50, scores.map) if scores else (math.nan, math.nan)
    named = dict(zip((f"{t}_loss" for t in run.task.terms), losses, strict=True))
    row: dict[str, float] = {
        "epoch": epoch + 1,
        **named,
        "precision": scores.precision if scores else math.nan,
        "recall": scores.recall if scores else math.nan,
        "map50": map50,
        "map": map_,
        "lr": run.schedule.at((epoch + 1) * run.train.steps - 1).lr,
        **{k: first[k] for k in ("images_per_s", "seconds", *SHARES)},
    }
    run.history.append(row)
    if not run.record:
        return
    run.record.epoch(epoch + 1, row, run.shown)
    slow = advice.slowest(shares)
    hint = advice.advice(
        shares,
        workers=run.workers,
        cores=max(1, dist.usable_cores() // run.world.local_size),
        device=run.device.type,
        cached=bool(s.cache),
    )
    run.events.emit(
        contract.METRIC,
        epoch=epoch + 1,
        epochs=s.epochs,
        map50=map50,
        map=map_,
        **named,
        images_per_s=first["images_per_s"],
        shares={k: first[k] for k in SHARES},
        **({"slowest_rank": slow[0]} if slow else {}),
        **({"advice": hint} if hint else {}),
    )
    spent = "  ".join(f"{k} {first[k]:.0%}" for k in SHARES)
    scored = f"mAP50 {map50:.3f}  mAP50-95 {map_:.3f}  " if scores else ""
    behind = f"  slowest rank {slow[0]} ({slow[1]})" if slow else ""
    run.screen.end_epoch(
        f"epoch {epoch + 1}/{s.epochs}  {scored}loss {sum(losses):.3f}  {first['images_per_s']:.0f} img/s  {spent}"
        + behind
    )
    if hint and hint != run.last_advice:
        run.screen.say(f"advice: {hint}")
    run.last_advice = hint


class StepLog:
    """steps.csv, with --log-steps: every step's loss terms, summed over the ranks, with all their digits."""

    def __init__(self, path: Path, terms: Sequence[str]) -> None:
        self._path, self._terms = path, terms

    def write(self, number: int, terms: Sequence[float]) -> None:
        """Add step `number` (from 1, over the whole run)."""
        new = not self._path.exists()
        with self._path.open("a", encoding="ascii") as file:
            if new:
                file.write(",".join(("step", *self._terms)) + "\n")
            file.write(",".join((str(number), *(repr(t) for t in terms))) + "\n")


def _validation(run: Run) -> list[str]:
    """The command line that scores best.pt anew, with the table and the curves."""
    s = run.settings
    command = ["trainer", "val", "--weights", str(run.folder / "best.pt"), "--data", s.data]
    command += ["--cfg", s.cfg] if "import" in run.cfg else []
    command += ["--single-cls"] if s.single_cls else []
    return command + (["--allow-bad-labels"] if s.allow_bad_labels else [])


def finish(run: Run, seconds: float) -> None:
    """Draw the run's pictures and say how it ended."""
    assert run.record
    table = run.record.finish(run.at.epoch)
    if table:
        run.screen.say(table)
    if run.at.best_epoch >= 0 and not run.record.knows_best and math.isfinite(run.at.best_scores[0]):
        again = shlex.join(_validation(run))
        run.screen.say(f"the best was epoch {run.at.best_epoch + 1}, before the interruption; its curves: {again}")
    map50, map_ = run.at.best_scores
    run.events.emit(contract.DONE, seconds=seconds, map50=map50, map=map_, best=str(run.folder / "best.pt"))
    if not run.events.listening:  # a launcher says this itself, with the paths of the machine that it runs on
        scored = f"   mAP50 {map50:.3f}   mAP50-95 {map_:.3f}" if math.isfinite(map50) else ""
        run.screen.say(f"done in {seconds // 60:.0f} min {seconds % 60:.0f} s{scored}   {run.folder / 'best.pt'}")
