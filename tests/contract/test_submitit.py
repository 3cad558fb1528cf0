"""The submitit executor `clusterctl`: functions and commands as jobs."""

import operator
import os
import shutil
import sys

import pytest
import submitit
from submitit.helpers import CommandFunction


@pytest.fixture
def executor(tmp_path, monkeypatch, job_name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERCTL_STATE_DIR", str(tmp_path / "state"))
    executor = submitit.AutoExecutor(tmp_path / "folder", cluster="clusterctl")
    executor.update_parameters(name=job_name, clusterctl_backend="local", clusterctl_python=sys.executable)
    return executor


def test_a_function_runs_in_every_rank_and_its_results_come_back(executor):
    executor.update_parameters(nodes=2, gpus_per_node=2)
    job = executor.submit(operator.add, 40, 2)
    assert job.results() == [42] * 4
    assert (job.state, job.done(), job.exception()) == ("COMPLETED", True, None)


def test_each_rank_of_unequal_nodes_has_a_result(executor):
    executor.update_parameters(nodes=2, clusterctl_gpus="2,1")
    assert executor.submit(operator.add, 40, 2).results() == [42] * 3


def test_an_exception_of_a_function_is_raised_here(executor):
    with pytest.raises(submitit.core.utils.FailedJobError, match="ZeroDivisionError"):
        executor.submit(operator.truediv, 1, 0).result()


def test_a_command_runs_unchanged_and_its_failure_is_an_exception(executor, tmp_path):
    sh = shutil.which("sh")
    assert executor.submit(CommandFunction([sh, "-c", f"echo $RANK > {tmp_path}/seen"])).result() is None
    assert (tmp_path / "seen").read_text() == "0\n"
    failed = executor.submit(CommandFunction([sh, "-c", "exit 3"]))
    assert "exit code 3" in str(failed.exception())
    assert failed.state == "FAILED"


def test_cancel_stops_the_job(executor, tmp_path):
    job = executor.submit(CommandFunction([shutil.which("sh"), "-c", f"echo $$ > {tmp_path}/pid; sleep 100"]))
    job.cancel()
    assert job.state == "CANCELLED"
    if (tmp_path / "pid").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_unknown_parameters_are_refused_with_the_known_ones(executor):
    with pytest.raises(NameError, match=r"'imagee' for executor 'clusterctl'.*image"):
        executor.update_parameters(clusterctl_imagee="x")
