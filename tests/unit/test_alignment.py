import pytest
import torch

from trainer.config import Hyp
from trainer.losses import aligned
from trainer.losses.aligned import ONE_TO_ONE, TOP, AlignedLoss, Candidates, Matched, Matching, candidates
from trainer.losses.anchored import ciou

SIDE = 64  # 8 x 8, 4 x 4 and 2 x 2 points


def listed(boxes: list[list[float]], images: int = 1) -> Candidates:
    """`boxes` as [image, class, x1, y1, x2, y2] in pixels. Leaves out the rows that pad."""
    t = torch.tensor(boxes).view(-1, 6)
    labels = torch.cat((t[:, :2], (t[:, 2:4] + t[:, 4:]) / 2 / SIDE, (t[:, 4:] - t[:, 2:4]) / SIDE), 1)
    loss = AlignedLoss((8, 16, 32), 16, Hyp())
    targets = loss.assigner(None)(labels.numpy(), images, SIDE, SIDE)
    assert targets["box"][:, 4].tolist() == [1] * len(t) + [0]
    kept = {name: values if name == "counts" else values[:-1] for name, values in targets.items()}
    return candidates(kept)


def places(found: Candidates, box: int = 0) -> list[tuple[float, ...]]:
    """(stride, x, y) of a box's points."""
    return [(stride, x, y) for x, y, stride in found.at[found.box == box].tolist()]


def test_the_points_of_a_box_are_those_strictly_inside() -> None:
    finest = [(8, 12, 12), (8, 20, 12), (8, 12, 20), (8, 20, 20)]
    assert places(listed([[0, 0, 4, 4, 21, 21]])) == [*finest, (16, 8, 8), (32, 16, 16)]
    # (4, 4) and (20, 20) lie on the border, and are no points of the box; half a pixel more and they are.
    assert places(listed([[0, 0, 4, 4, 20, 20]])) == [(8, 12, 12), (16, 8, 8), (32, 16, 16)]
    assert len(places(listed([[0, 0, 3.5, 3.5, 20.5, 20.5]]))) == 3 * 3 + 1 + 1
    assert len(places(listed([[0, 0, -20, -20, 90, 90]]))) == 64 + 16 + 4  # beyond the image there are none


def test_against_every_pair_of_many_boxes() -> None:
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(40, 2, generator=generator) * 60
    size = torch.rand(40, 2, generator=generator) * 40
    boxes = torch.cat((torch.zeros(40, 2), corner, corner + size), 1)
    found = listed(boxes.tolist())
    points = torch.tensor(
        [(x + s / 2, y + s / 2) for s in (8, 16, 32) for y in range(0, SIDE, s) for x in range(0, SIDE, s)]
    )
    centre, half = corner + size / 2, (size / 2).clamp(min=8)  # small sides are widened
    inside = (
        ((points[None] > (centre - half)[:, None]) & (points[None] < (centre + half)[:, None]))
        .all(2)
        .nonzero()
    )
    assert torch.equal(torch.stack((found.box, found.point), 1), inside)  # sorted by box, then by point
    assert torch.equal(found.at[:, :2], points[found.point])
    boxes_of_pairs = inside[:, 0].tolist()
    assert found.top.tolist() == [
        k for k, box in enumerate(boxes_of_pairs) if boxes_of_pairs[:k].count(box) < TOP
    ]


def match(found: Candidates, scores: torch.Tensor, boxes: torch.Tensor) -> Matched:
    """Return the pairs that have a weight."""
    pairs = aligned.match(found, scores, boxes, int(found.image.max()) + 1, 64 + 16 + 4)
    return Matched(*(values[pairs.weight > 0] for values in pairs))


def perfect(found: Candidates) -> torch.Tensor:
    return found.targets[found.box].clone()


def at(matched: Matched) -> dict[tuple[float, ...], int]:
    """(stride, x, y) -> class."""
    where = [(stride, x, y) for x, y, stride in matched.at.tolist()]
    assert len(set(zip(matched.image.tolist(), where, strict=True))) == len(where)
    return dict(zip(where, matched.cls.tolist(), strict=True))


def test_the_ten_best_aligned_points_answer_for_a_box() -> None:
    found = listed([[0, 2, 0, 0, 64, 64]])
    scores = torch.linspace(0.1, 0.9, len(found.box))
    matched = match(found, scores, perfect(found))
    assert sorted(matched.point.tolist()) == list(range(74, 84))
    assert set(matched.cls.tolist()) == {2}
    # The best has weight 1, as its box is perfect; the others by the root of their score.
    order = matched.point.argsort()
    expected = (scores[74:] / scores[-1]) ** 0.5
    torch.testing.assert_close(matched.weight[order], expected, rtol=1e-4, atol=0)


