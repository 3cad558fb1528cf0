"""Plots and images of a run."""

from typing import ClassVar

import cv2
import numpy as np
import pytest
import torch

from trainer.data.loading.detection_loader import Batch
from trainer.detectors import Sample
from trainer.metrics import BoxMAP
from trainer.plots import charts, class_colour, detect, plot_confusion, plot_results


def near(image_bgr, rgb, within=40):
    return (np.abs(image_bgr[..., ::-1].astype(int) - rgb) < within).all(2)


def test_curves_are_drawn_for_the_known_columns(tmp_path):
    table = tmp_path / "results.csv"
    rows = [
        f"{e},{0.1 / e},{0.06 / e},{0.02 / e},{1 - 1 / e},{0.7 - 0.7 / e},200,0.01,odd" for e in range(1, 9)
    ]
    table.write_text("\n".join(["epoch, box_loss,obj_loss,cls_loss,map50,map,images_per_s,lr,other", *rows]))
    plot_results(table, tmp_path / "results.png")
    image = cv2.imread(str(tmp_path / "results.png"))
    assert image.shape[1] > 1000
    left, right = np.array_split(image, 2, axis=1)
    for side, colours in ((left, ["0072B2", "E69F00", "009E73"]), (right, ["0072B2", "D55E00"])):
        for colour in colours:
            assert near(side, [int(colour[k : k + 2], 16) for k in (0, 2, 4)]).sum() > 100


@pytest.mark.parametrize("row", ["1,0.1,0.1,0.1,,", "1,0.1,0.1,0.1,nan,nan"])
def test_a_run_of_one_epoch_without_validation_can_be_plotted(tmp_path, row):
    table = tmp_path / "results.csv"
    table.write_text(f"epoch,box_loss,obj_loss,cls_loss,map50,map\n{row}\n")
    plot_results(table, tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 5000


def sample(image, true, predicted):
    """Return an image with boxes of class 0 that are true, and of class 1 that are predicted."""
    return Sample(image, true, [0] * len(true), predicted, [0.9] * len(predicted), [1] * len(predicted))


def test_true_boxes_are_beside_the_predicted_ones_in_the_colours_of_their_classes(tmp_path):
    page = np.full((160, 160, 3), 200, np.uint8)
    samples = [sample(page, [[20, 40, 60, 80]], [[40, 60, 80, 120]]), sample(page, [], [])]
    detect.shown(samples, ["cat", "dog"], tmp_path / "p.png")
    image = cv2.imread(str(tmp_path / "p.png"))
    scale = 360 / 160
    # A tag can be wider than its box.
    for index, offset, (x1, y1, x2, y2) in ((0, 10, (20, 40, 60, 80)), (1, 10 + 360 + 3, (40, 60, 80, 120))):
        ys, xs = np.nonzero(near(image, class_colour(index)))
        assert (xs.min(), xs.max()) == pytest.approx((offset + x1 * scale, offset + x2 * scale), abs=40)
        assert ys.max() == pytest.approx(10 + y2 * scale, abs=3)
        assert ys.min() < 10 + y1 * scale - 8  # the tag is above the box
        tag = image[ys.min() : ys.min() + 18, xs.min() : xs.min() + 60]
        assert near(tag, (255, 255, 255)).sum() > 8  # with text on it: the tag of a true box has no score


def test_images_of_different_shapes_fit_one_grid(tmp_path):
    shapes = [(480, 640), (640, 480), (32, 32), (1000, 200), (64, 160)]
    samples = [
        sample(np.full((*shape, 3), 90, np.uint8), [[1, 1, 20, 20]], [[2, 2, 20, 20]]) for shape in shapes
    ]
    detect.shown(samples, ["cat", "dog"], tmp_path / "p.jpg")
    assert cv2.imread(str(tmp_path / "p.jpg")).shape[2] == 3


def test_neighbouring_classes_have_different_colours():
    colours = np.array([class_colour(k) for k in range(10)])
    distance = np.abs(colours[:, None] - colours[None]).sum(2)
    assert distance[~np.eye(10, dtype=bool)].min() > 60


def metric_of(names, hits, misses, images=30):
    """Return a metric: a box per class and image, detected in `hits` images; false positives in `misses` others."""
    metric = BoxMAP(names)
    n = len(names)
    box = np.stack([np.arange(n) * 20.0, np.zeros(n), np.arange(n) * 20.0 + 10, np.full(n, 10.0)], 1)
    for k in range(images):
        found = box + (0 if k < hits else [0, 500, 0, 500])
        sure = np.full(n, 0.9 if k < hits else 0.4)
        metric.update(k, found[: n if k < hits + misses else 0], sure[: n if k < hits + misses else 0],
                      np.arange(n)[: n if k < hits + misses else 0], box, np.arange(n))  # fmt: skip
    return metric


@pytest.mark.parametrize("classes", [1, 3, 80])
def test_a_metric_is_drawn_for_few_and_many_classes(tmp_path, classes):
    names = [f"class $ {k}" for k in range(classes)]  # matplotlib parses $ as a formula
    detect.metric(metric_of(names, hits=20, misses=5), tmp_path)
    paths = [tmp_path / name for name in ("PR_curve.png", "F1_curve.png", "confusion_matrix.png")]
    for path in paths[:2]:
        assert near(cv2.imread(str(path)), (0x00, 0x72, 0xB2)).sum() > 300  # the mean's line
    confusion = cv2.imread(str(paths[2]))
    assert (confusion[..., 0].astype(int) - confusion[..., 2] > 60).sum() > 2000  # blue cells: the diagonal
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)


