"""Jobs on the testbed's Slurm, as an ordinary user, with Apptainer: submitted remotely and by hand, with faults.

The weights of a requeued job equal those of an undisturbed one.
"""

import json
import os
import re
import signal
import subprocess
import time

import pytest
import submitit
import torch
import yaml

from tests.conftest import ROOT, Clusterctl, ended, wait_until
from tests.contract.sshd import TICKS
from tests.unit.yolo_folder import make_yolo_set

pytestmark = [pytest.mark.real, pytest.mark.timeout(500, func_only=True)]
SMALLEST = ROOT / "trainer" / "models" / "yolov5n.yaml"
HOME = "/shared/ada/clusterctl"
SIF = f"{HOME}/trainer.sif"


class Slurm:
    """A folder with a cluster.yaml of the testbed's Slurm, and a small data set that is there."""

    def __init__(self, clusterctl, testbed):
        self.clusterctl = clusterctl
        self.testbed = testbed
        self.folder = clusterctl.folder
        self.login = testbed["n0"]
        self.processes = []
        clusterctl.env["CLUSTERCTL_STATE_DIR"] = f"{self.folder}-records"
        self.write()

    def write(self, runtime="apptainer", run_dir=f"{HOME}/runs", image=SIF, **options):
        place = {"login": "ada@n0", "run_dir": run_dir, "data_dir": f"{HOME}/data", "runtime": runtime}
        text = yaml.safe_dump(
            {
                "backend": "slurm",
                "device": "cpu",
                "image": image,
                "ssh_config": str(self.testbed.ssh_config),
                "slurm": {"partition": "gpu", "time": "20:00", **options},
                "nodes": {"login": place},
            }
        )
        (self.folder / "cluster.yaml").write_text(text)

    def with_data(self):
        self.data = make_yolo_set(self.folder / "set", train=32, val=2)
        tiny = yaml.safe_load(SMALLEST.read_text()) | {"width_multiple": 0.05, "depth_multiple": 0.1}
        (self.folder / "set" / "tiny.yaml").write_text(yaml.safe_dump(tiny))
        code, text = self.clusterctl.run("sync", str(self.folder / "set"))
        assert code == 0, text
        return self

    def words(self, verb, job, *options, gpus=1, epochs=20):
        arguments = [
            "--data",
            str(self.data),
            "--cfg",
            str(self.folder / "set" / "tiny.yaml"),
            "--imgsz",
            "64",
        ]
        arguments += ["--batch", "4", "--epochs", str(epochs), "--workers", "0", "--noval", "--seed", "1"]
        command = [
            verb,
            "--name",
            job,
            "--nodes",
            "2",
            "--gpus",
            str(gpus),
            "--env",
            "OMP_NUM_THREADS=1",
            *options,
        ]
        return [*command, "--", "train", *arguments]

    def launch(self, job, *options, **more):
        self.job = job
        self.login.run(f"rm -rf {HOME}/runs/{job}")
        self.process = self.clusterctl.start(*self.words("launch", job, *options, **more))
        self.processes.append(self.process)
        return self

    def log(self, attempt=1, node="node-0"):
        path = self.folder / "runs" / self.job / f"attempt-{attempt}" / f"{node}.log"
        return path.read_text() if path.exists() else ""

    def until(self, text, attempt=1, timeout_s=120):
        until = time.time() + timeout_s
        while text not in self.log(attempt):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.time() < until, f"no {text}: {self.log(attempt)}"
            time.sleep(0.1)
        return self

    def end(self, timeout_s=300):
        text, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text

    def number(self):
        return self.login.run(f"squeue -h -n {self.job} -o %i", user="ada")

    def left(self):
        """Return the job's number in the queue, and its processes on the hosts."""
        script = f"grep -lzxs CLUSTER_JOB_ID={self.job} /proc/[0-9]*/environ; true"
        running = {name: text for name, host in self.testbed.hosts.items() if (text := host.run(script))}
        return self.number(), running

    def weights(self):
        kept = torch.load(self.folder / "runs" / self.job / "last.pt", weights_only=True, map_location="cpu")
        return {f"{part}.{name}": value for part in ("model", "ema") for name, value in kept[part].items()}


