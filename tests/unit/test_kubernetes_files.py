"""Files of pods: tar archives through a process. A program in the place of kubectl runs the command on this machine."""

import os
import sys
import tarfile

import pytest

from cluster.backends.kubernetes import KubernetesBackend, files
from cluster.backends.kubernetes.kubectl import Kubectl
from cluster.errors import ClusterError, UnreachableError
from cluster.spec.model import Job, Machine, Queue

#: Runs what follows `--`; the volume is a folder here. With CUT, the stream ends after that many bytes, the code is 0.
PROGRAM = """#!{python}
import os, subprocess, sys
words = [word.replace("/inputs", {inputs!r}) for word in sys.argv[sys.argv.index("--") + 1 :]]
cut = os.environ.get("CUT")
if cut is None:
    os.execvp(words[0], words)
out = subprocess.run(words, stdin=sys.stdin, stdout=subprocess.PIPE).stdout
sys.stdout.buffer.write(out[: int(cut)])
"""


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    inputs = tmp_path / "inputs"
    folder.mkdir()
    inputs.mkdir()
    program = folder / "kubectl"
    program.write_text(PROGRAM.format(python=sys.executable, inputs=str(inputs)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Kubectl()


@pytest.fixture
def source(tmp_path):
    """A folder with a file, a link, a file in a folder, and names that mean something to the archives."""
    folder = tmp_path / "source"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "a.txt").write_text("a")
    (folder / "END").write_text("end")
    (folder / "ERROR").write_text("error")
    (folder / "link").symlink_to("below/a.txt")
    (folder / "large").write_bytes(os.urandom(200_000))
    return folder


def tree(folder):
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def fetch(kubectl, source, target, **options):
    return files.fetch(kubectl, "pod", sys.executable, str(source), str(target), **options)


def send(kubectl, parts, sent=lambda _: None):
    return files.send(kubectl, "pod", sys.executable, parts, sent)


def test_a_fetched_folder_is_the_same_and_is_not_fetched_twice(kubectl, source, tmp_path):
    assert fetch(kubectl, source, tmp_path / "here") == 5
    assert tree(tmp_path / "here") == tree(source)
    times = [(folder / "large").stat().st_mtime_ns for folder in (source, tmp_path / "here")]
    assert times[0] == times[1]
    assert fetch(kubectl, source, tmp_path / "here") == 0
    (source / "below" / "a.txt").write_text("b")
    assert fetch(kubectl, source, tmp_path / "here") == 1
    assert (tmp_path / "here" / "below" / "a.txt").read_text() == "b"


def test_excluded_files_are_not_fetched(kubectl, source, tmp_path):
    (source / "attempt-1").mkdir()
    (source / "attempt-1" / "grace").write_text("3")
    (source / "node.tmp").write_text("")
    fetch(kubectl, source, tmp_path / "here", excluded=("*.tmp", "/below", "/attempt-*/grace"))
    assert set(tree(tmp_path / "here")) == {"END", "ERROR", "large", "link"}


def test_only_what_differs_from_the_folder_that_was_sent_comes_back(kubectl, source, tmp_path):
    sent = tmp_path / "sent"
    fetch(kubectl, source, sent)
    (source / "new.txt").write_text("new")
    assert fetch(kubectl, source, tmp_path / "here", compare=str(sent)) == 1
    assert set(tree(tmp_path / "here")) == {"new.txt"}
    changed_at = (source / "new.txt").stat().st_ctime
    assert fetch(kubectl, source, tmp_path / "since", since=changed_at + 1) == 0


def test_files_that_were_sent_and_not_changed_do_not_come_back(kubectl, source, tmp_path):
    """A number for a time in tarfile is not exact to the nanosecond."""
    for nth in range(20):
        (source / f"{nth}.txt").touch()
        os.utime(source / f"{nth}.txt", ns=(0, 1_795_734_836_123_456_700 + nth))
    send(kubectl, [files.Part(str(source), "data")])
    assert fetch(kubectl, tmp_path / "inputs" / "data", tmp_path / "here", compare=str(source)) == 0


def test_a_pods_user_gets_the_files_with_their_modes_and_others_may_not_write(kubectl, source, tmp_path):
    """The init container that unpacks them runs as the user of the pod, who owns them."""
    modes = {
        "below/a.txt": (0o400, 0o600),
        "END": (0o777, 0o775),
        "ERROR": (0o644, 0o644),
        "below": (0o500, 0o700),
    }
    for name, (mode, _) in modes.items():
        (source / name).chmod(mode)
    send(kubectl, [files.Part(str(source), "data")])
    sent = tmp_path / "inputs" / "data"
    assert {name: (sent / name).stat().st_mode & 0o777 for name in modes} == {
        name: to for name, (_, to) in modes.items()
    }


def test_a_kept_folder_stays_as_the_attempt_before_has_left_it(kubectl, source, tmp_path):
    kept = tmp_path / "runs" / "workdir"
    archive = tmp_path / "kept.tar"
    names = ["below/a.txt", "END", "link"]
    parts = [
        files.keep(str(source), names, ".workdir", archive),
        files.Part(str(source / "large"), "my data/large"),
    ]

    def send(launch, *fill):
        words = (".workdir", str(kept), launch, *fill)
        return files.send(kubectl, "pod", sys.executable, parts, lambda _: None, words)

    def seen():
        return {name: tree(kept).get(name) for name in ("END", "link", "snapshot.pt")}

    assert send("first") == 1  # another pod than the first
    assert not kept.exists()
    assert send("first", "fill") == 4
    assert seen() == {"END": b"end", "link": source.joinpath("link").readlink(), "snapshot.pt": None}
    assert (
        (kept / ".clusterctl-sent").read_text() == (tmp_path / "inputs" / ".complete").read_text() == "first"
    )
    (kept / "snapshot.pt").write_bytes(b"1")
    (kept / "END").write_bytes(b"changed")
    assert send("first", "fill") == 1
    assert seen() == {"END": b"changed", "link": source.joinpath("link").readlink(), "snapshot.pt": b"1"}
    assert fetch(kubectl, kept, tmp_path / "here", since=2**40) == 2  # what has changed since it was sent
    assert set(tree(tmp_path / "here")) == {"END", "snapshot.pt"}
    assert send("second", "fill") == 4  # a new job with this name
    assert seen()["snapshot.pt"] is None
    assert (tmp_path / "runs" / "workdir.before" / "snapshot.pt").read_bytes() == b"1"


def test_a_kept_folder_whose_files_did_not_all_arrive_gets_them_again(kubectl, source, tmp_path):
    kept = tmp_path / "runs" / "workdir"
    kept.mkdir(parents=True)
    (kept / "END").write_text("half of")  # what the attempt before had got, when its pod was lost
    parts = [files.keep(str(source), ["END"], ".workdir", tmp_path / "kept.tar")]
    words = (".workdir", str(kept), "first", "fill")
    assert files.send(kubectl, "pod", sys.executable, parts, lambda _: None, words) == 1
    assert (kept / "END").read_text() == "end"


def test_a_stream_that_ends_early_is_an_error_though_kubectl_ends_with_zero(
    kubectl, source, tmp_path, monkeypatch
):
    for cut in (0, 512, 100_000, 204_800):
        monkeypatch.setenv("CUT", str(cut))
        with pytest.raises(UnreachableError, match="connection broke"):
            fetch(kubectl, source, tmp_path / "here")
    kept = tree(tmp_path / "here")
    assert kept.items() <= tree(source).items()  # only complete files
    monkeypatch.delenv("CUT")
    fetch(kubectl, source, tmp_path / "here")
    assert tree(tmp_path / "here") == tree(source)


def test_links_that_lead_out_are_left_out_and_named(kubectl, source, tmp_path):
    (source / "below" / "out").symlink_to("/etc/hostname")
    with pytest.raises(ClusterError, match="below/out leads out of the folder"):
        fetch(kubectl, source, tmp_path / "here")
    assert set(tree(tmp_path / "here")) == {"END", "ERROR", "large", "link", "below/a.txt"}


def test_files_that_were_not_asked_for_are_not_taken(kubectl, source, tmp_path, monkeypatch):
    """A container may run another program than the one that was sent to it."""
    for name in ("inputs.json", "job.yaml", "below/job.yaml"):
        (source / name).write_text("hostile")
    text = files.scripts.text
    monkeypatch.setattr(files.scripts, "text", lambda name: text(name).replace('wanted["excluded"]', "()"))
    here = tmp_path / "here"
    fetch(kubectl, source, here, excluded=["/inputs.json", "/job.yaml", "large"])
    assert set(tree(here)) == {"END", "ERROR", "link", "below/a.txt", "below/job.yaml"}


def test_a_target_that_has_become_a_link_is_not_written(kubectl, source, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ranks").symlink_to("../outside")
    with pytest.raises(ClusterError, match="ranks leads out of"):
        fetch(kubectl, source, tmp_path / "run" / "ranks", run_dir=str(tmp_path / "run"))
    assert not tree(tmp_path / "outside")


def test_a_folder_that_does_not_exist_has_no_files(kubectl, tmp_path):
    assert fetch(kubectl, tmp_path / "nothing", tmp_path / "here") == 0


def test_sent_files_arrive_as_they_were_kept(kubectl, source, tmp_path):
    before = tree(source)
    kept = files.keep(str(source), ["below/a.txt", "END"], "code", tmp_path / "kept.tar")
    (source / "END").write_text("changed")
    counts = []
    assert send(
        kubectl,
        [kept, files.Part(str(source), "data"), files.Part(str(source / "large"), "one")],
        counts.append,
    )
    inputs = tmp_path / "inputs"
    assert tree(inputs / "code") == {name: before[name] for name in ("below/a.txt", "END")}
    assert tree(inputs / "data") == tree(source)
    assert (inputs / "one").read_bytes() == before["large"]
    assert (inputs / ".complete").exists()
    assert counts == sorted(counts)
    assert counts[-1] > 2 * len(before["large"])
    assert send(kubectl, [kept])  # again, after a connection that broke


def test_files_that_cannot_be_sent_leave_the_container_waiting(kubectl, source, tmp_path, monkeypatch):
    with pytest.raises(ClusterError, match=r"kept\.tar"):
        send(kubectl, [files.Part(str(tmp_path / "kept.tar"), is_archive=True)])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="kubectl is not installed"):
        send(kubectl, [files.Part(str(source), "data")])
    assert not (tmp_path / "inputs" / ".complete").exists()


def test_a_restart_gets_the_working_directory_as_it_was_at_the_launch(tmp_path):
    code = tmp_path / "my code"
    code.mkdir()
    queue = Queue(Machine("kubernetes", "", run_dir="/runs"), {"runs": {"claim": "runs"}})
    fields = {"workdir": str(code), "copies_workdir": True, "queue": queue, "image": "trainer:0.1"}
    job = Job("x", ("train.py",), 1, 1, str(tmp_path / "runs"), **fields)
    for attempt, text in ((1, "launched"), (2, "edited since")):
        (code / "train.py").write_text(text)
        plan = KubernetesBackend().plan(job, attempt=attempt, port=1)
        KubernetesBackend().send_files(job, plan, {"train.py": 1}, (), lambda *_: None)
        with tarfile.open(tmp_path / "runs" / "x" / "inputs.tar") as archive:
            assert archive.extractfile(".workdir/train.py").read() == b"launched"
