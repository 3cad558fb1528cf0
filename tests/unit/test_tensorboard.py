"""Event files against TensorBoard's own reader, the judge."""

import cv2
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.training.tensorboard import EventFile


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_numbers_and_pictures_come_back(tmp_path):
    done, data = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8))
    assert done
    with EventFile(tmp_path) as events:
        for epoch in range(1, 200):
            events.numbers(epoch, {"val/mAP50": epoch / 1000, "loss/box": 1 / epoch})
        events.numbers(200, {"loss/box": float("nan")})
        events.picture(200, "predictions", data.tobytes(), 90, 160)
        before = read(tmp_path)  # a run can be watched while it writes
    found = read(tmp_path)
    assert before.Tags() == found.Tags()
    assert found.Tags()["scalars"] == ["val/mAP50", "loss/box"]
    points = found.Scalars("val/mAP50")
    assert [p.step for p in points] == list(range(1, 200))
    assert [p.value for p in points] == pytest.approx([k / 1000 for k in range(1, 200)])
    assert np.isnan(found.Scalars("loss/box")[-1].value)
    (picture,) = found.Images("predictions")
    assert (picture.step, picture.height, picture.width) == (200, 90, 160)
    assert picture.encoded_image_string == data.tobytes()


def test_a_run_that_goes_on_replaces_what_it_does_again(tmp_path):
    with EventFile(tmp_path) as events:
        for epoch in range(1, 6):
            events.numbers(epoch, {"x": 1.0})
    with EventFile(tmp_path, first_step=4) as events:
        for epoch in range(4, 9):
            events.numbers(epoch, {"x": 2.0})
    points = read(tmp_path).Scalars("x")
    assert [(p.step, p.value) for p in points] == [(k, 1.0 if k < 4 else 2.0) for k in range(1, 9)]
