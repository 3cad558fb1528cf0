"""What a benchmark's rows mean for the person who asked: one page of advice, from the figures alone."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.bench.measure import Measured
from trainer.bench.scaling import UNTIMED, Point, Row
from trainer.bench.tables import gigabytes, unit_of
from trainer.training.advice import LOADING, VALIDATING, WAITING, more_workers

EFFICIENT = 0.80
ALIKE = 0.05  # rates that differ by less are alike
SMALLER = 0.85  # memory that is less than this share of another's is worth a word


def advice_of(rows: Sequence[Row], cores: int) -> list[str]:
    """Sentences, the most important first; `cores` are this machine's."""
    done = [(row, row.measured) for row in rows if row.measured]
    if not done:
        return ["nothing could be measured"]
    return [*_modes(done, unit_of(rows)), *_failed(rows, done), *_bottleneck(done, cores)]


def _modes(done: Sequence[tuple[Row, Measured]], unit: str) -> list[str]:
    """Which mode, and what it brings over one rank."""
    most = max(row.point.ranks for row, _ in done)
    many = [(row, m) for row, m in done if row.point.ranks == most]
    best, measured = max(many, key=lambda pair: pair[1].images_per_s)
    name, said = best.point.parallel, []
    if best.gain is not None and most > 1:
        if best.gain < 1 + ALIKE:
            said.append(f"{most} {unit}s are no faster than one here: {name} reaches {best.gain:.2f} times its rate")
        else:
            said.append(
                f"{name} on {most} {unit}s trains {best.gain:.2f} times as fast as one: {best.efficiency:.0%} efficient"
            )
    for row, m in many:
        if row is best or row.point.alone != best.point.alone:
            continue
        share = m.images_per_s / measured.images_per_s
        less = _memory(m) / max(_memory(measured), 1)
        how = "as fast" if share > 1 - ALIKE else f"{share:.0%} as fast"
        if less < SMALLER:
            why = f"and needs {less:.0%} of its memory: take it where {name} does not fit"
        else:
            why = "and needs no less memory: there is no reason to take it here"
        said.append(f"{row.point.parallel} is {how} {why}")
    return said


def _failed(rows: Sequence[Row], done: Sequence[tuple[Row, Measured]]) -> list[str]:
    return [
        f"{row.point.parallel} with batch {row.point.step_batch} on {row.point.ranks}: {row.failure}"
        + (f"; {', '.join(fit)} fits" if (fit := _fitting(row, done)) else "")
        for row in rows
        if row.failure
    ]


def _fitting(failed: Row, done: Sequence[tuple[Row, Measured]]) -> list[str]:
    """The modes that could do what a failed one could not."""
    same = [row for row, _ in done if row.point.alone == failed.point.alone and row.point.ranks == failed.point.ranks]
    return sorted({row.point.parallel for row in same})


def _bottleneck(done: Sequence[tuple[Row, Measured]], cores: int) -> list[str]:
    """What the time goes to where the most ranks train fastest, and what to type about it."""
    most = max(row.point.ranks for row, _ in done)
    row, m = max(((r, m) for r, m in done if r.point.ranks == most), key=lambda pair: pair[1].images_per_s)
    said, unit = [], unit_of([row])
    if m.shares["data"] > LOADING:
        each = max(1, cores // row.point.ranks)
        more = more_workers(m.workers, each)
        ways = (
            [f"raise --workers from {m.workers} to {more}"] if more > m.workers and m.device_bytes is not None else []
        )
        ways.append("--cache ram keeps the decoded pictures")
        said.append(
            f"loading is {m.shares['data']:.0%} of the step: more {unit}s will not help; {', or '.join(ways)} "
            "(trainer bench workers measures it)"
        )
    if m.shares["sync"] > WAITING:
        said.append(
            f"the exchange between ranks is {m.shares['sync']:.0%} of the step: a larger --batch does more between two "
            "exchanges, --grad-compress bf16 halves what is sent"
        )
    if m.val_s and m.val_s / (m.val_s + m.train_s) > VALIDATING:
        share = m.val_s / (m.val_s + m.train_s)
        said.append(f"validation is {share:.0%} of an epoch: --val-period 5 validates every fifth epoch only")
    if not said and row.point.parallel in UNTIMED and row.point.ranks > 1:
        pass  # whether it computes or waits for others is not known
    elif not said and row.efficiency is not None and row.efficiency < EFFICIENT:
        said.append(
            f"each {unit} computes more slowly beside the others than alone, without waiting for them: they share "
            "cores, memory bandwidth or power"
        )
    elif not said:
        compute = m.shares["compute"]
        said.append(f"{compute:.0%} of the step is computing: nothing to gain but by faster or more {unit}s")
    return [*said, *_batch(done, row.point)]


def _batch(done: Sequence[tuple[Row, Measured]], point: Point) -> list[str]:
    """Whether a larger batch pays."""
    same = {r.point.batch: m for r, m in done if (r.point.ranks, r.point.parallel) == (point.ranks, point.parallel)}
    if len(same) < 2:
        return []
    least, most = min(same), max(same, key=lambda batch: same[batch].images_per_s)
    gain = same[most].images_per_s / same[least].images_per_s
    if most == least or gain < 1 + ALIKE:
        return [f"a larger batch than {least} brings nothing"]
    memory = gigabytes(_memory(same[most]))
    return [f"batch {most} trains {gain:.2f} times as fast as batch {least}, and takes {memory} GB"]


def _memory(m: Measured) -> int:
    return m.host_bytes if m.device_bytes is None else m.device_bytes
