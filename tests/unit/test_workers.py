"""The numbers of workers that `trainer bench workers` tries, and the one that it takes."""

from trainer.bench.workers import choose, next_to_try


def tried(rate_of: dict[int, float], most: int, waiting: float = 0.5) -> list[int]:
    """The numbers that are tried on a machine with such rates."""
    rates: dict[int, float] = {}
    while (workers := next_to_try(rates, waiting, most)) is not None:
        rates[workers] = rate_of[workers]
    return list(rates)


def test_more_are_tried_for_as_long_as_they_pay() -> None:
    assert tried({0: 10, 1: 12, 2: 24, 3: 36, 4: 36.5, 6: 36}, 32) == [0, 1, 2, 3, 4, 6]
    assert tried({0: 10, 1: 9, 2: 8}, 32) == [0, 1, 2]  # on a CPU they take the training's cores
    assert tried({0: 10, 1: 9, 2: 18, 3: 27, 4: 30}, 4) == [0, 1, 2, 3, 4]  # one worker alone may be slower than none
    assert tried({0: 10, 1: 12}, 1) == [0, 1]
    assert tried({0: 10}, 0) == [0]


def test_more_are_not_tried_where_there_is_nothing_to_wait_for() -> None:
    assert next_to_try({0: 10.0}, 0.01, 8) is None
    assert next_to_try({0: 10.0, 1: 20.0}, 0.01, 8) is None
    assert next_to_try({0: 10.0, 1: 20.0}, 0.2, 8) == 2


def test_of_those_that_are_alike_the_fewest_are_taken() -> None:
    assert choose({0: 48.5, 1: 50, 2: 49}) == 0
    assert choose({0: 40, 1: 50, 2: 51}) == 1
    assert choose({0: 10, 1: 9, 2: 8}) == 0
