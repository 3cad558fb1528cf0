import numpy as np
import pytest
import torch

from trainer.data.registry import open_dataset
from trainer.detectors.autoanchor import Sizes, box_sizes, fit, fit_anchors, recall
from trainer.models.yolo import build_yolo, load_cfg

ANCHORS = np.array([[10.0, 10.0], [40.0, 20.0]])


def test_recall_counts_the_boxes_that_some_anchor_fits() -> None:
    sizes = np.array([[10.0, 10.0], [39.0, 39.0], [41.0, 10.0], [41.0, 4.0], [2.4, 10.0], [200.0, 200.0]])
    fits = [True, True, True, False, False, False]  # no side may differ by a factor of 4
    assert [recall(box[None], ANCHORS, 4.0) == 1 for box in sizes] == fits
    assert recall(sizes, ANCHORS, 4.0) == 0.5
    assert recall(sizes, ANCHORS, 6.0) > 0.5


def clusters(seed: int, number: int = 900) -> Sizes:
    """Boxes around nine sizes, each within 10 %."""
    centres = np.array(
        [[8, 80], [80, 8], [16, 16], [30, 200], [200, 30], [60, 60], [300, 90], [90, 300], [250, 250]]
    )
    rng = np.random.default_rng(seed)
    return centres[rng.integers(9, size=number)] * rng.uniform(0.9, 1.1, (number, 2))


def test_fitted_anchors_are_where_the_boxes_are() -> None:
    sizes = clusters(0)
    fitted = fit(sizes, 9, 4.0, seed=0)
    assert fitted.shape == (9, 2)
    assert (np.diff(fitted.prod(1)) >= 0).all()
    assert recall(clusters(1), fitted, 1.6) > 0.8  # nearer than training asks for
    packaged = np.array(load_cfg("yolov5n.yaml")["anchors"], float).reshape(-1, 2)
    assert recall(clusters(1), packaged, 1.6) < 0.4
    assert np.array_equal(fitted, fit(sizes, 9, 4.0, seed=0))
    assert not np.array_equal(fitted, fit(sizes, 9, 4.0, seed=1))


@pytest.mark.parametrize("number", [9, 20_000])
def test_few_boxes_and_many_have_anchors_too(number: int) -> None:
    sizes = clusters(0, number)
    assert recall(sizes, fit(sizes, 9, 4.0, seed=0), 4.0) > 0.95


class Bars:
    """A data set of nothing but long thin boxes, in images of 200 x 100 px."""

    def __len__(self) -> int:
        return 50

    def size(self, index: int) -> tuple[int, int]:
        return 100, 200

    def labels(self, index: int) -> np.ndarray:
        return np.array([[0, 0.5, 0.5, 0.8, 0.02], [0, 0.5, 0.5, 0.1, 0.1]], np.float32)


def test_sizes_are_in_pixels_of_the_training() -> None:
    sizes = box_sizes(Bars(), 640, seed=0)  # type: ignore[arg-type]
    assert sizes.shape == (100, 2)
    np.testing.assert_allclose(sizes[:2], [[512, 6.4], [64, 32]], rtol=1e-5)


def test_a_model_whose_anchors_do_not_fit_gets_others() -> None:
    cfg = load_cfg("yolov5n.yaml")
    model = build_yolo(cfg, nc=3)
    before = model.detect.anchors.clone()
    new, said = fit_anchors(model, cfg, Bars(), imgsz=640, anchor_t=4.0, seed=0)  # type: ignore[arg-type]
    assert said.startswith("anchors fit 50.0% of 100 boxes at 640 px: replaced by others that fit 100.0%")
    assert not torch.equal(model.detect.anchors, before)
    # The model file's anchors now give the same model.
    torch.testing.assert_close(build_yolo(new, nc=3).detect.anchors, model.detect.anchors)
    again, said = fit_anchors(model, new, Bars(), imgsz=640, anchor_t=4.0, seed=0)  # type: ignore[arg-type]
    assert again is new
    assert said == "anchors fit 100.0% of 100 boxes at 640 px"


def test_boxes_of_a_pixel_are_not_fitted_to() -> None:
    cfg = load_cfg("yolov5n.yaml")
    new, said = fit_anchors(build_yolo(cfg, nc=3), cfg, Bars(), imgsz=10, anchor_t=4.0, seed=0)  # type: ignore[arg-type]
    assert new is cfg
    assert said == "anchors: 100 boxes at 10 px are too few or too small: anchors kept"


def test_anchors_that_fit_stay_and_a_head_without_any_is_left_alone() -> None:
    digits = open_dataset("digits", "train", imgsz=128)
    cfg = load_cfg("yolov5n.yaml")
    new, said = fit_anchors(build_yolo(cfg, nc=10), cfg, digits, imgsz=128, anchor_t=4.0, seed=0)
    assert new is cfg
    assert "replaced" not in said
    cfg = load_cfg("yolov5nu.yaml")
    assert fit_anchors(build_yolo(cfg, nc=10), cfg, digits, imgsz=128, anchor_t=4.0, seed=0) == (cfg, "")
