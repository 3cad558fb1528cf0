"""Fixtures for all tests: the command line in a folder of its own, and job names."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.spec.port import auto_port

# OpenMP's threads spin while they wait, and would take the core of another test process. torch reads this once, when it
# is imported, which is at the collection of any test that imports it.
os.environ["OMP_NUM_THREADS"] = "1"

# A parent such as nohup, or a shell that runs the tests in the background, lets them ignore signals. Their children
# would inherit that, but they do not inherit a handler. xdist's workers live as long as the process that started them.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN or (_IS_WORKER and _number == signal.SIGHUP):
        signal.signal(_number, lambda *_: None)

# Collections would visit every imported module again and again, a tenth of the time of all tests.
gc.disable()

ROOT = Path(__file__).parents[1]
_JOB_NUMBERS = itertools.count(1)

#: Unit tests that took more than 5 s (--durations=0, 2026-11-24, 2 cores shared with other work). They get the marker
#: `slow`, and `make test-fast` skips them.
SLOW = frozenset(
    {
        # test_api.py
        "test_two_ranks_train_and_return_the_result",
        # test_resume.py
        "test_a_run_killed_at_any_step_and_resumed_equals_an_uninterrupted_one",
        "test_another_number_of_ranks_resumes_in_the_same_order",
        "test_every_node_keeps_a_checkpoint_of_its_own_disk",
        "test_a_job_resumes_from_another_jobs_folder_with_a_moved_data_set",
        "test_ranks_with_different_settings_do_not_start",
        # test_train.py
        "test_it_starts_its_own_ranks",
        "test_a_signal_to_its_own_ranks_leaves_none",
        "test_alone_and_again_from_the_checkpoint",
        # test_loss, test_bench, test_classification, test_export, test_loader, test_parallel, test_predict,
        # test_segmentation
        "test_a_batch_that_does_not_fit_is_a_row",
        "test_a_classifier_learns_and_two_ranks_score_like_one",
        "test_a_network_learns_an_image_by_heart",
        "test_all_ranks_skip_a_step_that_overflows",
        "test_half_precision_is_that_of_one_device",
        "test_segmentation_learns_and_two_ranks_score_like_one",
        "test_a_killed_and_resumed_run_ends_with_the_same_weights",
        "test_micro_batches_of_any_size_give_the_gradients_of_one_device",
        "test_only_the_wanted_classes_are_found",
        "test_onnx_computes_what_the_model_computes",
        "test_shards_give_the_gradients_of_one_device",
        "test_uneven_shares_of_a_batch_train_as_one_rank_does",
        "test_verify_finds_the_gradients_of_ranks_equal",
        "test_compiled_ranks_have_the_losses_of_uncompiled_ones",
        "test_kept_gradients_do_not_change_the_losses_of_compiled_ranks",
        "test_every_strategy_resumes_from_the_checkpoint_of_another",
        "test_workers_exit_with_a_killed_trainer",
    }
)


class Clusterctl:
    """The command line in one folder, with its own job store."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {**os.environ, "CLUSTERCTL_STATE_DIR": str(folder / "records"), "COLUMNS": "120"}
        self.env.pop("OMP_NUM_THREADS", None)

    def start(self, *arguments, **options):
        return subprocess.Popen(
            [sys.executable, "-m", "cluster", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *arguments, timeout_s=120):
        with self.start(*arguments) as process:
            try:
                text, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"{arguments} did not end: {process.communicate()[0]}") from None
        return process.returncode, text

    def expect(self, code, *arguments, has="", timeout_s=120):
        """Run a command, and return its output. It must exit with `code` and print `has`."""
        found, text = self.run(*arguments, timeout_s=timeout_s)
        assert (found, has in text) == (code, True), text
        return text

    def wait_for(self, job, text, node="node-0", timeout_s=200, attempt=1):
        """Wait until a node's log has `text`."""
        log = self.folder / "runs" / job / f"attempt-{attempt}" / f"{node}.log"
        until = time.time() + timeout_s
        while time.time() < until:
            if log.exists() and text in log.read_text():
                return
            time.sleep(0.1)
        raise AssertionError(f"no {text!r} in {log}: {log.read_text() if log.exists() else 'no log'}")


def wait_until(condition, timeout_s=60, pause_s=0.05):
    """Wait until the condition has a true value, and return it; the last value after the timeout."""
    until = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < until:
        time.sleep(pause_s)
    return value


def interrupted(text, *words, timeout_s):
    """Run a Python program that sends itself SIGINT."""
    argv = [sys.executable, "-c", text, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s)


def ended(process, code, *, has="", timeout_s=120):
    """Return the output of a started command. It must exit in time with `code` and print `has`."""
    text, _ = process.communicate(timeout=timeout_s)
    assert (process.returncode, has in text) == (code, True), text
    return text


def processes_of(job):
    """Return the pids of a job's processes on this machine, independently of the launcher."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"CLUSTER_JOB_ID=" + job.encode() in variables:
                found.append(int(folder.name))
    return found


def pytest_collection_modifyitems(items):
    for item in items:
        if item.originalname in SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # some extension modules warn of what they find at the exit


@pytest.fixture(autouse=True)
def _sigint():
    """Restore the handler of SIGINT, which a program that a test runs in this process may leave ignored."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def worker(worker_id):
    """Return the number of this `pytest -n` worker: 0, 1, ..."""
    return 0 if worker_id == "master" else int(worker_id.removeprefix("gw"))


@pytest.fixture
def job_name(worker):
    """Return a job name that no other test on this machine uses.

    The master's port derives from it (`auto_port`). Each worker has its own range of ports.
    """
    names = (f"ct-{os.getpid()}-{number}" for number in _JOB_NUMBERS)
    return next(name for name in names if auto_port(name) // 1000 % 10 == worker % 10)


@pytest.fixture
def clusterctl(tmp_path):
    return Clusterctl(tmp_path)