def test_overlap_counts_by_its_sixth_power() -> None:
    found = listed([[0, 0, 4, 4, 21, 13]])
    boxes = perfect(found)
    boxes[0, 2] *= 0.8
    overlap = ciou(boxes, perfect(found))
    scores = torch.tensor([0.9, *[0.5, 0.4, 0.3, 0.2, 0.1][: len(found.box) - 1]])
    matched = match(found, scores, boxes)
    alignment = scores**0.5 * overlap**6
    assert matched.point.tolist() == [found.point[i] for i in alignment.argsort(descending=True).tolist()]
    weights = dict(zip(matched.point.tolist(), matched.weight.tolist(), strict=True))
    for point, value in zip(found.point.tolist(), alignment.tolist(), strict=True):
        assert weights[point] == pytest.approx(
            value / alignment.max().item() * overlap.max().item(), rel=1e-5
        )


def test_a_point_that_two_boxes_choose_goes_to_the_larger_overlap() -> None:
    found = listed([[0, 0, 4, 4, 21, 13], [0, 1, 5, 5, 30, 13]])
    assert len(found.box) == 6 + 9
    boxes = perfect(found)
    boxes[found.box == 0] *= torch.tensor([1, 1, 0.9, 1])  # box 1 is met exactly, box 0 nearly
    scores = torch.full((15,), 0.01)
    scores[found.box == 0] = 0.9  # a better alignment does not help
    owners = at(match(found, scores, boxes))
    assert owners == dict.fromkeys(places(found, 1), 1)
    # A box that another leaves nothing has no weight; a twin in another image keeps its own.
    found = listed([[0, 0, 4, 4, 21, 13], [0, 1, 4, 4, 21, 13], [1, 2, 4, 4, 21, 13]], images=2)
    matched = match(found, torch.full((18,), 0.5), perfect(found))
    assert (
        sorted(zip(matched.image.tolist(), matched.cls.tolist(), strict=True)) == [(0, 0)] * 6 + [(1, 2)] * 6
    )
    torch.testing.assert_close(matched.weight, torch.ones(12))


def test_a_prediction_that_misses_the_box_is_not_chosen() -> None:
    found = listed([[0, 0, 4, 4, 21, 13]])
    boxes = perfect(found)
    boxes[1:, 0] += 500
    assert match(found, torch.full((6,), 0.5), boxes).point.tolist() == [found.point[0]]
    boxes[0, 0] += 500
    assert len(match(found, torch.full((6,), 0.5), boxes).weight) == 0


def test_a_box_smaller_than_a_cell_has_candidates() -> None:
    """A side counts as at least 16 px, so four points of stride 8 are inside, and one of stride 16."""
    for side in (3, 12, 15.9):
        found = listed([[0, 1, 25 - side / 2, 25 - side / 2, 25 + side / 2, 25 + side / 2]])
        assert places(found) == [(8, 20, 20), (8, 28, 20), (8, 20, 28), (8, 28, 28), (16, 24, 24)]
        assert found.targets[0].tolist() == pytest.approx([25, 25, side, side])


def test_a_contested_point_goes_to_the_largest_overlap_of_all_whose_candidate_it_is() -> None:
    """The third box did not choose the point, whose class is wrong for it, but is exactly the predicted one."""
    found = listed([[0, 0, 12, 12, 52, 52], [0, 1, 14, 12, 54, 52], [0, 2, 13, 12, 53, 52]])
    contested = (found.at == torch.tensor([48.0, 48.0, 32.0])).all(1)
    assert found.box[contested].tolist() == [0, 1, 2]
    boxes = torch.where(contested[:, None], found.targets[2], perfect(found) + torch.tensor([3.0, 0, 0, 0]))
    scores = torch.where(contested, torch.tensor([0.9, 0.9, 1e-20])[found.box], 0.5)
    assert at(match(found, scores, boxes))[32, 48, 48] == 2


def test_a_box_that_is_hardly_found_counts_less() -> None:
    """The guard against a division by zero decides: its alignment is 1e-9 too."""
    found = listed([[0, 0, 4, 4, 21, 21]])
    boxes = perfect(found)
    boxes[:, 0] += 5
    overlap = ciou(boxes[:1], perfect(found)[:1]).item()
    score = (1e-9 / overlap**6) ** 2
    matched = match(found, torch.full((6,), score), boxes)
    torch.testing.assert_close(matched.weight, torch.full((6,), overlap / 2), rtol=1e-3, atol=0)


def test_one_to_one_chooses_among_the_seven_best_points_of_a_box() -> None:
    """The second box is predicted exactly, and takes the seven points that the first one likes best."""
    found = listed([[0, 0, 0, 0, 64, 64], [0, 1, 0, 0, 64, 64]])
    boxes = perfect(found)
    boxes[found.box == 0] *= torch.tensor([1, 1, 0.9, 1])
    scores = torch.linspace(0.9, 0.1, 84).repeat(2)
    scores[(found.box == 1) & (found.point >= 7) & (found.point < 10)] = 0.01
    for choice, expected in ((Matching(10, once=True), [(0, 7), (1, 0)]), (ONE_TO_ONE, [(1, 0)])):
        pairs = aligned.match(found, scores, boxes, 1, 84, choice)
        kept = pairs.weight > 0
        assert sorted(zip(pairs.cls[kept].tolist(), pairs.point[kept].tolist(), strict=True)) == expected
