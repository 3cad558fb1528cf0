"""Runs the real `clusterctl` as a user would; every test has its own records, folder and job name."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.config import auto_port

ROOT = Path(__file__).parents[1]
_JOB_NUMBERS = itertools.count(1)

#: Unit tests that took more than 5 s (--durations=0, 2026-11-24, 2 cores shared with other work). They get the marker
#: `slow`, and `make test-fast` skips them.
SLOW = frozenset(
    {
        # test_api.py
        "test_two_ranks_train_and_the_results_come_back",
        # test_resume.py
        "test_killed_at_any_step_and_gone_on_is_as_if_nothing_had_happened",
        "test_killed_in_the_validation_the_epoch_ends_as_it_would_have",
        "test_other_ranks_go_on_with_the_same_order",
        "test_curves_of_a_best_epoch_before_the_interruption_are_a_command_away",
        "test_every_node_keeps_a_checkpoint_of_its_own_disk",
        "test_a_job_goes_on_from_another_jobs_folder_with_a_set_that_was_moved",
        "test_ranks_that_were_told_other_things_do_not_begin",
        # test_train.py
        "test_it_starts_its_own_ranks",
        "test_more_workers_than_cores_are_our_words_not_torchs",
        "test_a_signal_to_its_own_ranks_leaves_none",
        "test_alone_and_again_from_the_checkpoint",
        # test_trouble.py
        "test_out_of_host_memory_is_one_error",
        # test_aligned_loss, test_bench, test_classification, test_export, test_loader, test_parallel, test_predict,
        # test_segmentation, test_verify
        "test_a_batch_that_does_not_fit_is_a_row",
        "test_a_classifier_learns_and_two_ranks_score_like_one",
        "test_a_network_learns_a_picture_by_heart",
        "test_a_step_that_overflows_is_left_out_by_all_ranks",
        "test_half_precision_is_that_of_one_device",
        "test_it_learns_where_things_are_and_two_ranks_score_it_like_one",
        "test_killed_and_resumed_it_ends_with_the_same_weights",
        "test_micro_batches_of_any_size_give_the_gradients_of_one_device",
        "test_only_the_wanted_classes_are_found",
        "test_onnx_computes_what_the_model_computes",
        "test_shards_give_the_gradients_of_one_device",
        "test_uneven_shares_of_a_batch_train_as_one_rank_does",
        "test_verify_finds_the_gradients_of_ranks_equal",
        "test_what_one_mode_has_begun_every_other_goes_on_with",
        "test_workers_do_not_outlive_a_trainer_that_was_killed",
    }
)


class Clusterctl:
    """The command line in one folder, with its own records."""

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
            # A shell starts what stands in the background with SIGINT ignored; the tests send one all the same.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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

    def wait_for(self, job, text, node="node-0", timeout_s=90):
        """Wait until a node's log has `text`."""
        log = self.folder / "runs" / job / "attempt-1" / f"{node}.log"
        until = time.time() + timeout_s
        while time.time() < until:
            if log.exists() and text in log.read_text():
                return
            time.sleep(0.1)
        raise AssertionError(f"{text!r} never came in {log}: {log.read_text() if log.exists() else 'no log'}")


def processes_of(job):
    """The pids of everything on this machine that belongs to a job, found independently of the launcher."""
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


@pytest.fixture(scope="session")
def worker(worker_id):
    """The number of this process among those of `pytest -n`: 0, 1, ..."""
    return 0 if worker_id == "master" else int(worker_id.removeprefix("gw"))


@pytest.fixture
def job_name(worker):
    """A job's name that no other test uses, of this run or of another one on this machine.

    The master's port derives from it (`auto_port`); each worker has a range of ports of its own.
    """
    names = (f"ct-{os.getpid()}-{number}" for number in _JOB_NUMBERS)
    return next(name for name in names if auto_port(name) // 1000 % 10 == worker % 10)


@pytest.fixture
def clusterctl(tmp_path):
    return Clusterctl(tmp_path)
