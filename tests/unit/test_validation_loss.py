"""Validation losses: independent of ranks and batches, equal to the criterion applied by hand, absent where unknown."""

import csv

import pytest
import torch

from tests.unit.settings import settings
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.results import write_table
from trainer.engine.trainer import Trainer
from trainer.losses.criterion import LossSums, mean_terms
from trainer.models.precision import as_input

CPU = torch.device("cpu")


def trainer(**more):
    run = Trainer(settings("digits", imgsz=64, workers=0, **more), World(), CPU, Events({}))
    run.start()
    return run


def losses_of(run, world, batch):
    """Return the terms over the shares of `world` ranks, each with batches of `batch` images."""
    whole = LossSums()
    criterion = run.task.criterion()
    for rank in range(world):
        run.task._settings = settings("digits", imgsz=64, workers=0, batch=batch)
        loader = run.task.val_loader({"rank": rank, "world": world, "workers": 0, "local_size": 1})
        run.task.prepare_targets(run.train_loader, loader, run.model, pads=False)
        found = run.task.evaluate(run.model, iter(loader), CPU, torch.float32, criterion)
        whole.merge(found.losses)
    return whole.terms(criterion)


@pytest.mark.parametrize("cfg", ["yolov5n.yaml", "yolov8n.yaml", "yolo26n.yaml"])
def test_neither_ranks_nor_batches_change_it(cfg):
    run = trainer(cfg=cfg)
    one = losses_of(run, 1, 32)
    assert list(one) == list(run.task.terms)
    assert losses_of(run, 3, 5) == pytest.approx(one, rel=1e-4)


def test_it_is_the_criterion_of_the_unaugmented_images():
    run = trainer()
    criterion = run.task.criterion()
    (batch, *_) = run.evaluator.loader
    detector_loss = run.task.evaluate(run.model, [batch], CPU, torch.float32, criterion).losses
    network = run.model.eval()
    with torch.no_grad():
        outputs = network(as_input(batch.images))
        sums, counts = criterion(outputs, batch.targets, tuple(batch.images.shape[1:3]))
    by_hand = mean_terms(sums, criterion.divisors(counts), criterion.gains)
    assert list(detector_loss.terms(criterion).values()) == pytest.approx(by_hand.tolist(), rel=1e-3)


def test_a_rank_without_images_adds_nothing():
    run = trainer()
    found = run.task.evaluate(run.model, [], CPU, torch.float32, run.task.criterion())
    assert found.losses.terms(run.task.criterion()) == {}


def test_a_table_of_a_run_that_had_fewer_columns(tmp_path):
    write_table([{"epoch": 1, "lr": 0.5}, {"epoch": 2, "val/box_loss": 0.25, "lr": 0.5}], tmp_path / "t.csv")
    with (tmp_path / "t.csv").open() as file:
        old, new = csv.DictReader(file)
    assert list(new) == ["epoch", "val/box_loss", "lr"]
    assert (old["val/box_loss"], new["val/box_loss"]) == ("nan", "0.25")
