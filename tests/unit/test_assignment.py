import numpy as np
import pytest

from trainer.losses.anchored import AnchorTargets, Positives, assign_level

ANCHORS = np.array([[[2, 3], [4, 4], [40, 40]]], np.float32)  # one level, grid units
GRID = 10


def positives(
    boxes: list[list[float]], anchor_t: float = 4.0, grid: tuple[int, int] = (GRID, GRID)
) -> Positives:
    """`boxes` as [image, class, x, y, w, h], geometry in grid cells."""
    ny, nx = grid
    labels = np.array(boxes, np.float32).reshape(-1, 6)
    labels[:, 2:] /= np.array([nx, ny, nx, ny], np.float32)
    return assign_level(labels, ANCHORS[0], ny, nx, anchor_t)


def cells(level: Positives, anchor: int = 1) -> set[tuple[int, int]]:
    mine = level.anchor == anchor
    return set(zip(level.column[mine].tolist(), level.row[mine].tolist(), strict=True))


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (5.3, 5.3, {(5, 5), (4, 5), (5, 4)}),  # left and up
        (5.7, 5.7, {(5, 5), (6, 5), (5, 6)}),  # right and down
        (5.3, 5.7, {(5, 5), (4, 5), (5, 6)}),
        (0.3, 5.3, {(0, 5), (0, 4)}),  # no column left of the first
        (9.7, 9.7, {(9, 9)}),  # nothing right of the last or below
        (5.5, 5.5, {(5, 5)}),  # the exact middle has no nearer side
        (10.0, 5.3, {(9, 5), (9, 4)}),  # on the border: clamped to the map
    ],
)
def test_a_box_takes_its_cell_and_the_nearest_neighbours(
    x: float, y: float, expected: set[tuple[int, int]]
) -> None:
    level = positives([[0, 0, x, y, 4, 4]])
    assert cells(level) == expected
    # No cell twice, but on the border, where its own is clamped onto the neighbour.
    assert int((level.anchor == 1).sum()) == len(expected) + (x == GRID)


def test_an_interior_box_gives_three_cells_for_each_matching_anchor() -> None:
    level = positives([[2, 7, 5.3, 4.6, 3, 3]])
    assert sorted(level.anchor.tolist()) == [0, 0, 0, 1, 1, 1]  # the huge anchor does not match
    assert set(level.image.tolist()) == {2}
    assert set(level.cls.tolist()) == {7}
    for k in range(6):
        cell = np.array((level.column[k], level.row[k]))
        np.testing.assert_allclose(level.box[k, :2] + cell, [5.3, 4.6], rtol=1e-6)
        np.testing.assert_allclose(level.box[k, 2:], [3, 3], rtol=1e-6)
        assert level.anchor_wh[k].tolist() == ANCHORS[0, level.anchor[k]].tolist()


@pytest.mark.parametrize(
    ("ratio", "matches"), [(3.99, True), (4.01, False), (1 / 3.99, True), (1 / 4.01, False)]
)
@pytest.mark.parametrize("side", [0, 1])
def test_an_anchor_matches_below_a_ratio_of_four(ratio: float, matches: bool, side: int) -> None:
    wh = [4.0, 4.0]
    wh[side] *= ratio
    assert bool(cells(positives([[0, 0, 5.3, 5.3, *wh]]))) is matches


def test_a_image_that_is_not_square_uses_both_sides() -> None:
    level = positives([[0, 0, 15.3, 2.3, 4, 4]], grid=(5, 20))
    assert cells(level) == {(15, 2), (14, 2), (15, 1)}


def test_the_last_box_on_a_cell_owns_it() -> None:
    """Levels of 20 x 20 and 10 x 10 cells. The boxes are 8 cells wide on the first, and match one of its anchors."""
    assign = AnchorTargets(ANCHORS.repeat(2, 0), (8, 16), 4.0)
    boxes = [[0, 1, 0.54, 0.54, 0.4, 0.4], [0, 2, 0.53, 0.53, 0.4, 0.4], [1, 3, 0.53, 0.53, 0.4, 0.4]]
    found = assign(np.array(boxes, np.float32), 2, 160, 160)
    assert found["counts"].tolist() == [2, 9, 18]
    assert found["value"][..., 6].sum(1).tolist() == [9, 18]
    end = 2 * 3 * (20 * 20 + 10 * 10)
    for level, before, number in ((0, 0, 6), (1, 2 * 20 * 20 * 3, 12)):
        cell, decides, cls = found["index"][level].T
        owns = decides < end
        assert set(cls[owns].tolist()) == {2, 3}  # another image's box takes nothing away
        assert (decides[owns] - cell[owns]).unique().tolist() == [before]
        assert len(decides[owns].unique()) == int(owns.sum()) == number
        assert decides[~owns].unique().tolist() == [end]


def test_a_box_without_width_matches_nothing() -> None:
    assert len(positives([[0, 0, 5.3, 5.3, 0, 4]]).image) == 0
