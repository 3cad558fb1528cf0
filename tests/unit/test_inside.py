"""Files of a run directory, while a job puts links in their place."""

import os
import threading

import pytest

from cluster.errors import ClusterError
from cluster.transport import inside


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with a file in a folder, beside a folder with a private file of the same name."""
    for folder, text in (("run/logs", "log"), ("away", "PRIVATE")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text(text)
    return tmp_path / "run"


@pytest.mark.parametrize("target", ["../../away/file", "{tmp}/away/file", "here/../../../away/file"])
def test_a_link_that_leads_out_is_neither_read_nor_written(run_dir, tmp_path, target):
    (run_dir / "logs/here").symlink_to(".")
    link = run_dir / "logs/link"
    link.symlink_to(target.format(tmp=tmp_path))
    for mode in ("rb", "wb", "ab", "xb"):
        with pytest.raises(OSError, match="leads out of"):
            inside.open_file(run_dir, "logs/link", mode)
    with pytest.raises(ClusterError, match="leads out of"):
        inside.check(link, run_dir)
    assert (tmp_path / "away/file").read_text() == "PRIVATE"


def test_a_link_within_the_run_directory_is_followed(run_dir):
    (run_dir / "newest").symlink_to("logs")
    (run_dir / "absolute").symlink_to(run_dir / "logs/file")
    for name in ("logs/file", "newest/file", "absolute", run_dir / "newest" / "file"):
        with inside.open_file(run_dir, name) as file:
            assert file.read() == b"log"
    with inside.open_file(run_dir, "newest/file", "ab") as file:
        file.write(b" more")
    assert (run_dir / "logs/file").read_text() == "log more"


def test_what_is_no_file_is_an_error_at_once(run_dir):
    os.mkfifo(run_dir / "fifo")
    (run_dir / "loop").symlink_to("loop")
    for name, error in (
        ("fifo", OSError),
        ("loop", OSError),
        ("logs", IsADirectoryError),
        ("no", FileNotFoundError),
    ):
        with pytest.raises(error):
            inside.open_file(run_dir, name)


def test_a_folder_that_becomes_a_link_at_any_moment_shows_nothing(run_dir, tmp_path):
    logs = run_dir / "logs"
    aside = run_dir / "aside"
    link = run_dir / "link"
    ends = threading.Event()
    link.symlink_to(tmp_path / "away")

    def swap():
        while not ends.is_set():
            logs.rename(aside)
            link.rename(logs)
            logs.rename(link)
            aside.rename(logs)

    thread = threading.Thread(target=swap)
    thread.start()
    found = set()
    try:
        for _ in range(3000):
            try:
                with inside.open_file(run_dir, "logs/file") as file:
                    found.add(file.read())
            except OSError as error:
                found.add(type(error))
    finally:
        ends.set()
        thread.join()
    assert b"log" in found
    assert b"PRIVATE" not in found