def test_an_empty_metric_can_be_drawn(tmp_path):
    detect.metric(BoxMAP(["a", "b"]), tmp_path)
    assert [path.stat().st_size > 3000 for path in tmp_path.iterdir()] == [True] * 3


def test_a_confusion_is_in_the_column_of_the_true_class(tmp_path):
    confusion = np.zeros((4, 4), int)
    confusion[2, 0] = 9  # `a` predicted as `c`
    plot_confusion(confusion, ["a", "b", "c"], tmp_path / "c.png")
    image = cv2.imread(str(tmp_path / "c.png"))
    matrix = image[:, : int(image.shape[1] * 0.85)]  # without the colour bar
    ys, xs = np.nonzero(near(matrix, (8, 48, 107), within=12))
    assert len(xs) > 1000
    assert xs.mean() < 0.4 * image.shape[1]
    assert 0.45 * image.shape[0] < ys.mean() < 0.75 * image.shape[0]


class LabelledImages:
    names: ClassVar = ["cat", "dog"]

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def labels(self, index):
        return np.array(self.rows[index], np.float32).reshape(-1, 5)


def test_labels_are_drawn_where_their_centres_are(tmp_path):
    low = LabelledImages([[(0, 0.5, 0.9, 0.1, 0.1)], [(1, 0.5, 0.9, 0.2, 0.1)] * 3, []])
    detect.labels(low, tmp_path / "labels.png")
    image = cv2.imread(str(tmp_path / "labels.png"))
    half_y = image.shape[0] // 2
    half_x = image.shape[1] // 2
    centres = image[half_y:, : int(0.8 * half_x)]  # without the colour bar
    ys, _ = np.nonzero(near(centres, (8, 48, 107), within=12))
    assert ys.min() > half_y / 2  # a box low in the image is low in the map
    assert near(image[:half_y, :half_x], (0x00, 0x72, 0xB2)).sum() > 1000
    detect.labels(LabelledImages([[], []]), tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 5000


def test_a_training_batch_is_drawn_with_its_labels(tmp_path):
    images = torch.full((3, 64, 96, 3), 128, dtype=torch.uint8)
    labels = torch.tensor([[1.0, 1, 0.25, 0.5, 0.25, 0.5]])
    detect.batch(Batch(images, {}, torch.arange(3), 3, labels), ["cat", "dog"], tmp_path / "b.png")
    image = cv2.imread(str(tmp_path / "b.png"))
    ys, xs = np.nonzero(near(image, class_colour(1)))
    scale = 420 / 96  # the second of two columns
    assert xs.min() == pytest.approx(2 * 10 + 420 + 12 * scale, abs=3)
    assert ys.max() == pytest.approx(10 + 48 * scale, abs=3)


@pytest.mark.parametrize(("greatest", "bins"), [(0, 1), (8, 9), (49, 50), (50, 26), (1000, 48)])
def test_each_bar_counts_equally_many_whole_numbers(greatest, bins):
    counts = np.arange(greatest + 1)
    edges = detect.whole_bins(counts)
    width = edges[1] - edges[0]
    heights, _ = np.histogram(counts, edges)
    assert len(heights) == bins
    assert set(heights[:-1].tolist()) <= {int(width)}
    assert heights.sum() == greatest + 1


def test_a_long_class_name_does_not_reach_the_next_chart(tmp_path):
    fig = charts.figure(5, 4)
    axes = fig.subplots()
    charts.class_bars(axes, ["a" * 200, "cat"], [1, 2], "boxes", "boxes")
    fig.canvas.draw()
    heights = [label.get_window_extent().height for label in axes.get_xticklabels()]
    assert max(heights) < fig.bbox.height / 2
