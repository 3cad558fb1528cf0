"""The run logger: plots and TensorBoard events."""

import cv2
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.settings import settings
from trainer.data.loading.detection_loader import Batch
from trainer.detectors import Sample
from trainer.engine.run_logger import RunLogger
from trainer.metrics import BoxMAP
from trainer.tasks import open_task

NAMES = [str(k) for k in range(10)]
IMAGES = ["F1_curve.png", "PR_curve.png", "confusion_matrix.png", "labels.png", "predictions.jpg"]


def row(epoch):
    losses = {"box_loss": 1 / epoch, "obj_loss": 0.5, "cls_loss": 0.1}
    scores = {"map50": epoch / 10, "map": epoch / 20, "precision": 0.5, "recall": 0.4} if epoch > 1 else {}
    rest = {"lr": 0.01, "images_per_s": 100.0, "seconds": 2.0, "data": 0.1, "compute": 0.9}
    return {"epoch": epoch, **losses, "map50": float("nan"), **scores, **rest}


def write_row(path, values):
    new = not path.exists()
    with path.open("a") as file:
        if new:
            file.write(",".join(row(2)) + "\n")
        file.write(",".join(str(values.get(name, "")) for name in row(2)) + "\n")


def metric_with(hits):
    metric = BoxMAP(NAMES)
    box = [[0, 0, 10, 10]]
    for k in range(10):
        metric.update(
            k, box if k < hits else [], [0.9] if k < hits else [], [3] if k < hits else [], box, [3]
        )
    return metric


def read_events(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


@pytest.fixture(scope="module")
def task():
    return open_task(settings(data="digits", imgsz=64))


@pytest.fixture
def shown():
    return [Sample(np.full((64, 96, 3), 90, np.uint8), [[4, 4, 44, 40]], [3], [[4, 4, 40, 40]], [0.5], [3])]


def test_the_record_of_a_run(tmp_path, shown, task):
    RunLogger(tmp_path, task).epoch(7, row(7), [])  # an earlier run in the same folder
    record = RunLogger(tmp_path, task)
    record.begin()
    record.first_batch(
        Batch(torch.zeros(2, 64, 64, 3, dtype=torch.uint8), {}, torch.arange(2), 2, torch.zeros(0, 6))
    )
    assert sorted(p.suffix for p in tmp_path.iterdir() if "events" not in p.name) == [".jpg", ".png"]
    for epoch in (1, 2, 3):
        write_row(tmp_path / "results.csv", row(epoch))
        record.epoch(epoch, row(epoch), shown)  # the first epoch did not validate
        if epoch == 2:
            metric = metric_with(hits=7)
            record.best(metric, metric.compute())
    table = record.finish(3)
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["3"][:4] == ["10", "10", "1.000", "0.700"]
    for name in (*IMAGES, "results.png", "train_batch0.jpg"):
        assert cv2.imread(str(tmp_path / name)) is not None, name

    events = read_events(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        *("loss/box", "loss/obj", "loss/cls", "val/mAP50", "val/mAP50-95", "val/precision", "val/recall"),
        *("lr", "speed/images_per_s", "speed/seconds", "share/data", "share/compute"),
    }
    assert [p.step for p in events.Scalars("val/mAP50")] == [2, 3]
    assert [p.step for p in events.Scalars("loss/box")] == [p.step for p in events.Scalars("lr")] == [1, 2, 3]
    assert len(list(tmp_path.glob("events*"))) == 1
    images = events.Images("predictions")
    assert [p.step for p in images] == [2, 3]  # epochs 1, 2, 4, ... that validated, and the last
    image = cv2.imdecode(np.frombuffer(images[-1].encoded_image_string, np.uint8), cv2.IMREAD_COLOR)
    written = cv2.imread(str(tmp_path / "predictions.jpg"))
    assert np.abs(image.astype(int) - written).mean() < 2  # JPEG


def test_a_resumed_run_replaces_the_epochs_that_it_repeats(tmp_path, task):
    killed = RunLogger(tmp_path, task)
    for epoch in range(1, 6):
        killed.epoch(epoch, row(epoch), [])
    assert [p.step for p in read_events(tmp_path).Scalars("lr")] == [
        1,
        2,
        3,
        4,
        5,
    ]  # before the file is closed
    resumed = RunLogger(tmp_path, task, epoch=4)
    for epoch in range(4, 9):
        resumed.epoch(epoch, row(epoch) | {"lr": 0.02}, [])
    points = read_events(tmp_path).Scalars("lr")
    assert [(p.step, round(p.value, 4)) for p in points] == [
        (k, 0.01 if k < 4 else 0.02) for k in range(1, 9)
    ]


def test_a_run_without_validation_has_curves_of_its_losses_only(tmp_path, task):
    record = RunLogger(tmp_path, task)
    write_row(tmp_path / "results.csv", row(1))
    record.epoch(1, row(1), [])
    assert record.finish(1) == ""
    assert sorted(p.name for p in tmp_path.iterdir() if "events" not in p.name) == [
        "results.csv",
        "results.png",
    ]


def test_a_table_of_very_many_classes_is_not_printed(tmp_path, task):
    names = [f"class {k}" for k in range(80)]
    record = RunLogger(tmp_path, task)
    metric = BoxMAP(names)
    boxes = np.array([[0, 0, 10, 10]] * 80)
    metric.update(0, boxes, np.ones(80), np.arange(80), boxes, np.arange(80))
    write_row(tmp_path / "results.csv", row(2))
    record.best(metric, metric.compute())
    assert record.finish(1) == ""
    assert (tmp_path / "PR_curve.png").exists()