@pytest.fixture(scope="session")
def sif(testbed, image_on_hosts, tmp_path_factory):
    """The trainer's image as a SIF file on the common disk, rebuilt if the container image has changed."""
    made = Slurm(Clusterctl(tmp_path_factory.mktemp("sif")), testbed)
    made.login.run(f"install -d -o ada -g ada /shared/ada {HOME}")
    format_ = ["docker", "image", "inspect", "--format", "{{.Id}}", image_on_hosts]
    image = subprocess.run(format_, capture_output=True, text=True, check=True).stdout.strip()
    if made.login.try_run(f"test -e {SIF} && grep -qx {image} {SIF}.of")[0]:
        code, text = made.clusterctl.run("image", "sif", "--image", image_on_hosts, timeout_s=480)
        assert code == 0, text
        assert f"login: {SIF}, " in text
        made.login.run(f"echo {image} > {SIF}.of")
    return SIF


@pytest.fixture
def slurm(clusterctl, testbed, sif):
    made = Slurm(clusterctl, testbed).with_data()
    # Jobs of the test before may be ending, and a host that it has killed may be starting.
    idle = '[ -z "$(squeue -h -u ada)" ] && [ $(sinfo -h -N -p gpu -t idle -r | wc -l) = 3 ]'
    made.login.run(f"until {idle}; do sleep 0.5; done", timeout_s=120)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
        process.stdout.close()
    made.login.run("scancel --user ada")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, testbed, sif):
    """The weights of a run without faults."""
    made = (
        Slurm(Clusterctl(tmp_path_factory.mktemp("undisturbed")), testbed).with_data().launch("undisturbed")
    )
    code, text = made.end()
    assert code == 0, text
    made.process.stdout.close()
    return made.weights()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_two_nodes_with_two_processes_each_train_to_the_end(slurm):
    code, text = slurm.launch("trains", gpus=2, epochs=1).end()
    assert code == 0, text
    assert "2/2 nodes ready   world size 4   gloo" in text
    assert re.search(r"node-1: (starting|joining): on n\d", text)
    assert (slurm.folder / "runs" / "trains" / "best.pt").stat().st_size > 1000
    assert slurm.left() == ("", {})


def test_the_exported_script_does_the_same_by_hand(slurm, testbed):
    script = slurm.folder / "job.sbatch"
    slurm.login.run(f"rm -rf {HOME}/runs/by-hand")
    code, text = slurm.clusterctl.run(*slurm.words("plan", "by-hand", "-o", str(script), epochs=1))
    assert code == 0, text
    copy = subprocess.run(
        slurm.login.ssh("cat > /tmp/job.sbatch", "ada"), input=script.read_bytes(), check=False
    )
    assert copy.returncode == 0
    code, text = slurm.clusterctl.run("plan", "--agent", "-o", str(slurm.folder / "agent.pyz"))
    assert code == 0, text
    agent = (slurm.folder / "agent.pyz").read_bytes()
    folder = f"{HOME}/runs/by-hand/attempt-1"
    command = f"mkdir -p {folder} && cat > {folder}/agent.pyz"
    assert subprocess.run(slurm.login.ssh(command, "ada"), input=agent, check=False).returncode == 0
    out = slurm.login.run(
        "cd /tmp && sbatch --wait --output /tmp/by-hand.out job.sbatch", user="ada", timeout_s=240
    )
    assert "Submitted batch job" in out
    assert slurm.login.run(f"ls {HOME}/runs/by-hand/last.pt; cat {HOME}/runs/by-hand/attempt-1/node-1.exit")[
        -20:
    ]
    assert " 0" not in slurm.login.run(
        f"cut -d' ' -f1 {HOME}/runs/by-hand/attempt-1/*.exit | grep -v ^0 || true"
    )


def test_a_preempted_job_resumes_with_equal_weights(slurm, undisturbed):
    slurm.launch("preempted").until('"progress"')
    slurm.login.run(f"scancel --batch --signal=USR2 {slurm.number()}", user="ada")
    code, text = slurm.end()
    assert code == 0, text
    assert re.search("stopped by SIGUSR2 after a checkpoint; on n.; restart 1 of 3", text), text
    assert re.search(r"resuming in epoch \d after step \d", text)
    assert_same(undisturbed, slurm.weights())


