import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console

from cluster.agent.app.node_agent.events import event, read
from cluster.backends import BACKENDS
from cluster.cli import display, follow
from cluster.cli.console import console
from cluster.spec import node_status, status
from cluster.spec.model import Job, JobRecord
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import Failure, StalledRank
from cluster.store import JobStore
from cluster.supervisor import hints, job_state, report, supervisor
from cluster.supervisor.job_state import fold

PLAN = BACKENDS["compose"].plan(Job("job", ("x.py",), 2, 1, "/home/ann/runs"), attempt=1, port=20000)


def view(*events, exits=(137, 1)):
    ends = [
        NodeStatus(f"node-{rank}", "exited", code, ended_at=160.0 + rank) for rank, code in enumerate(exits)
    ]
    return fold(job_state.start(PLAN, 9.0), ends, list(map(event, events)), 200.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.04, "0.0 s"), (9.84, "9.8 s"), (42.4, "42 s"), (151.0, "2 min 31 s"), (11_100.0, "3 h 05 min")],
)
def test_seconds(value, words):
    assert report.seconds(value) == words


def test_done_has_duration_scores_and_the_local_path_of_the_checkpoint():
    done = {"event": "done", "map50": 0.95, "map": 0.7449, "best": "/runs/job/best.pt"}
    seen = view(done, exits=(0, 0))
    assert (
        report.done(seen, PLAN, "/home/ann", 9.0)
        == "done in 2 min 32 s   mAP50 0.950   mAP50-95 0.745   runs/job/best.pt"
    )
    assert report.done(seen, PLAN, "/elsewhere", 9.0).endswith("   /home/ann/runs/job/best.pt")
    assert report.done(view(exits=(0, 0)), PLAN, "/home/ann", 9.0) == "done in 2 min 32 s   runs/job"


def test_done_counts_from_the_launch_and_names_the_last_attempts_time():
    second = replace(PLAN, attempt=2)
    assert report.done(view(exits=(0, 0)), second, "/home/ann", -51.0) == (
        "done in 3 min 32 s (attempt 2: 2 min 32 s)   runs/job"
    )


def test_the_table_says_since_when_a_node_prints_nothing():
    said = {"phase": "running", "heartbeat": 1000.0, "output_at": 400.0}
    quiet = node_status.from_agent("node-0", status.parse(json.dumps(said)))
    talks = node_status.from_agent("node-1", status.parse(json.dumps({**said, "output_at": 990.0})))
    ready = [event({"event": "ready", "node": rank, "time": 20.0}) for rank in (0, 1)]
    seen = fold(job_state.start(PLAN, 9.0), [quiet, talks], ready, 200.0)
    out = Console(record=True, width=120)
    out.print(display.node_table(seen, PLAN, 200.0))
    first, second = out.export_text().splitlines()[1:]
    assert first.split()[:5] == ["node-0", "ready", "3", "min", "00"]
    assert first.rstrip().endswith("last output 10 min 00 s ago")
    assert "last output" not in second


def test_a_killed_node_is_the_cause_with_its_progress():
    progress = {"event": "progress", "node": 0, "epoch": 2, "step": 7, "steps": 63}
    seen = view(progress)
    assert report.cause(seen, "failed") == "node-0: exit 137 (killed)"
    assert report.last_lines(seen, "failed", {"node-0": [], "node-1": ["echo"]}) == [
        "  node-0 | (printed nothing; last progress: epoch 2, step 7/63)"
    ]
    assert report.exit_code(seen, "failed") == 1


def failing_view(failure, exits):
    ends = [NodeStatus(f"node-{rank}", "exited", code, ended_at=160.0) for rank, code in enumerate(exits)]
    ends[failure["rank"]] = replace(ends[failure["rank"]], failure=read(Failure, failure))
    return fold(job_state.start(PLAN, 9.0), ends, [], 200.0)


FAILURE = {
    "rank": 1,
    "local_rank": 0,
    "time": 100.0,
    "error": "boom",
    "hint": "",
    "secondary": False,
    "others": [],
}


def test_bad_input_is_one_line_with_a_hint_and_exit_code_2():
    seen = failing_view({**FAILURE, "error": "--batch 1: too small", "hint": "2"}, (0, 2))
    assert report.cause(seen, "failed") == "node-1: rank 1: --batch 1: too small"
    assert report.last_lines(seen, "failed", {"node-0": ["x"], "node-1": ["error: ..."]}) == ["hint: 2"]
    assert report.exit_code(seen, "failed") == 2


