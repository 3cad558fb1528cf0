"""Awake time: suspensions of the launcher do not count."""

import pytest

from cluster.backends.awake_clock import RESUME_GRACE_S, AwakeTime


def tick_for(awake, seconds, monotonic=0.0, wall=0.0):
    """Tick each second; return both clocks at the end."""
    for _ in range(seconds):
        monotonic = monotonic + 1
        wall = wall + 1
        awake.tick(monotonic, wall)
    return monotonic, wall


@pytest.mark.parametrize(
    ("start", "ticks"),
    [
        pytest.param((0.0, 0.0), [(second, second) for second in range(1, 11)], id="every second"),
        pytest.param((0.0, 0.0), [(4.0, 4.0), (8.0, 8.0), (10.0, 10.0)], id="short gaps"),
        pytest.param(
            (0.0, 7200.0), [(1.0, 3600.0), (5.0, 3604.0), (10.0, 3609.0)], id="the wall clock is set back"
        ),
    ],
)
def test_time_while_the_launcher_runs_counts(start, ticks):
    awake = AwakeTime(*start)
    for tick in ticks:
        awake.tick(*tick)
    assert (awake.seconds, awake.suspensions) == (10, 0)


def test_neither_a_suspension_nor_the_grace_period_after_it_counts():
    for suspended in (
        (3600.0, 3600.0),
        (0.5, 3600.0),
    ):  # Ctrl-Z; a closed lid, which may stop the monotonic clock
        awake = AwakeTime(0.0, 0.0)
        monotonic, wall = tick_for(awake, 10)
        monotonic = monotonic + suspended[0]
        wall = wall + suspended[1]
        awake.tick(monotonic, wall)
        assert (awake.seconds, awake.suspensions) == (10, 1)
        monotonic, wall = tick_for(awake, int(RESUME_GRACE_S), monotonic, wall)
        assert awake.seconds == 10
        tick_for(awake, 5, monotonic, wall)
        assert (awake.seconds, awake.suspensions) == (15, 1)