def test_a_job_whose_host_dies_restarts_on_other_hosts(slurm, undisturbed, testbed):
    slurm.launch("host-dies").until('"progress"')
    assert slurm.login.run(f"squeue -h -n {slurm.job} -o %N", user="ada") == "n[0-1]"
    testbed.fault("kill", "n1")
    try:
        code, text = slurm.end()
    finally:
        testbed.fault("start", "n1")
    assert code == 0, text
    assert re.search(r"node-1: (starting|joining): on n2", text), text
    assert "restart 1 of 3" in text
    assert_same(undisturbed, slurm.weights())


def test_scancel_stops_a_job_without_a_restart(slurm):
    slurm.launch("cancelled").until('"progress"')
    slurm.login.run(f"scancel {slurm.number()}", user="ada")
    code, text = slurm.end()
    assert code == 1, text
    assert re.search("not restarted: .*cancelled with scancel", text), text
    assert slurm.left() == ("", {})


def test_ctrl_c_cancels_the_job_and_a_second_stop_is_no_error(slurm):
    slurm.launch("ctrl-c").until('"progress"')
    slurm.process.send_signal(signal.SIGINT)
    code, text = slurm.end(120)
    assert code == 130, text
    assert "stopped. No processes remain." in text
    assert slurm.left() == ("", {})
    assert slurm.clusterctl.run("stop", "ctrl-c")[0] == 0


@pytest.mark.parametrize("known", [True, False], ids=["number known", "number not known yet"])
def test_stop_cancels_a_job_by_its_number_or_its_launch_id_never_by_its_name(clusterctl, testbed, known):
    made = Slurm(clusterctl, testbed)
    made.login.run(f"install -d -o ada -g ada /shared/ada {HOME} {HOME}/runs && rm -rf {HOME}/runs/named")
    made.write(runtime="none", image="")
    (made.folder / "ticks.py").write_text(TICKS.read_text())
    words = ["launch", "--name", "named", "--nodes", "2", "--detach", "--python", "python3"]
    clusterctl.expect(0, *words, "--command", "ticks.py --ticks 5000")
    number = made.login.run("squeue -h -n named -o %i", user="ada")
    namesake = made.login.run(
        "sbatch --parsable -p debug -J named -o /dev/null --wrap 'sleep 300'", user="ada"
    )
    try:
        if not known:
            made.login.run(f": > {HOME}/runs/named/submitted")
        clusterctl.expect(0, "stop", "named", "--grace", "1s", has="stopped. No processes remain.")
        assert made.login.run("squeue -h -n named -o %i", user="ada") == namesake
        assert number != namesake
    finally:
        made.login.run("scancel --user ada")


def test_a_name_that_is_in_the_queue_is_refused(slurm):
    """Also if it was submitted without the launcher: Slurm jobs are found by name."""
    number = slurm.login.run(
        "sbatch --parsable --hold --partition gpu --job-name held --wrap true", user="ada"
    )
    slurm.login.run(f"rm -rf {HOME}/runs/held")
    code, text = slurm.clusterctl.run("launch", "--nodes", "2", "--name", "held")
    assert (code, f"login: a job held already exists: Slurm's job {number}" in text) == (2, True), text