def test_the_lines_of_the_failed_rank_precede_other_failures():
    others = [{"rank": 0, "error": "RuntimeError: " + 200 * "x"}]
    seen = failing_view({**FAILURE, "local_rank": 1, "others": others}, (0, 1))
    tail = ["[1] epoch 1", "epoch 1", "agent: rank 1 failed first: boom", "[1] boom", "lost a peer"]
    lines = report.last_lines(seen, "failed", {"node-0": [], "node-1": tail})
    assert lines[:2] == ["  node-1 | epoch 1", "  node-1 | boom"]
    assert [
        line.startswith("  then rank 0: RuntimeError: xxx") and len(line) < 120 for line in lines[2:]
    ] == [True]


def test_a_silent_machine_is_the_cause_of_secondary_failures_only():
    for secondary, cause in ((False, "node-1: rank 1: boom"), (True, "node-0: no sign of life for 3 s")):
        failed = NodeStatus("node-1", "exited", 1, failure=read(Failure, {**FAILURE, "secondary": secondary}))
        silent = NodeStatus("node-0", "starting", silent="no sign of life for 3 s")
        seen = fold(job_state.start(PLAN, 9.0), [silent, failed], [], 200.0)
        assert report.cause(seen, "failed") == cause


def test_late_names_the_missing_nodes():
    joining = event({"event": "joining", "node": 0, "reachable": True, "listening": True, "master": "m:1"})
    seen = fold(
        job_state.start(PLAN, 0.0), [NodeStatus(f"node-{r}", "starting") for r in (0, 1)], [joining], 9.0
    )
    assert report.cause(seen, "late") == "node-1: starting"
    assert report.last_lines(seen, "late", {"node-0": ["a"], "node-1": ["b"]}) == ["  node-1 | b"]
    assert report.exit_code(seen, "late") == 4


def test_ctrl_c_inside_a_print_does_not_swallow_the_last_message(monkeypatch, capsys, tmp_path):
    """rich's console buffers for ever if KeyboardInterrupt is raised in the first instructions of a print."""
    record = JobRecord(PLAN, 1.0, Job("job", ("x.py",), 2, 1, "/home/ann/runs"))
    out = console()

    def run(_):
        out._enter_buffer()
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor.Supervisor, "run", run)
    monkeypatch.setattr(follow, "on_interrupt", lambda *_: [])
    with pytest.raises(typer.Exit):
        follow.follow(record, JobStore(tmp_path), out, "master", stop_on_interrupt=False)
    assert "detached; job keeps running" in capsys.readouterr().out


def test_a_stall_names_the_ranks_outside_of_the_collective_first():
    waits = {"collective": "all_reduce", "call": "all_reduce", "place": "train.py:40"}
    sleeps = {"collective": "", "call": "sleep", "place": "train.py:45"}
    ends = [
        NodeStatus("node-0", "starting", stall=(StalledRank(0, **waits), StalledRank(1, **waits))),
        NodeStatus("node-1", "starting", stall=(StalledRank(2, **waits), StalledRank(3, **sleeps))),
    ]
    seen = fold(job_state.start(PLAN, 9.0), ends, [], 200.0)
    seen.joined_after_s = 1.0
    assert job_state.judge(seen, 201.0, 300.0) == "stalled"
    assert report.cause(seen, "stalled") == (
        "no output and no activity: rank 3 has not entered all_reduce: sleep (train.py:45); "
        "ranks 0, 1, 2 wait in all_reduce (train.py:40)"
    )
    assert report.last_lines(seen, "stalled", {"node-0": [], "node-1": []}) == []
    assert report.exit_code(seen, "stalled") == 1
    ends[0] = NodeStatus("node-0", "exited", 0, ended_at=201.0)  # its ranks need nothing from the others
    ended = fold(copy.deepcopy(seen), ends, [], 202.0)
    assert job_state.judge(ended, 202.0, 300.0) == "stalled"
    assert report.cause(ended, "stalled").endswith(
        "rank 3 has not entered all_reduce: sleep (train.py:45); rank 2 waits in all_reduce (train.py:40)"
    )
    ends[0] = NodeStatus("node-0", "starting", stall=(StalledRank(0, **waits), StalledRank(1, **waits)))
    ends[1] = NodeStatus("node-1", "starting")  # it computes again
    assert job_state.judge(fold(seen, ends, [], 202.0), 202.0, 300.0) == "joined"


def test_the_one_of_eight_busy_ranks_that_is_elsewhere_comes_first():
    polls = {"collective": "", "call": "main", "place": "train.py:40", "busy": True}
    late = {"collective": "", "call": "load", "place": "train.py:12", "busy": True}
    ranks = [StalledRank(rank, **(late if rank == 5 else polls)) for rank in range(8)]
    seen = job_state.start(PLAN, 9.0)
    for node, stalled in zip(seen.nodes, (ranks[:4], ranks[4:]), strict=True):
        node.status = replace(node.status, stall=tuple(stalled))
    assert report.cause(seen, "stalled") == (
        "no output, and busy at the same place: rank 5: load (train.py:12); "
        "ranks 0, 1, 2, 3, 4, 6, 7: main (train.py:40)"
    )


