import csv

import pytest

from cluster import scaling
from cluster.errors import UsageError
from cluster.scaling import Point


def told(rate, *, epochs=2, sync=0.1, seconds=10.0):
    """The events of a job whose first epoch is half as fast as the others."""
    events = [{"event": "ready", "node": 0, "time": 0.0}]
    for epoch in range(1, epochs + 1):
        slow = 2 if epoch == 1 else 1
        shares = {"data": 0.2, "sync": sync, "val": 0.25}
        event = {"event": "metric", "node": 0, "time": 1000.0 * epoch + 10, "epoch": epoch, "shares": shares}
        events.append({**event, "images_per_s": rate / slow, "seconds": seconds * slow})
    return events


def measured(rate, **options):
    found = scaling.measured(told(rate, **options))
    assert found is not None
    return found


def test_the_first_epoch_is_left_out_where_there_are_several():
    found = measured(100.0, epochs=3, sync=0.2)
    assert (found.images_per_s, found.epoch_s, found.train_s) == (100.0, 10.0, 7.5)
    assert (found.data_share, found.sync_share) == (0.2, 0.2)
    alone = measured(100.0, epochs=1)
    assert (alone.images_per_s, alone.epoch_s) == (50.0, 20.0)
    assert scaling.measured(told(100.0, epochs=0)) is None


def test_what_an_older_trainer_does_not_say_is_left_open():
    events = [{k: v for k, v in event.items() if k != "seconds"} for event in told(100.0)]
    found = scaling.measured(events)
    assert (found.images_per_s, found.epoch_s, found.train_s) == (100.0, None, None)
    one, two = scaling.rows({Point(1, 8): [found], Point(2, 8): [found]})
    assert (one.gain, two.gain) == (1.0, 1.0)
    assert "| bs | 1 node | 2 nodes | gain |" in scaling.thread_table([one, two])


def test_the_gain_is_the_middle_of_the_rounds_own_ratios():
    # the machine was twice as fast in the second round, and one more round was interrupted before its second point
    found = {
        Point(1, 8): [measured(100.0), measured(200.0), measured(110.0)],
        Point(2, 8): [measured(180.0), measured(370.0)],
    }
    one, two = scaling.rows(found)
    assert one.measured.images_per_s == 110.0
    assert two.gain == pytest.approx((1.8 + 1.85) / 2)
    assert two.efficiency == pytest.approx(two.gain / 2)


def test_gains_are_over_the_fewest_nodes_that_were_measured():
    two, four = scaling.rows({Point(2, 8): [measured(200.0)], Point(4, 8): [measured(300.0)]})
    assert (two.gain, two.efficiency, four.gain, four.efficiency) == (1.0, 1.0, 1.5, 0.75)


def test_a_point_that_failed_is_a_row_that_says_why_and_has_no_gain():
    found = {Point(1, 8): ["node-0: out of memory"], Point(2, 8): [measured(200.0)], Point(2, 16): ["gone"]}
    made = scaling.rows(found)
    assert [(row.failure, row.gain) for row in made] == [("node-0: out of memory", None), ("", None), ("gone", None)]
    assert scaling.failures(made) == ["1 node, batch 8: node-0: out of memory", "2 nodes, batch 32: gone"]
    assert "failed" in scaling.thread_table(made)
    assert scaling.detail_table(made, 1).count("failed") == 2


def test_the_tables_of_two_batches_in_the_threads_form():
    found = {
        Point(1, 16): [measured(100.0, seconds=2000)],
        Point(2, 16): [measured(150.0, seconds=1333.4)],
        Point(4, 16): [measured(320.0, seconds=625)],
        Point(1, 64): [measured(110.0, seconds=1800)],
        Point(2, 64): [measured(200.0, seconds=60.0)],
        Point(4, 64): ["gone"],
    }
    made = scaling.rows(found)
    assert scaling.thread_table(made).splitlines() == [
        "| bs | 1 node | 2 nodes | gain | 4 nodes | gain |",
        "|---:|-------:|--------:|-----:|--------:|-----:|",
        "| 16 |  25:00 |   16:40 | 1.50 |    7:49 | 3.20 |",
        "| 64 |  22:30 |  0:45.0 | 1.82 |  failed |    - |",
    ]
    line = scaling.detail_table(made, 2).splitlines()[3]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("2", "4", "32", "150.0", "22:13", "1.50", "75%", "20%", "10%")
    ]
    read = list(csv.DictReader(scaling.csv_text(scaling.records(made, 2)).splitlines()))
    assert [(row["nodes"], row["batch"], row["batch_per_node"]) for row in read[:3]] == [
        ("1", "16", "16"),
        ("2", "32", "16"),
        ("4", "64", "16"),
    ]
    assert (read[1]["gain"], read[5]["gain"], read[5]["failure"]) == ("1.5", "", "gone")


def test_the_batch_grows_with_the_nodes_unless_it_is_strong():
    assert [Point(n, 16).step_batch for n in (1, 2, 4)] == [16, 32, 64]
    assert [Point(n, 16, strong=True).step_batch for n in (1, 2, 4)] == [16, 16, 16]
    assert scaling.arguments_of(Point(2, 16), ["--data", "x.yaml"]) == [
        *("train", "--data", "x.yaml", "--epochs", "2", "--batch", "32")
    ]
    assert scaling.arguments_of(Point(1, 16), ["train", "--epochs=5"]) == ["train", "--epochs=5", "--batch", "16"]


def test_the_batches_are_those_of_the_option_or_of_the_trainers_arguments():
    assert scaling.batches("8,4", ["train"]) == ([4, 8], ["train"])
    assert scaling.batches("", ["train", "--batch", "24", "--noval"]) == ([24], ["train", "--noval"])
    assert scaling.batches("", ["train", "--batch-size=24"]) == ([24], ["train"])
    assert scaling.batches("", []) == ([16], [])
    for typed, arguments in (
        *(("8", ["--batch", "8"]), ("a", []), ("", ["--batch"]), ("0", []), ("8,8", [])),
        *(("²", []), ("", ["--batch", "²"])),
    ):
        with pytest.raises(UsageError, match="--batch"):
            scaling.batches(typed, arguments)


def test_what_the_arguments_say_for_an_option():
    said = ["--parallel=fsdp", "--grad-compress", "bf16", "--name", "last"]
    assert [scaling.said_to(said, f"--{name}") for name in ("parallel", "grad-compress", "stages")] == [
        *("fsdp", "bf16", "")
    ]
    assert scaling.said_to(["--parallel"], "--parallel") == ""


def test_all_numbers_of_nodes_that_are_tried_by_default():
    assert [scaling.doubled(most) for most in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]
