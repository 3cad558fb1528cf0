import fcntl
import threading

from cluster import logs


def test_lines_come_once_and_whole_however_the_bytes_are_cut():
    reader = logs.Reader({"a": 0})
    whole = "eins\nzwölf\ndrei\n".encode()
    seen = []
    for at in range(len(whole)):
        assert reader.offsets["a"] == at
        seen += reader.lines({"a": whole[at : at + 1]})
    assert seen == [("a", "eins"), ("a", "zwölf"), ("a", "drei")]


def test_an_event_is_found_behind_a_ranks_prefix():
    assert logs.event('[1] ::cluster {"event":"ready","node":1}') == {"event": "ready", "node": 1}


def test_text_and_broken_events_are_text():
    assert logs.event("epoch 3") is None
    assert logs.event("::cluster {broken") is None
    assert logs.event("::cluster [1]") is None
    assert logs.event('::cluster {"event":["ready"]}') is None
    assert logs.event('::cluster {"event":"ready","time":"noon"}') is None


def test_a_number_that_is_none_is_zero():
    assert logs.number({"event": "progress", "loss": None, "step": 3}, "loss") == 0.0
    assert logs.number({"event": "progress", "loss": None, "step": 3}, "step") == 3.0


def test_of_two_that_copy_a_piece_of_a_log_the_later_adds_what_is_missing(tmp_path):
    copy = tmp_path / "a.log"
    copy.write_bytes(b"first ")
    other = threading.Thread(target=logs.append, args=(copy, 6, b"second third"))
    with copy.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other.start()
        other.join(0.3)  # it has opened the file and waits
        file.write(b"second")
    other.join()
    assert copy.read_bytes() == b"first second third"