MESSAGES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "expandable_segments",
    "out of memory: the kernel killed it": "fewer dataloader workers",
    "RuntimeError: No CUDA GPUs are available": "clusterctl doctor",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": "newer NVIDIA driver",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "another torch",
    "RuntimeError: CUDA error: device-side assert triggered": "CUDA_LAUNCH_BLOCKING",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "Xid",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "--only",
    "RuntimeError: CUDA error: invalid device ordinal": "LOCAL_RANK",
    "DistBackendError: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000": "set_device",
    "NCCL WARN Bootstrap : no socket interface found": "NCCL_SOCKET_IFNAME",
    "DistBackendError: ncclSystemError: System call or external library call failed": "/dev/shm",
    "DistBackendError: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.": "NCCL_DEBUG=INFO",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)": "--stall-timeout",
    "what():  [enforce fail at pair.cc:464] op.preamble.length <= op.nbytes. 500000 vs 4.": "different collectives",
    "RuntimeError: Expected to have finished reduction in the prior iteration": "find_unused_parameters",
    "RuntimeError: No backend type associated with device type cpu": "gloo",
    "ValueError: Default process group has not been initialized, please call init_process_group": "init_process_group",
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that": "/dev/shm",
    "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly": "fewer dataloader workers",
    "OSError: [Errno 24] Too many open files": "file_system",
    "OSError: [Errno 28] No space left on device": "free some space",
    "DistNetworkError: The server socket has failed to listen: EADDRINUSE": "--master-port auto",
    "OSError: [Errno 30] Read-only file system: 'snapshot.pt'": "--mount",
    "setup: SSLError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed')": "PIP_CERT",
    "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/transport/tcp/pair.cc:144]": "GLOO_SOCKET",
    "OSError: [Errno 122] Disk quota exceeded: '/runs/x'": "--run-dir",
    "RuntimeError: can't start new thread": "ulimit -u",
    "ImportError: libGL.so.1: cannot open shared object file: No such file or directory": "opencv-python-headless",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing": "'spawn'",
    "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by x.so)": "newer system",
    "Error: mkl-service + Intel(R) MKL: MKL_THREADING_LAYER=INTEL is incompatible with libgomp": "LAYER=GNU",
    "crashed: segmentation fault": "Python stack",
    "ModuleNotFoundError: No module named 'lightning.pytorch'": "--setup 'pip install lightning'",
}


@pytest.mark.parametrize("message", list(MESSAGES))
def test_a_known_message_has_a_hint(message):
    assert MESSAGES[message] in hints.hint(message)
    assert MESSAGES[message] in hints.hint("exit code 1", ["first", message, "last"])


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("cv2", "opencv-python-headless"),
        ("PIL", "pillow"),
        ("sklearn.svm", "scikit-learn"),
        ("yaml", "pyyaml"),
    ],
)
def test_a_missing_module_is_named_as_its_package(module, package):
    message = f"ModuleNotFoundError: No module named '{module}'"
    assert hints.hint(message).startswith(f"install it: --setup 'pip install {package}'")


def test_every_known_message_is_tested_and_others_have_no_hint():
    texts = {hints.hint(message) for message in MESSAGES}
    assert len(texts) == len(hints.KNOWN) == len(MESSAGES)
    assert hints.hint("ValueError: invalid literal for int()", ["epoch 1"]) == ""


def test_an_image_that_cannot_be_pulled_is_the_cause_and_not_an_exit_code():
    sentence = "the container image x:1 cannot be pulled: manifest unknown"
    status = NodeStatus("node-0", "exited", 2, sentence, where="n1", is_final=True)
    view = job_state.start(PLAN, 0.0)
    job_state.fold(view, [status, *(NodeStatus(node.name, "pending") for node in PLAN.nodes[1:])], [], 1.0)
    assert report.cause(view, "failed") == f"node-0: {sentence}; n1"


def test_the_folder_of_logs_is_named_only_if_it_has_them(tmp_path):
    plan = BACKENDS["local"].plan(Job("job", ("x.py",), 1, 1, str(tmp_path)), attempt=1, port=20000)
    assert report.logs_of(plan, every_rank=True) == []
    folder = Path(plan.attempt_dir)
    folder.mkdir(parents=True)
    assert report.logs_of(plan) == []
    (folder / "node-0.log").touch()
    assert report.logs_of(plan, every_rank=True) == [f"logs: {folder}"]
    (folder / "ranks" / "node-0").mkdir(parents=True)
    (folder / "ranks" / "node-0" / "0.log").touch()
    assert report.logs_of(plan, every_rank=True) == [f"every rank's log: {folder}"]
