"""What an epoch leaves behind: a row in results.csv, an event, a line on the screen; at the end, pictures."""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import contract, dist
from trainer.tasks import Scores
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


def report(run: Run, losses: list[float], scores: Scores | None, shares: list[dict[str, float]]) -> None:
    """Tell of the epoch that has just ended: `losses` are its means, `shares` each rank's seconds and their use."""
    s, epoch, first = run.settings, run.at.epoch, shares[0]
    found = scores.columns() if scores else dict.fromkeys(run.task.columns, math.nan)
    named = dict(zip((f"{t}_loss" for t in run.task.terms), losses, strict=True))
    row: dict[str, float] = {
        "epoch": epoch + 1,
        **named,
        **found,
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
        cached=bool(s.cache) or s.task != "detect",  # --cache is for boxes
    )
    run.events.emit(
        contract.METRIC,
        epoch=epoch + 1,
        epochs=s.epochs,
        **{key: found[key] for key in run.task.headlines},
        **named,
        images_per_s=first["images_per_s"],
        seconds=first["seconds"],
        shares={k: first[k] for k in SHARES},
        **({"slowest_rank": slow[0]} if slow else {}),
        **({"advice": hint} if hint else {}),
    )
    spent = "  ".join(f"{k} {first[k]:.0%}" for k in SHARES)
    scored = "".join(f"{title} {found[key]:.3f}  " for key, title in run.task.headlines.items()) if scores else ""
    behind = f"  slowest rank {slow[0]} ({slow[1]})" if slow else ""
    run.screen.end_epoch(
        f"epoch {epoch + 1}/{s.epochs}  {scored}loss {sum(losses):.3f}  {first['images_per_s']:.0f} img/s  {spent}"
        + behind
    )
    news = re.sub(r"\d+%", "", hint)  # the same of another share is none
    if news and news not in run.advised:
        run.advised.add(news)
        run.screen.say(f"advice: {hint}")


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


def finish(run: Run, seconds: float) -> None:
    """Draw the run's pictures and say how it ended."""
    assert run.record
    table = run.record.finish(run.at.epoch)
    if table:
        run.screen.say(table)
    if run.at.best_epoch >= 0 and not run.record.knows_best:
        again = shlex.join(run.task.validation(str(run.folder)))
        run.screen.say(f"the best was epoch {run.at.best_epoch + 1}, before the interruption; its curves: {again}")
    scores = run.at.best_scores or dict.fromkeys(run.task.headlines, math.nan)
    run.events.emit(contract.DONE, seconds=seconds, **scores, best=str(run.folder / "best.pt"))
    if not run.events.listening:  # a launcher says this itself, with the paths of the machine that it runs on
        titled = ((title, scores[key]) for key, title in run.task.headlines.items())
        scored = "".join(f"   {title} {score:.3f}" for title, score in titled if math.isfinite(score))
        run.screen.say(f"done in {seconds // 60:.0f} min {seconds % 60:.0f} s{scored}   {run.folder / 'best.pt'}")
