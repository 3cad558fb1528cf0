"""The tables of a benchmark, as text that is Markdown too, and as CSV; nothing is measured here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.bench.measure import OUT_OF_MEMORY, Measured
from trainer.bench.scaling import UNTIMED, Row

Cells = Sequence[str]


def markdown(header: Cells, rows: Iterable[Cells], left: int = 0) -> str:
    """A table of right-aligned columns, but for the first `left` ones."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    rule = ["-" * (w + 2) if k < left else "-" * (w + 1) + ":" for k, w in enumerate(widths)]

    def padded(line: Cells) -> str:
        cells = [c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "| " + " | ".join(cells) + " |"

    return "\n".join([padded(lines[0]), "|" + "|".join(rule) + "|", *map(padded, lines[1:])])


def clock(seconds: float) -> str:
    """Seconds as 20:39 or 1:02:03, with a tenth below a minute."""
    if seconds < 59.95:
        return f"0:{seconds:04.1f}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def epoch(measured: Measured, what: str = "train") -> str:
    """An epoch's training or validation as a clock shows it, with ~ where only a part of it was measured."""
    part = measured.steps < measured.epoch_steps if what == "train" else measured.val_counted < measured.val_images
    seconds = measured.train_s if what == "train" else measured.val_s
    return "-" if seconds is None else "~" * part + clock(seconds)


def gigabytes(count: int) -> str:
    """Bytes in GB, with three digits."""
    return f"{count / 1e9:.3g}"


def short(failure: str) -> str:
    """A failure in a cell; the notes have it in full."""
    return OUT_OF_MEMORY if failure.startswith(OUT_OF_MEMORY) else "failed"


def unit_of(rows: Sequence[Row]) -> str:
    """What a rank is called: GPU, or rank on a CPU."""
    return "GPU" if any(row.measured and row.measured.device_bytes is not None for row in rows) else "rank"


def yolov5_table(rows: Sequence[Row]) -> str:
    """The table of YOLOv5's multi-GPU page: an epoch on 1x, 2x, 4x, 8x; batch-size counts all of them together."""
    unit = unit_of(rows)
    header = [f"{unit}s", "batch-size", "CUDA_mem (GB)" if unit == "GPU" else "host_mem (GB)", "train", "val"]
    lines = []
    for row in rows:
        point, m = row.point, row.measured
        if m:
            memory = gigabytes(m.host_bytes if m.device_bytes is None else m.device_bytes)
            cells = [memory, epoch(m), epoch(m, "val")]
        else:
            cells = ["-", short(row.failure), "-"]
        lines.append([f"{point.ranks}x", str(point.step_batch), *cells])
    return markdown(header, lines)


def thread_table(rows: Sequence[Row]) -> str:
    """The table of the forum's thread: an epoch's time by batch size (of a rank), and the gain over the fewest."""
    unit, counts = unit_of(rows), sorted({row.point.ranks for row in rows})
    titles = [f"{count} {unit}{'s' if unit == 'rank' and count > 1 else ''}" for count in counts]
    header = ["bs", titles[0]]
    for title in titles[1:]:
        header += [title, "gain"]
    by_point = {(row.point.alone, row.point.ranks): row for row in rows}
    lines = []
    for alone in dict.fromkeys(row.point.alone for row in rows):
        line = [str(alone[0])]
        for count in counts:
            row = by_point.get((alone, count))
            line.append("-" if not row else epoch(row.measured) if row.measured else short(row.failure))
            if count > counts[0]:
                line.append("-" if not row or row.gain is None else f"{row.gain:.2f}")
        lines.append(line)
    return markdown(header, lines)


def detail_table(rows: Sequence[Row]) -> str:
    """Where each point's time and memory goes."""
    unit = unit_of(rows)
    modes = len({row.point.parallel for row in rows}) > 1
    header = [
        *(["mode"] if modes else []),
        f"{unit}s",
        "batch",
        "precision",
        "train img/s",
        "val img/s",
        "gain",
        "efficiency",
    ]
    header += [*(["GPU GB"] if unit == "GPU" else []), "host GB", "loading", "communication"]
    lines = []
    for row in rows:
        p, m = row.point, row.measured
        cells = [p.parallel] if modes else []
        cells += [str(p.ranks), str(p.step_batch), m.precision if m else p.precision]
        if not m:
            lines.append([*cells, short(row.failure), *["-"] * (len(header) - len(cells) - 1)])
            continue
        cells += [f"{m.images_per_s:.1f}", "-" if m.val_images_per_s is None else f"{m.val_images_per_s:.1f}"]
        cells += ["-" if row.gain is None else f"{row.gain:.2f}"]
        cells += ["-" if row.efficiency is None else f"{row.efficiency:.0%}"]
        cells += [] if m.device_bytes is None else [gigabytes(m.device_bytes)]
        exchange = "-" if p.parallel in UNTIMED else f"{m.shares['sync']:.0%}"
        cells += [gigabytes(m.host_bytes), f"{m.shares['data']:.0%}", exchange]
        lines.append(cells)
    return markdown(header, lines)


def notes_of(rows: Sequence[Row]) -> list[str]:
    """What a reader of the tables must know of them."""
    done = [(row.point, row.measured) for row in rows if row.measured]
    notes = []
    if some := sorted({point.parallel for point, _ in done} & set(UNTIMED)):
        notes.append(f"{', '.join(some)}: the exchange is not timed by itself, it counts as computing")
    if part := [m for _, m in done if m.steps < m.epoch_steps]:
        fewest, most = min(m.steps for m in part), max(m.steps for m in part)
        notes.append(f"~ train: extrapolated from {fewest if fewest == most else f'{fewest} to {most}'} steps")
    if part := [m for _, m in done if m.val_s is not None and m.val_counted < m.val_images]:
        fewest, most = min(m.val_counted for m in part), max(m.val_counted for m in part)
        many = fewest if fewest == most else f"{fewest} to {most}"
        notes.append(f"~ val: extrapolated from {many} of {part[0].val_images} pictures")
    for point, m in done:
        if m.step_images < 0.95 * point.step_batch:
            notes.append(
                f"batch {point.step_batch}: its steps have {m.step_images:.0f} pictures, as the {m.train_images} of"
                f" the data set are shared evenly among {m.epoch_steps} steps"
            )
    for row in rows:
        if row.failure:
            mode = "" if row.point.parallel == "ddp" else f"{row.point.parallel}, "
            where = f"batch {row.point.step_batch} on {row.point.ranks} ({mode}{row.point.precision})"
            notes.append(f"{where}: {row.failure}")
    return list(dict.fromkeys(notes))


def record_of(row: Row) -> dict[str, Any]:
    """A row as plain values, for CSV and JSON; None where there is nothing to say."""
    p, m = row.point, row.measured
    return {
        "parallel": p.parallel,
        "ranks": p.ranks,
        "batch": p.step_batch,
        "batch_per_rank": None if p.strong else p.batch,
        "precision": m.precision if m else p.precision,
        "train_images_per_s": m and m.images_per_s,
        "val_images_per_s": m and m.val_images_per_s,
        "train_epoch_s": m and m.train_s,
        "val_epoch_s": m and m.val_s,
        "extrapolated": m and m.extrapolated,
        "gain": row.gain,
        "efficiency": row.efficiency,
        "device_bytes": m and m.device_bytes,
        "host_bytes": m and m.host_bytes,
        **{f"{share}_share": m and m.shares[share] for share in ("data", "transfer", "compute", "sync")},
        "sync_timed": p.parallel not in UNTIMED,
        "workers": m and m.workers,
        "steps": m and m.steps,
        "images_per_step": m and m.step_images,
        "failure": row.failure,
    }


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as a CSV file's text; an empty cell for None."""
    out = io.StringIO()
    table = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in record.items()} for record in records)
    return out.getvalue()