FAULTS = {
    "unknown partition": (["--partition", "gppu"], 2, "login: no partition gppu\nhint: one of: gpu, debug"),
    "too many GPUs": (
        ["--device", "cuda", "--gpus", "3"],
        2,
        "its nodes have 2 GPUs, but --gpus is 3",
    ),
    "too many nodes": (["--nodes", "4"], 2, "it has 3 nodes, but --nodes is 4"),
    "no SIF": (
        ["--image", "/shared/ada/none.sif"],
        2,
        "login: no image /shared/ada/none.sif\nhint: clusterctl image sif",
    ),
    "a time too long": (["--time", "2-0"], 2, "its time limit is shorter than --time 2-0"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_unavailable_resources_are_refused_before_the_submission(slurm, fault):
    options, code, message = FAULTS[fault]
    done = slurm.clusterctl.run("launch", "--nodes", "2", "--name", "refused", *options)
    assert (done[0], message in done[1], "Traceback" in done[1]) == (code, True, False), done[1]
    assert slurm.login.try_run(f"ls {HOME}/runs/refused")[0] != 0


def test_a_run_directory_that_is_not_shared_is_an_error(slurm, testbed):
    for host in testbed.hosts.values():
        host.run("rm -rf /home/ada/runs")
    slurm.write(run_dir="/home/ada/runs")
    code, text = slurm.clusterctl.run(
        "launch",
        "--nodes",
        "2",
        "--name",
        "mine",
        "--set",
        "nodelist=n1,n2",
        "--max-restarts",
        "0",
        timeout_s=200,
    )
    assert code == 1, text
    assert "the run directory is not shared by all nodes: " in text


def test_a_port_in_use_on_the_first_node_is_an_error(slurm, testbed):
    slurm.login.run(f"rm -rf {HOME}/runs/port")
    holder = testbed["n1"].start("timeout 60 python3 -m http.server 29555")
    try:
        options = ["--set", "nodelist=n1,n2", "--max-restarts", "0", "--master-port", "29555"]
        code, text = slurm.clusterctl.run("launch", "--nodes", "2", "--name", "port", *options, timeout_s=200)
    finally:
        holder.kill()
        holder.communicate()
        testbed["n1"].run("pkill -f '[h]ttp.server 29555' || true")
    assert code == 1, text
    assert "n1: port 29555 is taken: choose another: --master-port auto" in text


def test_pending_jobs_cost_the_controller_one_call_for_all(slurm):
    """Counted by Slurm itself."""
    slurm.login.run("scontrol update PartitionName=debug State=DOWN")
    try:
        slurm.login.run(f"rm -rf {HOME}/runs/many-*")
        for nth in range(4):
            options = ["--nodes", "2", "--name", f"many-{nth}", "--partition", "debug", "--detach"]
            code, text = slurm.clusterctl.run("launch", *options)
            assert code == 0, text
        time.sleep(4)
        slurm.login.run("sdiag --reset")
        began = time.time()
        code, text = slurm.clusterctl.run("ps")
        took_s = time.time() - began
        assert code == 0
        assert text.count("queued") == 4 + len(re.findall("(?m)^many-.*: queued: ", text)), text
        counted = re.findall(r"REQUEST_JOB\w*_INFO\S*\s*\(\s*\d+\)\s+count:(\d+)", slurm.login.run("sdiag"))
        assert 1 <= sum(map(int, counted)) <= 1 + took_s / 3
        code, text = slurm.clusterctl.run("status", "many-0")
        assert "in the queue: " in text
        for nth in range(4):
            assert slurm.clusterctl.run("stop", f"many-{nth}")[0] == 0
        assert slurm.login.run("squeue -h") == ""
    finally:
        slurm.login.run("scontrol update PartitionName=debug State=UP; scancel --user ada")


def test_an_array_is_one_submission_and_each_line_of_the_file_a_job_of_its_own(slurm):
    for nth in range(3):
        slurm.login.run(f"rm -rf {HOME}/runs/grid-{nth}")
    (slurm.folder / "grid.txt").write_text("--seed 1\n\n# the same again\n--seed 1\n--epochs 1000\n")
    options = ["--array", str(slurm.folder / "grid.txt"), "--array-limit", "2"]
    code, text = slurm.clusterctl.run(*slurm.words("launch", "grid", *options, epochs=2))
    assert code == 0, text
    assert "3 jobs: grid-0 to grid-2" in text
    number = slurm.login.run("squeue -h -n grid -o %F | sort -u", user="ada")
    assert number.isdigit()
    weights = []
    for nth in range(2):
        code, text = slurm.clusterctl.run("wait", f"grid-{nth}", timeout_s=200)
        assert code == 0, text
        slurm.job = f"grid-{nth}"
        weights.append(slurm.weights())
    assert_same(*weights)
    slurm.job = "grid-2"
    until = time.time() + 60
    while '"progress"' not in slurm.login.run(f"cat {HOME}/runs/grid-2/attempt-1/node-0.log || true"):
        assert time.time() < until
        time.sleep(0.5)
    code, text = slurm.clusterctl.run("ps", "--json")
    assert {row["job"]: row["state"] for row in json.loads(text)}["grid-2"] == "running", text
    slurm.login.run(f"scancel --batch --signal=USR2 {number}_2", user="ada")
    while "resuming in epoch" not in slurm.login.run(f"cat {HOME}/runs/grid-2/attempt-2/node-0.log || true"):
        assert time.time() < until + 120
        # Slurm lets a requeued job wait for two minutes; a start within a second can fail (credential revoked)
        slurm.login.try_run(f"scontrol update JobId={number}_2 StartTime=now+3")
        time.sleep(6)
    assert slurm.clusterctl.run("stop", "grid-2", timeout_s=150)[0] == 0
    assert slurm.login.run("squeue -h -u ada") == ""


@pytest.fixture
def profile(slurm):
    """Export variables in ada's ~/.bashrc on the login node, which also non-interactive logins read."""
    bashrc = "/home/ada/.bashrc"
    slurm.login.run(f"[ -e {bashrc}.before ] || mv {bashrc} {bashrc}.before")

    def export(**variables):
        lines = "".join(f"export {name}={value}\n" for name, value in variables.items())
        slurm.login.run(f"cat > {bashrc} <<'END'\n{lines}END")

    yield export
    slurm.login.run(f"mv {bashrc}.before {bashrc}")


#: Each of these changed a job, or kept it from starting.
INHERITED = {
    "SBATCH_PARTITION": "debug",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_JOB_NAME": "another",
    "SBATCH_OUTPUT": "/tmp/another.log",
    "SBATCH_MEM_PER_NODE": "1G",
    "SBATCH_WAIT": "1",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_CPUS_PER_TASK": "16",
    "SRUN_CPUS_PER_TASK": "16",
    "SLURM_NTASKS": "7",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_TIMELIMIT": "1",
    "SQUEUE_FORMAT2": "JobID",
    "SQUEUE_STATES": "suspended",
    "SQUEUE_PARTITION": "debug",
    "SCANCEL_STATE": "PENDING",
    "SINFO_PARTITION": "debug",
}


def test_a_job_inherits_no_variable_of_the_login_node(slurm, profile):
    profile(**INHERITED)
    slurm.launch("inherits", "--set", "mem=200M").until('"progress"')
    shown = slurm.login.run("scontrol show job --oneliner")
    assert "JobName=inherits " in shown, shown
    assert "Partition=gpu " in shown, shown
    assert "MinMemoryNode=200M " in shown, shown
    slurm.process.send_signal(signal.SIGINT)
    code, text = slurm.end(120)
    assert code == 130, text
    assert "login: ignoring SBATCH_PARTITION=debug, because the job has partition=gpu" in text
    assert "login: ignoring SBATCH_EXPORT=NONE, because clusterctl sets export" in text
    assert re.search("login: ignoring .*SLURM_MEM_PER_CPU=100", text), text
    assert slurm.left() == ("", {})


def test_a_job_submitted_by_hand_in_another_job_inherits_nothing_of_it(slurm):
    script = slurm.folder / "job.sbatch"
    folder = f"{HOME}/runs/inside"
    slurm.login.run(f"rm -rf {folder}")
    code, text = slurm.clusterctl.run(
        *slurm.words("plan", "inside", "-o", str(script), "--set", "mem=200M", epochs=1)
    )
    assert code == 0, text
    code, text = slurm.clusterctl.run("plan", "--agent", "-o", str(slurm.folder / "agent.pyz"))
    assert code == 0, text
    slurm.login.run(f"mkdir -p {folder}/attempt-1", user="ada")
    for name, path in (
        (script, "/shared/ada/job.sbatch"),
        (slurm.folder / "agent.pyz", f"{folder}/attempt-1/agent.pyz"),
    ):
        copy = slurm.login.ssh(f"cat > {path}", "ada")
        assert subprocess.run(copy, input=name.read_bytes(), check=False).returncode == 0
    outer = "srun --partition gpu --nodes 1 --cpus-per-task 2 --mem-per-cpu 100 --export ALL"
    submit = "sbatch --wait --output /shared/ada/inside.out /shared/ada/job.sbatch"
    slurm.login.run(f"rm -f /shared/ada/inside.out; {outer} {submit}", user="ada", timeout_s=240)
    assert slurm.login.run(f"cut -d' ' -f1 {folder}/attempt-1/node-*.exit") == "0\n0"


@pytest.fixture
def refusing_srun(slurm):
    """Give srun on n0 variables that it refuses, however the job was submitted."""
    with_both = '#!/bin/sh\nexec env SLURM_MEM_PER_CPU=100 SLURM_MEM_PER_NODE=200 /usr/bin/srun "$@"\n'
    slurm.login.run(f"printf %s '{with_both}' > /usr/local/bin/srun && chmod 755 /usr/local/bin/srun")
    yield
    slurm.login.run("rm -f /usr/local/bin/srun")


def test_a_job_whose_steps_srun_refuses_fails_with_its_message_before_the_rendezvous_timeout(
    slurm, refusing_srun
):
    code, text = slurm.launch("refused-step", "--set", "nodelist=n0,n1", "--max-restarts", "0").end()
    assert code == 1, text
    assert (
        "node-0: exit 71: srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are "
        in text
    )
    assert slurm.left() == ("", {})


def test_an_option_that_only_the_login_node_sets_is_refused(slurm, profile):
    profile(SBATCH_ACCOUNT="ml")
    slurm.login.run(f"rm -rf {HOME}/runs/account")
    code, text = slurm.clusterctl.run("launch", "--nodes", "2", "--name", "account")
    assert (code, "login: SBATCH_ACCOUNT=ml is set, but the job has no option account" in text) == (
        2,
        True,
    ), text
    assert "hint: to use it: --set account=ml, or account under slurm in cluster.yaml" in text
    assert slurm.login.try_run(f"ls {HOME}/runs/account")[0] != 0


@pytest.fixture
def broken_apptainer(slurm):
    """Let Apptainer on n0 fail at its next N starts, with its exit code for every error."""

    def plant(failures):
        slurm.login.run(
            f"echo {failures} > /tmp/failures; chmod 666 /tmp/failures; cat > /usr/local/bin/apptainer <<'END'\n"
            "#!/bin/bash\n"
            "read -r left < /tmp/failures\n"
            'if [ "$2" = run ] && [ "$left" -gt 0 ]; then\n'
            "    echo $((left - 1)) > /tmp/failures\n"
            '    echo "FATAL:   container creation failed: mount: planted" >&2\n'
            "    exit 255\n"
            "fi\n"
            'exec /usr/bin/apptainer "$@"\n'
            "END\n"
            "chmod 755 /usr/local/bin/apptainer"
        )

    yield plant
    slurm.login.run("rm -f /usr/local/bin/apptainer /tmp/failures")


def test_a_container_that_does_not_start_is_tried_once_more(slurm, broken_apptainer):
    broken_apptainer(1)
    code, text = slurm.launch("once-more", epochs=1).end()
    assert code == 0, text
    assert (
        "apptainer: exit code 255, once more: FATAL:   container creation failed: mount: planted"
        in slurm.log()
    )
    assert slurm.login.run(f"cat {HOME}/runs/once-more/attempt") == "1 n0 n1"


def test_a_container_that_never_starts_is_reported_and_not_requeued(slurm, broken_apptainer):
    broken_apptainer(9)
    code, text = slurm.launch("never", "--max-restarts", "1", epochs=1).end()
    assert code == 1
    assert "node-0: exit 255: FATAL:   container creation failed: mount: planted" in text
    assert "again" not in slurm.login.run(
        f"cat {HOME}/runs/never/slurm.log"
    )  # the launcher restarted it, not Slurm
    assert slurm.left() == ("", {})


def test_submitit_runs_a_command_in_containers(slurm, monkeypatch):
    monkeypatch.chdir(slurm.folder)
    monkeypatch.setenv("CLUSTERCTL_STATE_DIR", slurm.clusterctl.env["CLUSTERCTL_STATE_DIR"])
    code, text = slurm.clusterctl.run("sync", str(slurm.folder), "--delete")
    assert code == 0, text
    executor = submitit.AutoExecutor(slurm.folder / "folder", cluster="clusterctl")
    executor.update_parameters(name="submitit", nodes=2, timeout_min=10)
    program = "import os, torch; print('RANK', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    job = executor.submit(submitit.helpers.CommandFunction(["python3", "-c", program]))
    assert job.result() is None
    assert job.state == "COMPLETED"
    log = slurm.folder / "runs" / job.job_id / "attempt-1" / "node-1.log"
    assert "RANK 1 of 2" in log.read_text()


def test_hostile_values_and_secrets_reach_only_the_program(slurm):
    program = slurm.folder / "show it's.py"
    program.write_text(
        "import os, sys\nprint('SEEN', repr(os.environ['NOTE']), len(os.environ['TOKEN']), sys.argv[1:])\n"
    )
    note = 'a\'; echo foo; $(touch /tmp/evil) "b"\n@run@ END_OF_NODE_SCRIPT'
    slurm.clusterctl.env["TOKEN"] = "s3cret-value"
    code, text = slurm.clusterctl.run("sync", str(slurm.folder))
    assert code == 0, text
    options = [
        "--nodes",
        "2",
        "--name",
        "hostile",
        "--env",
        f"NOTE={note}",
        "--env",
        "TOKEN",
        "--rendezvous-timeout",
        "100",
    ]
    slurm.login.run(f"rm -rf {HOME}/runs/hostile")
    code, text = slurm.clusterctl.run(
        "launch", *options, "--logs", "all", "--command", f'"{program.name}" \'x y\' "a\'b"', timeout_s=150
    )
    assert code == 0, text
    assert text.count(f"SEEN {note!r} 12 ['x y', \"a'b\"]") == 2
    assert "s3cret-value" not in text
    found = slurm.login.run(f"grep -rl s3cret-value {HOME}/runs/hostile || true")
    assert found == ""
    assert not list(slurm.folder.parent.glob("**/*s3cret*"))
    assert "s3cret-value" not in "".join(
        path.read_text() for path in (slurm.folder.parent).glob("*-records/*.json")
    )
    assert not os.path.exists("/tmp/evil")  # noqa: PTH110
    assert slurm.login.try_run("test -e /tmp/evil")[0] != 0


def test_a_detached_job_that_slurm_requeues_is_running_then_done(slurm):
    """No process of this machine records the second attempt."""
    (slurm.folder / "twice.py").write_text(
        "import os, time\n"
        "print('attempt', os.environ['CLUSTER_ATTEMPT'], 'begins', flush=True)\n"
        "end = os.path.join(os.environ['CLUSTER_RUN_DIR'], 'end')\n"
        "while os.environ['CLUSTER_ATTEMPT'] == '1' or not os.path.exists(end):\n"
        "    time.sleep(0.2)\n"
        "print('the last word', flush=True)\n"
    )
    clusterctl = slurm.clusterctl
    run_dir = f"{HOME}/runs/night"
    slurm.login.run(f"rm -rf {run_dir}")
    words = [
        "launch",
        "--name",
        "night",
        "--nodes",
        "2",
        "--max-restarts",
        "2",
        "--detach",
        "--command",
        "twice.py",
    ]
    clusterctl.expect(0, *words, timeout_s=150)
    followed = clusterctl.start("logs", "-f", "night")
    states = []

    def state():
        (row,) = json.loads(clusterctl.expect(0, "ps", "--all", "--json"))
        states.append(row["state"])
        return states[-1]

    assert wait_until(
        lambda: clusterctl.run("logs", "night")[1].count("attempt 1 begins") == 2, timeout_s=120
    )
    number = slurm.login.run("squeue -h -n night -o %i", user="ada")
    slurm.login.run(f"scontrol requeue {number}", user="ada")
    pending = "squeue -h -n night -o %T"
    assert wait_until(lambda: state() and slurm.login.run(pending, user="ada") == "PENDING", timeout_s=120)
    assert wait_until(lambda: state() == "queued", timeout_s=60)
    assert "in the queue" in clusterctl.expect(0, "status", "night")
    slurm.login.run(f"scontrol update JobId={number} StartTime=now+3", user="ada")
    assert wait_until(
        lambda: clusterctl.run("logs", "night")[1].count("attempt 2 begins") == 2, timeout_s=120
    )
    assert wait_until(lambda: state() == "running", timeout_s=60)
    slurm.login.run(f"touch {run_dir}/end", user="ada")
    assert wait_until(lambda: state() == "done", timeout_s=60)
    assert (
        {"queued", "running", "done"} <= set(states) <= {"queued", "starting", "joining", "running", "done"}
    ), states
    text = ended(followed, 0, timeout_s=60)
    assert text.index("attempt 1 begins") < text.index("attempt 2 begins") < text.index("the last word")
    clusterctl.expect(0, "wait", "night", has="done in", timeout_s=60)


def test_secrets_survive_a_requeue_by_slurm_and_are_on_no_disk_while_and_after_the_job_runs(slurm):
    """The launcher has exited. The job ends by SIGKILL, so that no script of it could clean up."""
    (slurm.folder / "wait.py").write_text(
        "import os, time\nprint('SEEN', len(os.environ['TOKEN']), flush=True)\ntime.sleep(600)\n"
    )
    slurm.clusterctl.env["TOKEN"] = "s3cret-value"
    slurm.login.run(f"rm -rf {HOME}/runs/kept")
    options = ["--name", "kept", "--nodes", "2", "--max-restarts", "2", "--env", "TOKEN", "--detach"]
    slurm.clusterctl.expect(0, "launch", *options, "--command", "wait.py", timeout_s=150)
    number = slurm.login.run("squeue -h -n kept -o %i", user="ada")

    def has(attempt):
        text = f"{HOME}/runs/kept/attempt-{attempt}/node-?.log"
        return slurm.login.run(f"cat {text} 2>/dev/null | grep -c 'SEEN 12' || true") == "2"

    def on_disk():
        return slurm.login.run(f"grep -rl s3cret-value {HOME}/runs 2>/dev/null || true")

    assert wait_until(lambda: has(1), timeout_s=120)
    assert on_disk() == ""
    slurm.login.run(f"scontrol requeue {number}", user="ada")
    state = "squeue -h -n kept -o %T"
    assert wait_until(lambda: slurm.login.run(state, user="ada") == "PENDING", timeout_s=120, pause_s=0.5)
    slurm.login.run(f"scontrol update JobId={number} StartTime=now+3", user="ada")
    assert wait_until(lambda: has(2), timeout_s=120, pause_s=0.5)
    slurm.login.run(f"scancel --full --signal=KILL {number}", user="ada")
    assert wait_until(lambda: slurm.login.run(state, user="ada") == "", timeout_s=120, pause_s=0.5)
    assert on_disk() == ""


MODULE = """module() {
    echo loading "$2"
    [ "$2" != none ] || { echo "there is no module $2" >&2; return 3; }
    export NCCL_MODULE="$2"
}
"""


def test_the_prologue_has_the_module_of_a_login_shell(slurm, testbed):
    """Containers get the variables that `pass_env` names, and /etc/profile, which batch jobs do not read, has it."""
    hosts = [testbed[name] for name in ("n0", "n1", "n2")]
    file = "/etc/profile.d/zz-clusterctl-test.sh"
    (slurm.folder / "sees.py").write_text(
        "import os; print('sees', os.environ['NCCL_MODULE'], os.environ['RANK'])\n"
    )
    command = ["--nodes", "2", "--command", "sees.py", "--workdir", str(slurm.folder)]
    try:
        for host in hosts:
            host.run(f"cat > {file} <<'END'\n{MODULE}END")
        slurm.login.run(f"rm -rf {HOME}/runs/modules {HOME}/runs/nomodule")
        load = ["launch", "--name", "modules", "--prologue", "module load cuda/12.4", "--logs", "all"]
        code, text = slurm.clusterctl.run(*load, *command)
        assert code == 0, text
        assert {f"sees cuda/12.4 {rank}" in text for rank in (0, 1)} == {True}, text
        code, text = slurm.clusterctl.run(
            "launch", "--name", "nomodule", "--prologue", "module load none", *command
        )
        assert code == 1, text
        said = "the prologue failed with exit code 3: module load none: loading none; there is no module none"
        assert said in " ".join(text.split()), text
    finally:
        for host in hosts:
            host.run(f"rm -f {file}")
