"""The tables of a benchmark, from given numbers: those that YOLOv5 and the forum's thread published."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import cv2
import pytest

from trainer.bench.measure import Measured, NoMemory
from trainer.bench.plot import gains, plot_scaling, speed_ups
from trainer.bench.scaling import Outcome, Point, Row, in_mode, points_of, rows_of
from trainer.bench.tables import clock, csv_text, detail_table, notes_of, record_of, thread_table, yolov5_table
from trainer.cli.bench import settings_of
from trainer.dist import devices_of
from trainer.errors import TrainerError

MEASURED = Measured(
    images_per_s=100.0,
    val_images_per_s=None,
    step_images=16,
    steps=20,
    epoch_steps=20,
    train_images=118287,
    val_images=5000,
    val_counted=5000,
    device_bytes=26_000_000_000,
    host_bytes=4_000_000_000,
    shares={"data": 0.61, "transfer": 0.01, "compute": 0.3, "sync": 0.08},
    workers=8,
    device="A100",
    precision="fp16",
)


def took(train_s: float, val_s: float | None = None) -> Measured:
    """A measurement of an epoch that takes so long."""
    rates = {"images_per_s": MEASURED.train_images / train_s, "val_images_per_s": val_s and MEASURED.val_images / val_s}
    return replace(MEASURED, **rates)


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
    assert [f"{row.gain:.2f} {row.efficiency:.0%}" for row in rows] == ["1.00 100%", "1.76 88%", "3.47 87%", "6.56 82%"]


def test_the_thread_s_table_from_its_own_figures() -> None:
    times = {4: (917, 496), 512: (21, 17)}
    rows = rows_of(
        {Point(b, n, "fp32"): [took(t)] for b, pair in times.items() for n, t in zip((1, 2), pair, strict=True)}
    )
    assert cells(thread_table(rows))[2:] == [["4", "15:17", "8:16", "1.85"], ["512", "0:21.0", "0:17.0", "1.24"]]
    assert cells(thread_table(rows))[0] == ["bs", "1 GPU", "2 GPU", "gain"]
    more = rows_of({Point(4, n, "fp32"): [took(100 / n)] for n in (1, 2, 4)})
    assert cells(thread_table(more))[0] == ["bs", "1 GPU", "2 GPU", "gain", "4 GPU", "gain"]
    assert cells(thread_table(more))[2] == ["4", "1:40", "0:50.0", "2.00", "0:25.0", "4.00"]


def test_a_gain_is_that_of_rounds_not_of_a_machine_that_became_slower() -> None:
    """Each round twice as slow as the one before: the ratio inside a round is what stays."""
    one, two = Point(4, 1, "fp32"), Point(4, 2, "fp32")
    slower: dict[Point, list[Outcome]] = {one: [took(10), took(20), took(40)], two: [took(5), took(10), took(25)]}
    rows = rows_of(slower)
    assert rows[1].gain == pytest.approx(2.0)
    assert rows[1].measured == took(10)


def test_a_point_without_memory_is_a_row_and_what_follows_stays() -> None:
    outcomes: dict[Point, list[Outcome]] = {
        Point(4, 1, "fp32"): [took(10)],
        Point(8, 1, "fp32"): [NoMemory("out of memory, it seems: the system has killed a rank")],
        Point(8, 2, "fp32"): [TrainerError("there are only 9 training pictures for a step of 16")],
    }
    rows = rows_of(outcomes)
    assert [row[-2] for row in cells(yolov5_table(rows))[2:]] == ["0:10.0", "out of memory", "failed"]
    assert cells(thread_table(rows))[3] == ["8", "out of memory", "failed", "-"]
    assert "out of memory" in detail_table(rows)
    assert notes_of(rows) == [
        "batch 8 on 1 (fp32): out of memory, it seems: the system has killed a rank",
        "batch 16 on 2 (fp32): there are only 9 training pictures for a step of 16",
    ]
    table = list(csv.DictReader(io.StringIO(csv_text([record_of(row) for row in rows]))))
    assert [(r["batch"], r["train_epoch_s"], r["failure"][:6]) for r in table] == [
        ("4", "10", ""),
        ("8", "", "out of"),
        ("16", "", "there "),
    ]


def test_what_was_not_measured_to_the_end_is_marked() -> None:
    part = replace(took(100, 50), epoch_steps=400, val_counted=2500)
    rows = [Row(Point(16, 1, "fp32"), part)]
    assert cells(yolov5_table(rows))[2][-2:] == ["~1:40", "~0:50.0"]
    assert notes_of(rows) == ["~ train: extrapolated from 20 steps", "~ val: extrapolated from 2500 of 5000 pictures"]
    assert not notes_of([Row(Point(16, 1, "fp32"), took(100, 50))])
    uneven = replace(took(100), step_images=9, train_images=18, epoch_steps=2)
    assert "its steps have 9 pictures" in " ".join(notes_of([Row(Point(16, 1, "fp32"), uneven)]))


def test_strong_points_share_one_batch() -> None:
    weak, strong = (points_of([4, 16], [1, 2], ["fp32", "bf16"], kind) for kind in (False, True))
    assert [p.step_batch for p in weak[:4]] == [4, 8, 16, 32]
    assert [p.step_batch for p in strong[:4]] == [4, 4, 16, 16]
    assert len(weak) == 8
    assert record_of(Row(strong[1], None, "x"))["batch_per_rank"] is None
    for batches, ranks in (([4, 4], [1]), ([0], [1]), ([4], [])):
        with pytest.raises(TrainerError, match="each must be 1 or more, and given once"):
            points_of(batches, ranks, ["fp32"], False)
    with pytest.raises(TrainerError, match="fewer pictures in a step than ranks"):
        points_of([1], [1, 2], ["fp32"], True)


def test_clock_and_devices() -> None:
    assert [clock(t) for t in (0.04, 4.26, 59.94, 59.96, 61.4, 3723.0)] == [
        *("0:00.0", "0:04.3", "0:59.9", "1:00", "1:01", "1:02:03"),
    ]
    assert [devices_of("4,5,6", n) for n in (1, 2, 3)] == ["4", "4,5", "4,5,6"]
    assert devices_of("", 2) == ""
    assert devices_of("cpu", 2) == "cpu"
    with pytest.raises(TrainerError, match="--parallel dp on 2 GPUs: there are 0"):
        devices_of("cpu", 2, "dp")


def test_the_diagrams_show_each_gain_once(tmp_path: Path) -> None:
    outcomes: dict[Point, list[Outcome]] = {Point(b, n, "fp32"): [took(100 / n**0.5)] for b in (16, 4) for n in (1, 4)}
    outcomes[Point(64, 1, "fp32")] = [NoMemory("out of memory")]
    rows = rows_of(outcomes)
    assert speed_ups(rows) == [("batch 16", [1, 4], [1.0, 2.0]), ("batch 4", [1, 4], [1.0, 2.0])]
    assert gains(rows) == [("4 GPUs", [4, 16], [2.0, 2.0])]
    modes: dict[Point, list[Outcome]] = {ONE: [took(100)], TWO: [took(50)], FSDP: [took(25)]}
    of_modes = rows_of(modes)
    assert speed_ups(of_modes) == [("batch 16, ddp", [1, 2], [1.0, 2.0]), ("batch 16, fsdp", [1, 2], [1.0, 4.0])]
    assert gains(of_modes) == [("2 GPUs, ddp", [16], [2.0]), ("2 GPUs, fsdp", [16], [4.0])]
    plot_scaling(rows, tmp_path / "scaling.png")
    assert cv2.imread(str(tmp_path / "scaling.png")).shape[1] > 1000
    plot_scaling(rows[-1:], tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").exists()


ONE, TWO, FSDP = Point(16, 1, "fp32"), Point(16, 2, "fp32"), Point(16, 2, "fp32", parallel="fsdp")


def test_modes_are_those_of_train_and_one_rank_has_none() -> None:
    points = points_of([4], [1, 2], ["fp32"], False, ["ddp", "fsdp"])
    assert [(p.ranks, p.parallel) for p in points] == [(1, "ddp"), (2, "ddp"), (2, "fsdp")]
    with pytest.raises(TrainerError, match="--parallel both: unknown"):
        points_of([4], [1], ["fp32"], False, ["both"])


def test_what_only_a_pipeline_is_told_stays_with_the_pipeline() -> None:
    settings = settings_of(["--stages", "2", "--imgsz", "64"], "cpu", "ddp,pipeline")
    assert (settings.stages, settings.imgsz, settings.device) == (2, 64, "cpu")
    assert [(in_mode(settings, m).parallel, in_mode(settings, m).stages) for m in ("ddp", "pipeline")] == [
        ("ddp", 0),
        ("pipeline", 2),
    ]
    with pytest.raises(TrainerError, match="--stages: --parallel ddp has none"):
        settings_of(["--stages", "2"], "cpu", "ddp,fsdp")
