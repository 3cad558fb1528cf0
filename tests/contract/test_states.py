"""What `ps`, `status` and `serve` say of many jobs, and of jobs whose machines do not answer: over a real sshd."""

import contextlib
import json
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from cluster.backends import BACKENDS
from cluster.spec.model import Job, JobRecord
from cluster.store import JobStore
from tests.browser import TOKEN, chromium, page, serving
from tests.conftest import wait_until

__all__ = ["chromium", "page"]


@contextlib.contextmanager
def on_nodes(clusterctl, sshd, name, hosts=(0,), phase="ready"):
    """A recorded job whose nodes' scripts run on hosts of the server; their agents report the phase."""
    store = JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"]))
    far = clusterctl.folder / "far"
    machines = tuple(sshd.node(number, f"gpu-{number}", run_dir=str(far)) for number in hosts)
    job = Job(name, ("x.py",), len(machines), 1, str(clusterctl.folder / "runs"), hosts=machines)
    plan = BACKENDS["ssh"].plan(job, attempt=1, port=20000)
    store.reserve(JobRecord(plan, time.time(), job))
    folder = far / name / "attempt-1"
    folder.mkdir(parents=True)
    Path(plan.attempt_dir).mkdir(parents=True)
    scripts = []
    for rank, node in enumerate(plan.nodes):
        script = folder / f"{node.name}.sh"
        script.write_text("sleep 600 & wait")
        scripts.append(subprocess.Popen(["bash", script], start_new_session=True))
        assert wait_until(lambda script=script: str(script).encode() in _command_line(scripts[-1].pid))
        (folder / f"{node.name}.pid").write_text(f"{scripts[-1].pid}\n")
        events = {"ready": {"event": "ready", "node": rank, "time": time.time(), "world_size": len(machines)}}
        agent = {"phase": "running", "heartbeat": time.time(), "events": events if phase == "ready" else {}}
        (folder / f"{node.name}.json").write_text(json.dumps(agent) + "\n")
    try:
        yield
    finally:
        for script in scripts:
            subprocess.run(["pkill", "-KILL", "-g", str(script.pid)], check=False)
            script.wait()


def _command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def rows(clusterctl, *words):
    return {row["job"]: row for row in json.loads(clusterctl.expect(0, "ps", "--json", *words))}


def test_ps_runs_one_command_on_each_host_for_all_jobs(clusterctl, sshd, job_name):
    asked = sshd.folder / "asked"
    for number in range(2):
        sshd.before_each_command(number, f"set -- $SSH_CONNECTION; echo $3 >> {asked}")
    with contextlib.ExitStack() as running:
        for number in range(20):
            running.enter_context(on_nodes(clusterctl, sshd, f"{job_name}-{number}", hosts=(0, 1)))
        listed = rows(clusterctl)
    assert {row["state"] for row in listed.values()} == {"running"}
    assert {row["nodes"] for row in listed.values()} == {"2/2"}
    assert len(listed) == 20
    assert sorted(asked.read_text().split()) == sorted(sshd.addresses[:2])


def test_a_job_whose_host_does_not_answer_shows_its_last_state_and_since_when(clusterctl, sshd, job_name):
    with (
        on_nodes(clusterctl, sshd, f"{job_name}-up", hosts=(0, 1)),
        on_nodes(clusterctl, sshd, f"{job_name}-new", hosts=(1,), phase="starting"),
    ):
        assert {row["state"] for row in rows(clusterctl).values()} == {"running", "starting"}
        seen_at = time.time()
        sshd.before_each_command(1, "kill -9 $PPID")
        listed = rows(clusterctl)
        up = listed[f"{job_name}-up"]
        new = listed[f"{job_name}-new"]
        assert (up["state"], up["last_state"], new["state"], new["last_state"]) == (
            "unreachable",
            "running",
            "unreachable",
            "starting",
        )
        assert abs(up["since"] - seen_at) < 10
        assert "gpu-1" in up["reason"]
        text = clusterctl.expect(0, "ps")
        assert re.search(rf"{job_name}-up +unreachable for [\d.]+ .*; running before +ssh +2 ", text), text
        text = clusterctl.expect(0, "status", f"{job_name}-up")
        assert re.search(r"gpu-0 +ready", text), text
        assert re.search(r"gpu-1 +unreachable .*; ready before", text), text
        nodes = json.loads(clusterctl.expect(0, "status", "--json", f"{job_name}-up"))["nodes"]
        assert [(node["phase"], node.get("last_phase")) for node in nodes] == [
            ("ready", None),
            ("unreachable", "ready"),
        ]
        with serving(clusterctl, "--metrics") as url:
            request = urllib.request.Request(f"{url}metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                metrics = answer.read().decode()
        assert f'clusterctl_job_state{{backend="ssh",job="{job_name}-up",state="unreachable"}} 1.0' in metrics
        assert f'clusterctl_job_last_state{{job="{job_name}-up",state="running"}} 1.0' in metrics


@pytest.mark.parametrize("width", [400, 1280])
def test_the_list_of_jobs_shows_each_cause_and_the_running_jobs_first(
    clusterctl, sshd, job_name, page, width
):
    store = JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"]))
    cause = "node-1: rank 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB " * 2
    with on_nodes(clusterctl, sshd, f"{job_name}-old-but-running"):
        for number in range(3):
            job = Job(f"{job_name}-{number}", ("x.py",), 1, 1, str(clusterctl.folder))
            record = JobRecord(BACKENDS["local"].plan(job, attempt=1, port=20000), time.time(), job)
            store.reserve(record)
            store.end(job.name, "failed", cause)
        page.set_viewport_size({"width": width, "height": 900})
        with serving(clusterctl, page=page):
            page.wait_for_selector(".jobs .running")
            names = page.locator(".jobs a").all_text_contents()
            assert names == [f"{job_name}-old-but-running", *(f"{job_name}-{number}" for number in (2, 1, 0))]
            box = page.locator(f".jobs tr:has(a:text-is('{job_name}-0')) td[data-title=cause]")
            right, text = box.evaluate(
                "cell => { const range = document.createRange(); range.selectNodeContents(cell);"
                " return [range.getBoundingClientRect().right, cell.innerText] }"
            )
            assert cause.strip() in text.replace("\n", " ")
            assert right <= width
            assert page.evaluate("document.documentElement.scrollWidth") <= width
