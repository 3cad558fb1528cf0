import pytest
import torch

from trainer.config import Hyp
from trainer.losses.detection import DetectionLoss, Positives, assign_level

ANCHORS = torch.tensor([[[2.0, 3.0], [4.0, 4.0], [40.0, 40.0]]])  # one level, grid units
GRID = 10


def positives(boxes: list[list[float]], anchor_t: float = 4.0, grid: tuple[int, int] = (GRID, GRID)) -> Positives:
    """`boxes` as [image, class, x, y, w, h], geometry in grid cells."""
    ny, nx = grid
    targets = torch.tensor(boxes).view(-1, 6)
    targets[:, 2:] /= torch.tensor([nx, ny, nx, ny])
    return assign_level(targets, ANCHORS[0], ny, nx, anchor_t)


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
def test_a_box_takes_its_cell_and_the_nearest_neighbours(x: float, y: float, expected: set[tuple[int, int]]) -> None:
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
        cell = torch.stack((level.column[k], level.row[k]))
        torch.testing.assert_close(level.box[k, :2] + cell, torch.tensor([5.3, 4.6]))
        torch.testing.assert_close(level.box[k, 2:], torch.tensor([3.0, 3.0]))
        assert level.anchor_wh[k].tolist() == ANCHORS[0, level.anchor[k]].tolist()


@pytest.mark.parametrize(("ratio", "matches"), [(3.99, True), (4.01, False), (1 / 3.99, True), (1 / 4.01, False)])
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
    loss = DetectionLoss(ANCHORS.repeat(2, 1, 1), (8, 16), 4, Hyp(), 160)
    boxes = [[0, 1, 0.54, 0.54, 0.4, 0.4], [0, 2, 0.53, 0.53, 0.4, 0.4], [1, 3, 0.53, 0.53, 0.4, 0.4]]
    found = loss.assign(torch.tensor(boxes), 2, 160, 160)
    assert found.numbers == [9, 18]
    assert found.counts.tolist() == [2, 9, 18]
    image, anchor, row, column, cls = (t[found.own].tolist() for t in found.positives[:5])
    assert set(cls) == {2, 3}  # another image's box takes nothing away
    slots = list(zip(image, row, column, anchor, strict=True))
    first = [((i * 20 + y) * 20 + x) * 3 + a for i, y, x, a in slots[:6]]
    second = [2 * 20 * 20 * 3 + ((i * 10 + y) * 10 + x) * 3 + a for i, y, x, a in slots[6:]]
    assert len(set(first)) == 6
    assert len(set(second)) == 12
    assert found.slot.tolist() == first + second


def test_a_box_without_width_matches_nothing() -> None:
    assert len(positives([[0, 0, 5.3, 5.3, 0, 4]]).image) == 0
