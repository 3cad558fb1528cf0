"""The tables of a benchmark, from the published figures of YOLOv5 and the fast.ai thread."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import cv2
import pytest

from trainer.bench.measure import Measurement
from trainer.bench.processes import NoMemory
from trainer.bench.scaling import Outcome, Point, Row, points_of, rows_of, settings_at
from trainer.bench.tables import (
    clock,
    csv_text,
    curves_of,
    detail_table,
    notes_of,
    plot_scaling,
    thread_table,
    values_of,
    yolov5_table,
)
from trainer.cli.bench import settings_of
from trainer.distributed.comm import devices_of
from trainer.errors import TrainerError

MEASURED = Measurement(
    train_images_per_s=100.0,
    val_images_per_s=None,
    images_per_step=16,
    steps=20,
    epoch_steps=20,
    train_images=118287,
    val_images=5000,
    val_counted=5000,
    device_bytes=26_000_000_000,
    host_bytes=4_000_000_000,
    data_share=0.61,
    sync_share=0.08,
    workers=8,
    device="A100",
    precision="fp16",
)


def took(train_s: float, val_s: float | None = None) -> Measurement:
    """Return the measurement of an epoch with these times."""
    val_rate = val_s and MEASURED.val_images / val_s
    return replace(MEASURED, train_images_per_s=MEASURED.train_images / train_s, val_images_per_s=val_rate)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_yolov5_s_table_from_its_own_figures() -> None:
    times = {1: (20 * 60 + 39, 55), 2: (11 * 60 + 43, 57), 4: (5 * 60 + 57, 55), 8: (3 * 60 + 9, 57)}
    rows = rows_of({Point(16, n, "fp16"): [took(*t)] for n, t in times.items()})
    assert cells(yolov5_table(rows)) == [
        ["GPUs", "batch-size", "CUDA_mem (GB)", "train", "val"],
        ["-----:", "-----------:", "--------------:", "------:", "-------:"],
        ["1x", "16", "26", "20:39", "0:55.0"],
        ["2x", "32", "26", "11:43", "0:57.0"],
        ["4x", "64", "26", "5:57", "0:55.0"],
        ["8x", "128", "26", "3:09", "0:57.0"],
    ]
    assert [f"{row.gain:.2f} {row.efficiency:.0%}" for row in rows] == [
        "1.00 100%",
        "1.76 88%",
        "3.47 87%",
        "6.56 82%",
    ]


def test_the_thread_s_table_from_its_own_figures() -> None:
    times = {4: (917, 496), 512: (21, 17)}
    rows = rows_of(
        {
            Point(b, n, "fp32"): [took(t)]
            for b, pair in times.items()
            for n, t in zip((1, 2), pair, strict=True)
        }
    )
    assert cells(thread_table(rows))[2:] == [
        ["4", "15:17", "8:16", "1.85"],
        ["512", "0:21.0", "0:17.0", "1.24"],
    ]
    assert cells(thread_table(rows))[0] == ["bs", "1 GPU", "2 GPU", "gain"]


def test_a_gain_is_the_ratio_within_a_round() -> None:
    """Each round is twice as slow as the one before, with the same ratio."""
    one = Point(4, 1, "fp32")
    two = Point(4, 2, "fp32")
    slower: dict[Point, list[Outcome]] = {
        one: [took(10), took(20), took(40)],
        two: [took(5), took(10), took(25)],
    }
    rows = rows_of(slower)
    assert rows[1].gain == pytest.approx(2.0)
    assert rows[1].measured == took(10)


def test_a_point_that_runs_out_of_memory_is_a_row() -> None:
    outcomes: dict[Point, list[Outcome]] = {
        Point(4, 1, "fp32"): [took(10)],
        Point(8, 1, "fp32"): [NoMemory("out of memory, probably: the system killed a rank")],
        Point(8, 2, "fp32"): [TrainerError("batch 16 is larger than the 9 training images")],
    }
    rows = rows_of(outcomes)
    assert [row[-2] for row in cells(yolov5_table(rows))[2:]] == ["0:10.0", "out of memory", "failed"]
    assert cells(thread_table(rows))[3] == ["8", "out of memory", "failed", "-"]
    assert "out of memory" in detail_table(rows)
    assert notes_of(rows) == [
        "batch 8 on 1 (fp32): out of memory, probably: the system killed a rank",
        "batch 16 on 2 (fp32): batch 16 is larger than the 9 training images",
    ]
    table = list(csv.DictReader(io.StringIO(csv_text([values_of(row) for row in rows]))))
    assert [(r["batch"], r["train_epoch_s"], r["failure"][:6]) for r in table] == [
        ("4", "10", ""),
        ("8", "", "out of"),
        ("16", "", "batch "),
    ]


def test_extrapolated_times_are_marked() -> None:
    part = replace(took(100, 50), epoch_steps=400, val_counted=2500)
    rows = [Row(Point(16, 1, "fp32"), part)]
    assert cells(yolov5_table(rows))[2][-2:] == ["~1:40", "~0:50.0"]
    assert notes_of(rows) == [
        "~ train: extrapolated from 20 steps",
        "~ val: extrapolated from 2500 of 5000 images",
    ]
    assert not notes_of([Row(Point(16, 1, "fp32"), took(100, 50))])


def test_strong_points_share_one_batch() -> None:
    weak, strong = (points_of([4, 16], [1, 2], ["fp32", "bf16"], kind, ["ddp"]) for kind in (False, True))
    assert [p.step_batch for p in weak[:4]] == [4, 8, 16, 32]
    assert [p.step_batch for p in strong[:4]] == [4, 4, 16, 16]
    assert len(weak) == 8
    strategies = points_of([4], [1, 2], ["fp32"], False, ["ddp", "fsdp"])
    assert [(p.ranks, p.parallel) for p in strategies] == [(1, "ddp"), (2, "ddp"), (2, "fsdp")]
    for batches, ranks in (([4, 4], [1]), ([0], [1]), ([4], [])):
        with pytest.raises(TrainerError, match="expected distinct numbers, 1 or more"):
            points_of(batches, ranks, ["fp32"], False, ["ddp"])
    with pytest.raises(TrainerError, match="fewer images per step than the 2 ranks"):
        points_of([1], [1, 2], ["fp32"], True, ["ddp"])


def test_clock_and_devices() -> None:
    assert [clock(t) for t in (0.04, 4.26, 59.94, 59.96, 61.4, 3723.0)] == [
        *("0:00.0", "0:04.3", "0:59.9", "1:00", "1:01", "1:02:03"),
    ]
    assert [devices_of("4,5,6", n) for n in (1, 2, 3)] == ["4", "4,5", "4,5,6"]
    assert devices_of("", 2) == ""
    assert devices_of("cpu", 2) == "cpu"
    with pytest.raises(TrainerError, match="--parallel dp on 2 GPUs: this machine has 0"):
        devices_of("cpu", 2, "dp")


def test_the_charts_show_each_gain_once(tmp_path: Path) -> None:
    outcomes: dict[Point, list[Outcome]] = {
        Point(b, n, "fp32"): [took(100 / n**0.5)] for b in (16, 4) for n in (1, 4)
    }
    outcomes[Point(64, 1, "fp32")] = [NoMemory("out of memory")]
    rows = rows_of(outcomes)
    both = {1: 1.0, 4: 2.0}
    assert curves_of(rows) == ({"batch 16": both, "batch 4": both}, {"4 GPUs": {16: 2.0, 4: 2.0}})
    two = Point(16, 2, "fp32")
    fsdp = Point(16, 2, "fp32", parallel="fsdp")
    of_strategies = rows_of({Point(16, 1, "fp32"): [took(100)], two: [took(50)], fsdp: [took(25)]})
    assert curves_of(of_strategies) == (
        {"batch 16, fp32, ddp": {1: 1.0, 2: 2.0}, "batch 16, fp32, fsdp": {1: 1.0, 2: 4.0}},
        {"2 GPUs, fp32, ddp": {16: 2.0}, "2 GPUs, fp32, fsdp": {16: 4.0}},
    )
    plot_scaling(rows, tmp_path / "scaling.png")
    assert cv2.imread(str(tmp_path / "scaling.png")).shape[1] > 1000
    plot_scaling(rows[-1:], tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").exists()


def test_a_pipelines_options_are_dropped_for_other_strategies() -> None:
    settings = settings_of(["--stages", "2", "--imgsz", "64"], "cpu", "ddp,pipeline")
    assert (settings.stages, settings.imgsz, settings.device) == (2, 64, "cpu")
    varied = [
        settings_at(settings, Point(4, 2, "fp32", parallel=strategy)) for strategy in ("ddp", "pipeline")
    ]
    assert [(each.parallel, each.stages, each.batch) for each in varied] == [
        ("ddp", 0, 8),
        ("pipeline", 2, 8),
    ]
    with pytest.raises(TrainerError, match="--stages has no effect with --parallel ddp"):
        settings_of(["--stages", "2"], "cpu", "ddp,fsdp")
