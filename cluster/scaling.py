"""What more nodes bring: the points of a benchmark, what their jobs reported, the gains, the tables. Pure."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cluster import contract
from cluster.errors import UsageError
from cluster.logs import Event, number

_BATCH = ("--batch", "--batch-size")
#: What a benchmark trains where the arguments do not say: one epoch to warm up, one that counts.
BATCH, EPOCHS = 16, 2
_NOTHING = "-"


@dataclass(frozen=True)
class Point:
    """A number of nodes and of pictures: `batch` is that of one node, or with `strong` that of all together."""

    nodes: int
    batch: int
    strong: bool = False

    @property
    def step_batch(self) -> int:
        """Pictures of a step on all nodes together, which is what the trainer's --batch counts."""
        return self.batch if self.strong else self.batch * self.nodes


@dataclass(frozen=True)
class Measured:
    """What the epochs that count took, on all nodes together; the shares are of an epoch's seconds.

    `train_s` is an epoch without its validation. A value is None if the trainer did not report it.
    """

    images_per_s: float
    epoch_s: float | None
    train_s: float | None
    data_share: float
    sync_share: float


@dataclass(frozen=True)
class Row:
    """A point with the middle of its rounds, or why it has none; gain and efficiency are over the fewest nodes."""

    point: Point
    measured: Measured | None
    failure: str = ""
    gain: float | None = None
    efficiency: float | None = None


def numbers(option: str, text: str) -> list[int]:
    """`1,2,4` as numbers in their order; raises UsageError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words) or len(set(words)) < len(words):
        raise UsageError(f"{option} {text}: not numbers of 1 or more, each once", f"for example: {option} 1,2,4")
    return sorted(int(word) for word in words)


def doubled(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({most, *(1 << k for k in range(most.bit_length()) if 1 << k <= most)})


def batches(typed: str, arguments: Sequence[str]) -> tuple[list[int], list[str]]:
    """The batch sizes to try, and the trainer's arguments without one; raises UsageError where both say some."""
    left: list[str] = []
    said = ""
    words = iter(arguments)
    for word in words:
        option, mark, value = word.partition("=")
        if option not in _BATCH:
            left.append(word)
        elif typed:
            raise UsageError(f"--batch {typed} and {word} behind -- exclude each other", "leave one out")
        else:
            said = value if mark else next(words, "")
            if not said.isdecimal():
                raise UsageError(f"{option} {said}: not a number of pictures", f"for example: {option} {BATCH}")
    return numbers("--batch", typed or said or str(BATCH)), left


def said_to(arguments: Sequence[str], option: str) -> str:
    """What the trainer's arguments say for an option; "" where they do not."""
    words = " ".join(arguments).replace(f"{option}=", f"{option} ").split()
    return (words[words.index(option) + 1 :] or [""])[0] if option in words else ""


def arguments_of(point: Point, arguments: Sequence[str]) -> list[str]:
    """What the trainer is told at a point."""
    told = list(arguments) if arguments and not arguments[0].startswith("-") else ["train", *arguments]
    if not any(word.partition("=")[0] == "--epochs" for word in told):
        told += ["--epochs", str(EPOCHS)]
    return [*told, "--batch", str(point.step_batch)]


def measured(events: Sequence[Event]) -> Measured | None:
    """From what the first node's log told; the first epoch is left out where there are several. None without epochs."""
    epochs = [event for event in events if event["event"] == contract.METRIC and number(event, "images_per_s")]
    counted = epochs[1:] or epochs
    if not counted:
        return None

    def middle(values: Iterable[float]) -> float:
        return float(statistics.median(values))

    shares = [event["shares"] if isinstance(event.get("shares"), Mapping) else {} for event in counted]
    seconds = [number(event, "seconds") for event in counted]
    train = [all_ * (1 - number(share, "val")) for all_, share in zip(seconds, shares, strict=True)]
    return Measured(
        images_per_s=middle(number(event, "images_per_s") for event in counted),
        epoch_s=middle(seconds) or None,
        train_s=middle(train) or None,
        data_share=middle(number(share, "data") for share in shares),
        sync_share=middle(number(share, "sync") for share in shares),
    )


