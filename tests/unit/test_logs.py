import fcntl
import threading

import pytest

from cluster import logs


def test_lines_come_once_and_whole_however_the_bytes_are_cut():
    reader = logs.Reader({"a": 0})
    whole = "eins\nzwölf\ndrei\n".encode()
    seen = []
    for at in range(len(whole)):
        assert reader.offsets["a"] == at
        seen += reader.lines({"a": whole[at : at + 1]})
    assert seen == [("a", "eins"), ("a", "zwölf"), ("a", "drei")]


def test_an_event_is_found_behind_torchruns_prefix():
    assert logs.event('[default0]:::cluster {"event":"ready","node":1}') == {"event": "ready", "node": 1}


def test_text_and_broken_events_are_text():
    assert logs.event("epoch 3") is None
    assert logs.event("::cluster {broken") is None
    assert logs.event("::cluster [1]") is None
    assert logs.event('::cluster {"event":["ready"]}') is None
    assert logs.event('::cluster {"event":"ready","time":"noon"}') is None


def test_a_number_that_is_none_is_zero():
    assert logs.number({"event": "progress", "loss": None, "step": 3}, "loss") == 0.0
    assert logs.number({"event": "progress", "loss": None, "step": 3}, "step") == 3.0


RESET = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:3216: "
    "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)


@pytest.mark.parametrize(
    ("line", "noticed"),
    [
        ("[rank0]: Traceback (most recent call last):", None),
        ("[rank0]:     work.wait()", None),
        ("tick 1", None),
        (f"[rank0]: {RESET}", True),
        ("[1] [rank1]: torch.distributed.DistBackendError: NCCL error: ncclRemoteError: ", True),
        ("[1] [rank1]: ValueError: this rank was told to fail", False),
        ("[rank1]: ConnectionResetError: [Errno 104] Connection reset by peer", False),
    ],
)
def test_a_rank_that_lost_others_has_only_noticed_unless_it_raised_something_else(line, noticed):
    assert logs.noticed(line) is noticed


def test_only_other_ranks_keep_a_prefix():
    assert logs.text("[default0]:loss 1") == ("loss 1", True)
    assert logs.text("[default3]:loss 1") == ("[3] loss 1", True)
    assert logs.text("[W1121] warning") == ("[W1121] warning", False)


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        ("  traceback : Signal 9 (SIGKILL) received by PID 4711", "SIGKILL"),
        ("  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html", ""),
        ("Signal 9 (SIGKILL) received by PID 4711", ""),
    ],
)
def test_torchruns_word_for_a_rank_that_a_signal_ended(line, signal):
    assert logs.signal_of(line) == signal


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
