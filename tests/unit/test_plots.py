"""The pictures of a run."""

import cv2
import numpy as np
import pytest

from trainer.errors import TrainerError
from trainer.plots import class_colour, draw_predictions, plot_results


def near(picture_bgr, rgb, within=40):
    return (np.abs(picture_bgr[..., ::-1].astype(int) - rgb) < within).all(2)


def test_curves_are_drawn_for_the_known_columns(tmp_path):
    table = tmp_path / "results.csv"
    rows = [f"{e},{0.1 / e},{0.06 / e},{0.02 / e},{1 - 1 / e},{0.7 - 0.7 / e},200,0.01,odd" for e in range(1, 9)]
    table.write_text("\n".join(["epoch, box_loss,obj_loss,cls_loss,map50,map,images_per_s,lr,other", *rows]))
    plot_results(table, tmp_path / "results.png")
    picture = cv2.imread(str(tmp_path / "results.png"))
    assert picture.shape[1] > 1000
    left, right = np.array_split(picture, 2, axis=1)
    for side, colours in ((left, ["0072B2", "E69F00", "009E73"]), (right, ["0072B2", "D55E00"])):
        for colour in colours:
            assert near(side, [int(colour[k : k + 2], 16) for k in (0, 2, 4)]).sum() > 100


@pytest.mark.parametrize("row", ["1,0.1,0.1,0.1,,", "1,0.1,0.1,0.1,nan,nan"])
def test_a_run_of_one_epoch_without_validation_can_be_plotted(tmp_path, row):
    table = tmp_path / "results.csv"
    table.write_text(f"epoch,box_loss,obj_loss,cls_loss,map50,map\n{row}\n")
    plot_results(table, tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 5000


@pytest.mark.parametrize("text", [None, "", "epoch,map50\n", "a,b\n1,2\n"])
def test_a_table_without_epochs_is_an_error(tmp_path, text):
    table = tmp_path / "results.csv"
    if text is not None:
        table.write_text(text)
    with pytest.raises(TrainerError, match=r"results\.csv: no ") as caught:
        plot_results(table, tmp_path / "results.png")
    assert caught.value.hint
    assert not (tmp_path / "results.png").exists()


def test_predictions_are_enlarged_and_boxed_in_their_class_colour(tmp_path):
    page = np.full((160, 160, 3), 200, np.uint8)
    boxes = [[40, 60, 80, 120]]
    draw_predictions([(page, boxes, [0.9], [1]), (page, np.zeros((0, 4)), [], [])], ["cat", "dog"], tmp_path / "p.png")
    picture = cv2.imread(str(tmp_path / "p.png"))
    assert picture.shape[1] > 2 * 400
    ys, xs = np.nonzero(near(picture, class_colour(1)))
    scale = 420 / 160
    assert (xs.min(), xs.max()) == pytest.approx((10 + 40 * scale, 10 + 80 * scale), abs=40)  # the tag may be wider
    assert ys.max() == pytest.approx(10 + 120 * scale, abs=3)
    assert ys.min() < 10 + 60 * scale - 8  # the tag stands on the box
    tag = picture[ys.min() : ys.min() + 18, xs.min() : xs.min() + 60]
    assert near(tag, (255, 255, 255)).sum() > 20  # with text on it
    assert not near(picture, class_colour(0), within=25).any()


def test_pictures_of_different_shapes_fit_one_grid(tmp_path):
    shapes = [(480, 640), (640, 480), (32, 32), (1000, 200), (64, 160)]
    pictures = [(np.full((*shape, 3), 90, np.uint8), [[1, 1, 20, 20]], [0.5], [0]) for shape in shapes]
    draw_predictions(pictures, ["cat"], tmp_path / "p.jpg")
    assert cv2.imread(str(tmp_path / "p.jpg")).shape[2] == 3


def test_neighbouring_classes_have_different_colours():
    colours = np.array([class_colour(k) for k in range(10)])
    distance = np.abs(colours[:, None] - colours[None]).sum(2)
    assert distance[~np.eye(10, dtype=bool)].min() > 60