def rows(found: Mapping[Point, Sequence[Measured | str]]) -> list[Row]:
    """A row for each point, from its rounds: what was measured, or why not.

    The gain is the median of the rounds' own, as machines drift.
    """
    made = []
    for point, rounds in found.items():
        done = [each for each in rounds if isinstance(each, Measured)]
        if not done:
            made.append(Row(point, None, next((each for each in rounds if isinstance(each, str)), "not measured")))
            continue
        base = min((other for other in found if other.batch == point.batch), key=lambda other: other.nodes)
        pairs = [
            (mine, first)
            for mine, first in zip(rounds, found[base], strict=False)
            if isinstance(mine, Measured) and isinstance(first, Measured)
        ]
        gain = statistics.median(a.images_per_s / b.images_per_s for a, b in pairs) if pairs else None
        made.append(
            Row(
                point,
                _middle(done),
                next((each for each in rounds if isinstance(each, str)), ""),
                gain,
                gain * base.nodes / point.nodes if gain is not None else None,
            )
        )
    return made


def _middle(rounds: Sequence[Measured]) -> Measured:
    """The round in the middle, by its speed."""
    return sorted(rounds, key=lambda each: each.images_per_s)[(len(rounds) - 1) // 2]


def thread_table(made: Sequence[Row]) -> str:
    """An epoch's training time by batch size and nodes, with the gain: `bs | 1 node | 2 nodes | gain`."""
    counts = sorted({row.point.nodes for row in made})
    header = ["bs"]
    for count in counts:
        header += [f"{count} node" if count == 1 else f"{count} nodes", *(["gain"] if count > counts[0] else [])]
    at = {(row.point.batch, row.point.nodes): row for row in made}
    lines = []
    for batch in dict.fromkeys(row.point.batch for row in made):
        line = [str(batch)]
        for count in counts:
            row = at.get((batch, count))  # none: it was interrupted before
            line.append(_NOTHING if row is None else clock(row.measured.train_s) if row.measured else "failed")
            line += [_number(row.gain if row else None, ".2f")] if count > counts[0] else []
        lines.append(line)
    return _table(header, lines)


def detail_table(made: Sequence[Row], procs_per_node: int) -> str:
    """Each point with its speed, and what its ranks waited for."""
    header = ["nodes", "ranks", "batch", "img/s", "epoch", "gain", "efficiency", "data", "ranks' wait"]
    lines = []
    for row in made:
        point, of = row.point, row.measured
        first = [str(point.nodes), str(point.nodes * procs_per_node), str(point.step_batch)]
        if of is None:
            lines.append([*first, "failed", *[_NOTHING] * (len(header) - len(first) - 1)])
            continue
        speed = [f"{of.images_per_s:.1f}", clock(of.epoch_s), _number(row.gain, ".2f"), _number(row.efficiency, ".0%")]
        lines.append([*first, *speed, f"{of.data_share:.0%}", f"{of.sync_share:.0%}"])
    return _table(header, lines)


def failures(made: Sequence[Row]) -> list[str]:
    """Why points failed, a sentence each."""
    return [
        f"{row.point.nodes} {'node' if row.point.nodes == 1 else 'nodes'}, batch {row.point.step_batch}: {row.failure}"
        for row in made
        if row.failure
    ]


def records(made: Sequence[Row], procs_per_node: int) -> list[dict[str, Any]]:
    """The rows as plain values, for JSON and CSV; None where there is nothing to say."""
    return [
        {
            "nodes": row.point.nodes,
            "ranks": row.point.nodes * procs_per_node,
            "batch": row.point.step_batch,
            "batch_per_node": None if row.point.strong else row.point.batch,
            **{each.name: row.measured and getattr(row.measured, each.name) for each in fields(Measured)},
            "gain": row.gain,
            "efficiency": row.efficiency,
            "failure": row.failure,
        }
        for row in made
    ]


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """The records as a CSV file's text; an empty cell for None."""
    out = io.StringIO()
    table = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in line.items()} for line in lines)
    return out.getvalue()


def clock(seconds: float | None) -> str:
    """Seconds as 20:39 or 1:02:03, with a tenth below a minute."""
    if seconds is None:
        return _NOTHING
    if seconds < 59.95:
        return f"0:{seconds:04.1f}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, which are Markdown, too."""
    widths = [max(len(line[k]) for line in (header, *lines)) for k in range(len(header))]
    said = [
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in (header, *lines)
    ]
    return "\n".join([said[0], "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|", *said[1:]])
