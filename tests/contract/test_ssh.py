"""The ssh backend with a real sshd: preflight checks, secrets, orphans, restarts, results."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import pytest
import yaml

import cluster
from cluster.backends import BACKENDS
from cluster.backends.node_monitor import LOST_AFTER_S
from cluster.store import JobStore
from tests.conftest import ended, processes_of, wait_until
from tests.contract.sshd import TICKS, inventory

SECRET = f"{token_hex(16)} 'and' $more"


@pytest.fixture
def machines(clusterctl, sshd):
    """Return the command line in a folder with a cluster.yaml of three machines and a program."""
    shutil.copy(TICKS, clusterctl.folder)
    inventory(clusterctl.folder, sshd, clusterctl.folder / "remote")
    return clusterctl


@pytest.fixture
def launch(job_name):
    """Return the arguments that launch a program as this test's job."""

    def arguments(program, *options, name=job_name, nodes=2):
        words = ["launch", "--name", name, "--nodes", str(nodes), "--python", sys.executable]
        return [*words, *options, "--command", program]

    return arguments


@pytest.fixture
def run(machines, launch):
    """Launch a program, wait for its end, and return the output (see Clusterctl.expect)."""

    def run(*program, code=0, has="", timeout_s=120, **more):
        return machines.expect(code, *launch(*program, **more), has=has, timeout_s=timeout_s)

    return run


def kill_a_rank(job):
    ranks = [pid for pid in processes_of(job) if b"LOCAL_RANK=" in variables_of(pid)]
    os.kill(ranks[0], signal.SIGKILL)


def variables_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        return b""


def describe(machines, nodes):
    """Change keys of nodes in cluster.yaml."""
    file = machines.folder / "cluster.yaml"
    described = yaml.safe_load(file.read_text())
    for name, keys in nodes.items():
        described["nodes"][name] |= keys
    file.write_text(yaml.safe_dump(described))


@pytest.mark.parametrize(("here", "nodes"), [(0, 1), (0, 2), (1, 2)], ids=["alone", "first", "last"])
def test_this_machine_may_be_one_of_the_machines(machines, here, nodes, run, job_name):
    own = machines.folder / "own"
    describe(machines, {f"node-{here}": {"login": "", "run_dir": str(own)}})
    (machines.folder / "show.py").write_text(
        "import os, pathlib\n"
        "print('here is rank', os.environ['RANK'], flush=True)\n"
        "pathlib.Path(os.environ['CLUSTER_RUN_DIR'], 'result-' + os.environ['RANK']).touch()\n"
    )
    text = run("show.py", "--logs", "all", nodes=nodes)
    assert (own / job_name / f"result-{here}").exists()
    collected = machines.folder / "runs" / job_name
    assert (collected / "result-0").exists()
    for rank in range(nodes):
        assert f"node-{rank} | here is rank {rank}" in text
        (log,) = (collected / "attempt-1" / "ranks" / f"node-{rank}").glob("*.log")
        assert log.read_text() == f"here is rank {rank}\n"
    taken = f"{job_name}-taken"
    (own / taken).mkdir()
    run("show.py", name=taken, nodes=nodes, code=2, has=f"node-{here}: {own}/{taken} already exists")


def test_secrets_reach_the_program_and_nothing_else(machines, run):
    (machines.folder / "show.py").write_text(
        "import contextlib, os, pathlib\n"
        "commands = b''\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    with contextlib.suppress(OSError):\n"
        "        commands += path.read_bytes()\n"
        "token = os.environ['TOKEN']\n"
        "print('seen', token == os.environ['EXPECTED'], token.split()[0].encode() in commands)\n"
    )
    (machines.folder / "tokens.env").write_text(f"EXPECTED={SECRET}\n")
    machines.env["TOKEN"] = SECRET
    run("show.py", "--env", "TOKEN", "--env-file", "tokens.env", nodes=1, has="seen True False")
    for ours in ("tokens.env", "show.py"):
        (machines.folder / ours).unlink()
    kept = [
        path
        for path in machines.folder.rglob("*")
        if path.is_file() and SECRET.split()[0].encode() in path.read_bytes()
    ]
    assert kept == []
    assert list(machines.folder.rglob("*.secrets")) == []


HOSTILE = ["a'; echo foo", 'a"=0"', "one\ntwo", "$HOME `id` \\", "@rank@ {run} $$", "ünïcode -n"]


def test_hostile_strings_arrive_as_they_are(machines, sshd, run, job_name):
    folder = machines.folder / "it's $here `now`"
    folder.mkdir()
    (folder / "show.py").write_text(
        "import json, os, sys\n"
        "seen = [sys.argv[1:], os.environ['HOSTILE'], os.environ['SECRET']]\n"
        "open('seen', 'w').write(json.dumps(seen))\n"
    )
    machines.folder = folder
    inventory(folder, sshd, folder / "remote's $place")
    machines.env["SECRET"] = HOSTILE[2]
    quoted = " ".join(f"'{text}'" if "'" not in text else f'"{text}"' for text in HOSTILE)
    run(f"show.py {quoted}", "--env", f"HOSTILE={''.join(HOSTILE)}", "--env", "SECRET", nodes=1)
    seen = folder / "runs" / job_name / "workdir" / "seen"
    assert json.loads(seen.read_text()) == [HOSTILE, "".join(HOSTILE), HOSTILE[2]]


def test_failed_checks_are_named_for_every_node_and_nothing_is_started(machines, sshd, run, job_name):
    file = inventory(machines.folder, sshd, Path("/proc/nowhere"))
    text = run("ticks.py", nodes=3, code=2)
    for node in ("node-0", "node-1", "node-2"):
        assert f"{node}: cannot write to the run directory /proc/nowhere" in text
    assert file.exists()
    assert not (machines.folder / "runs").exists()
    assert processes_of(job_name) == []


def test_one_machine_that_does_not_answer_stops_the_launch_on_all(machines, run, job_name):
    describe(machines, {"node-2": {"login": "nowhere.invalid"}})
    run("ticks.py", nodes=3, code=5, has=": the host name nowhere.invalid does not resolve")
    assert processes_of(job_name) == []
    assert not (machines.folder / "remote" / job_name).exists()


def test_a_name_that_another_launching_machine_has_used_is_refused(machines, run, job_name):
    (machines.folder / "remote" / job_name).mkdir(parents=True)
    run("ticks.py --ticks 1", code=2, has=f"remote/{job_name} already exists")


def test_more_gpus_than_a_node_has_is_an_error_with_its_name(machines, sshd, run):
    inventory(machines.folder, sshd, machines.folder / "remote", gpus=1)
    any_device = ["--device", "any"]
    run(
        "ticks.py", "--gpus", "2", *any_device, code=2, has="node-0: --gpus 2 asks for more than its GPUs (1)"
    )
    run(
        "ticks.py",
        "--gpus",
        "1,1,1",
        *any_device,
        code=2,
        has="--gpus 1,1,1: 3 numbers, but the job has 2 nodes",
    )
    run("ticks.py", nodes=4, code=2, has="has only node-0, node-1, node-2")


def test_a_job_from_python_is_listed_by_the_command_line(machines, monkeypatch, job_name, caplog):
    monkeypatch.chdir(machines.folder)
    monkeypatch.setenv("CLUSTERCTL_STATE_DIR", machines.env["CLUSTERCTL_STATE_DIR"])
    options = {"python": sys.executable, "name": job_name, "secrets": {"MODE": "true"}}
    job = cluster.launch(command="ticks.py --ticks 1", nodes=2, **options)
    assert "--env MODE: the value is shorter than four characters or a common word" in caplog.text
    assert json.loads(machines.run("ps", "--json")[1])[0]["job"] == job_name
    ended = job.wait()
    assert (ended.outcome, ended.exit_code) == ("done", 0), ended
    assert "tick 0: rank 1 of 2" in (Path(job.run_dir) / "attempt-1" / "node-1.log").read_text()
    assert processes_of(job_name) == []


def test_wait_follows_the_attempt_that_another_process_has_started(machines, monkeypatch, job_name):
    monkeypatch.chdir(machines.folder)
    monkeypatch.setenv("CLUSTERCTL_STATE_DIR", machines.env["CLUSTERCTL_STATE_DIR"])
    command = "ticks.py --ticks-later 60"
    job = cluster.launch(command=command, nodes=2, python=sys.executable, name=job_name, max_restarts=1)
    attach = machines.start("attach", job_name)
    machines.wait_for(job_name, "tick 1")
    kill_a_rank(job_name)
    second = Path(job.run_dir) / "attempt-2" / "node-0.log"
    assert wait_until(lambda: second.exists() and "tick 1" in second.read_text(), timeout_s=60)
    attach.send_signal(signal.SIGINT)
    ended(attach, 130, has="keeps running")
    assert job.wait().outcome == "done"
    assert not second.parents[1].joinpath("attempt-3").exists()


def test_another_process_counts_the_restarts_of_the_one_before(machines, launch, job_name):
    """`attach` follows a job whose launcher was killed during the second attempt."""
    program = "ticks.py --ticks 1000 --every 0.5"
    launcher = machines.start(*launch(program, "--max-restarts", "1"))
    machines.wait_for(job_name, "tick 1", node="node-1")
    kill_a_rank(job_name)
    for line in launcher.stdout:
        if "attempt 2 on" in line:
            break
    machines.wait_for(job_name, "tick 1", attempt=2)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    attach = machines.start("attach", job_name)
    for line in attach.stdout:
        if "tick" in line:
            break
    kill_a_rank(job_name)
    text = ended(attach, 1, has="not restarted: it was restarted 1 times (--max-restarts)")
    assert "restart 1 of 1" not in text
    assert processes_of(job_name) == []


def test_another_process_remembers_the_error_of_the_attempt_before(machines, launch, job_name):
    launcher = machines.start(*launch("ticks.py --fail-at 8 --every 0.5", "--max-restarts", "5"))
    for line in launcher.stdout:
        if "attempt 2 on" in line:
            break
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    text = machines.expect(1, "attach", job_name, has="not restarted: it failed before its first step twice")
    assert "restart 2 of 5" not in text
    assert processes_of(job_name) == []


def test_a_node_is_stopped_by_its_attempt(machines, run, job_name):
    """The clean-up of a silent machine may reach it after the next attempt has started there."""
    run("ticks.py", "--detach", nodes=1)
    assert wait_until(
        lambda: any(b"LOCAL_RANK=" in variables_of(pid) for pid in processes_of(job_name)), timeout_s=60
    )
    record = JobStore(Path(machines.env["CLUSTERCTL_STATE_DIR"])).load(job_name)
    backend = BACKENDS[record.plan.backend]
    running = processes_of(job_name)
    assert all(b"CLUSTER_ATTEMPT=1\0" in variables_of(pid) for pid in running if variables_of(pid))
    backend.cancel(replace(record.plan, attempt=2), grace_s=0.5, only_attempt=True)
    assert {*running} <= {*processes_of(job_name)}
    backend.cancel(record.plan, grace_s=0.5, only_attempt=True)
    assert processes_of(job_name) == []


def test_a_program_that_fails_twice_with_the_same_error_is_not_restarted_again(machines, run, job_name):
    text = run("ticks.py --fail-at 0", "--max-restarts", "5", timeout_s=250, code=1)
    assert text.count("restart 1 of 5") == 1
    assert "restart 2 of 5" not in text
    assert "twice" in text
    assert text.count("Traceback") == 1
    assert processes_of(job_name) == []


def test_a_suspended_launcher_waits_for_its_network_and_keeps_the_job(machines, sshd, launch, job_name):
    process = machines.start(*launch("ticks.py --ticks 20 --every 1"))
    machines.wait_for(job_name, "tick 1", node="node-1")
    process.send_signal(signal.SIGSTOP)
    time.sleep(LOST_AFTER_S + 2)
    sshd.stop()
    process.send_signal(signal.SIGCONT)
    time.sleep(4)
    sshd.start()
    text = ended(process, 0)
    assert "lost" not in text
    assert "tick 19: rank 0 of 2" in text
    assert processes_of(job_name) == []


@pytest.mark.parametrize(("nodes", "restarts"), [(1, 0), (1, 1), (2, 1)])
def test_a_launcher_that_loses_its_network_keeps_the_job(machines, sshd, launch, job_name, nodes, restarts):
    process = machines.start(
        *launch("ticks.py --ticks 20 --every 1", "--max-restarts", str(restarts), nodes=nodes)
    )
    machines.wait_for(job_name, "tick 1", node=f"node-{nodes - 1}")
    sshd.stop()
    time.sleep(LOST_AFTER_S + 5)
    sshd.start()
    text = ended(process, 0, has="the machines answer again; the job kept running")
    assert "restart" not in text
    assert [text.count(f"tick {tick}: rank 0 of {nodes}") for tick in range(20)] == [1] * 20
    assert processes_of(job_name) == []


@pytest.fixture
def silent(machines, sshd):
    """Return a file that cuts off node-1 while it exists. Its ranks go on."""
    file = machines.folder / "silent"
    sshd.before_each_command(1, f"[ ! -e {file} ] || kill -9 $PPID")
    return file


def test_a_machine_behind_a_dead_link_keeps_its_ranks(machines, silent, launch, job_name):
    process = machines.start(*launch("ticks.py --ticks 20 --every 1", "--max-restarts", "1"))
    machines.wait_for(job_name, "tick 1", node="node-1")
    silent.touch()
    for line in process.stdout:
        if "no answer from node-1: waiting" in line:
            break
    silent.unlink()
    text = ended(process, 0, has="the machines answer again; the job kept running")
    assert "restart" not in text
    assert processes_of(job_name) == []


def test_a_spare_does_not_replace_a_machine_with_which_the_job_makes_steps(
    machines, silent, launch, job_name
):
    (machines.folder / "steps.py").write_text(
        "import json, os, time\n"
        "rank = int(os.environ['RANK'])\n"
        "for step in range(20):\n"
        "    for event in [{'event': 'ready'}] if step == 0 else [{'event': 'progress', 'epoch': 1, 'step': step}]:\n"
        "        print('::cluster', json.dumps(event | {'node': rank, 'time': time.time()}), flush=True)\n"
        "    print('step', step, flush=True)\n"
        "    time.sleep(1)\n"
    )
    process = machines.start(*launch("steps.py", "--max-restarts", "1", "--spares", "1"))
    machines.wait_for(job_name, "step 1", node="node-1")
    silent.touch()
    for line in process.stdout:
        if "no answer from node-1: waiting" in line:
            break
    for line in process.stdout:
        if "step 15" in line:
            break
    silent.unlink()
    assert "restart" not in ended(process, 0)
    assert processes_of(job_name) == []


def test_attach_after_the_network_is_back_finds_the_job_running(machines, sshd, run, job_name):
    run("ticks.py --ticks 40 --every 1", "--detach", nodes=1)
    log = machines.folder / "remote" / job_name / "attempt-1" / "node-0.log"
    assert wait_until(lambda: log.exists() and "tick 1" in log.read_text(), timeout_s=60)
    sshd.stop()
    machines.expect(5, "attach", job_name, has="the job may still be running")
    sshd.start()
    machines.expect(0, "attach", job_name, has="done in")
    assert processes_of(job_name) == []


def test_an_attempt_that_does_not_start_counts_as_a_restart(machines, sshd, run, job_name):
    """The SSH connection ends at the command that starts the second attempt; new ones are refused for 6 s."""
    broken = machines.folder / "broken"
    sshd.before_each_command(
        1,
        f"now=$(date +%s); until=$(cat {broken} 2>/dev/null || echo 0)\n"
        'case "$(tr -d " " <<< "${SSH_ORIGINAL_COMMAND##* bash }" | base64 -d 2>/dev/null)" in\n'
        f'  *attempt-2*" start") [ -e {broken} ] || {{ until=$((now + 6)); echo $until > {broken}; }} ;;\n'
        "esac\n"
        '[ "$now" -ge "$until" ] || kill -9 $PPID',
    )
    (machines.folder / "once.py").write_text(
        "import os, sys\n"
        "if os.environ['CLUSTER_ATTEMPT'] == '1' and os.environ['RANK'] == '1':\n"
        "    sys.exit('the first time it fails')\n"
    )
    text = run("once.py", "--max-restarts", "3", timeout_s=250, has="restart 1 of 3")
    assert "the job could not be restarted: node-1" in text
    assert "restart 2 of 3" in text
    assert "attempt 3 on node-0, node-1" in text
    assert processes_of(job_name) == []


@pytest.fixture
def keeping(machines, sshd):
    """Return machines with separate disks and a program that writes checkpoints, and a file that cuts off node-0."""
    describe(
        machines, {f"node-{rank}": {"run_dir": f"{machines.folder}/disks/node-{rank}"} for rank in range(3)}
    )
    (machines.folder / "keep.py").write_text(
        "import json, os, pathlib, sys, time\n"
        "last = pathlib.Path(os.environ['CLUSTER_RUN_DIR'], 'last.pt')\n"
        "if os.environ['CLUSTER_ATTEMPT'] != '1':\n"
        "    sys.exit(print('resumes from', last.read_text()))\n"
        "last.write_text('epoch 7')\n"
        "last.with_name('data').symlink_to('/etc')\n"  # it is left out, and nothing else
        "event = {'event': 'progress', 'node': 0, 'time': time.time(), 'epoch': 7, 'step': 3}\n"
        "print('::cluster ' + json.dumps(event), flush=True)\n"
        "print('kept', flush=True)\n"
        "time.sleep(900)\n"
    )
    silent = machines.folder / "silent"
    # Late, so that it has answered a ping: it is lost nevertheless.
    sshd.before_each_command(0, f"[ ! -e {silent} ] || {{ sleep 1.5; kill -9 $PPID; }}")
    return machines, silent


def test_a_restart_waits_for_the_machine_with_the_only_checkpoint(keeping, launch, job_name):
    machines, silent = keeping
    process = machines.start(*launch("keep.py", "--spares", "1", "--max-restarts", "1", nodes=1))
    machines.wait_for(job_name, "kept")
    silent.touch()
    for pid in processes_of(job_name):
        with contextlib.suppress(ProcessLookupError):  # the agent's ranks end with it
            os.kill(pid, signal.SIGKILL)
    for line in process.stdout:
        if "has a checkpoint: waiting for node-0" in line:
            break
    silent.unlink()
    text = ended(process, 0, timeout_s=200, has="copied the newest checkpoint from node-0 to node-1")
    assert "resumes from epoch 7" in text


def test_results_of_a_lost_master_are_collected_from_another_node(keeping, launch, job_name):
    machines, silent = keeping
    process = machines.start(*launch("keep.py"))
    for node in ("node-0", "node-1"):
        machines.wait_for(job_name, "kept", node=node)
    silent.touch()
    ended(process, 1, timeout_s=200, has="the results here come from node-1")
    silent.unlink()
    assert (machines.folder / "runs" / job_name / "last.pt").read_text() == "epoch 7"
    assert machines.run("stop", job_name)[0] == 0
    assert processes_of(job_name) == []


def test_ctrl_c_of_attach_during_a_restart_keeps_the_restart(machines, run, job_name):
    folder = machines.folder / "disk-1"
    describe(machines, {"node-1": {"run_dir": str(folder)}})
    (machines.folder / "variables.env").write_text("")
    words = ("--max-restarts", "1", "--detach", "--env-file", "variables.env")
    run("ticks.py --ticks-later 5", *words)
    attached = machines.start("attach", job_name)
    machines.wait_for(job_name, "tick 1", node="node-1")
    folder.rename(f"{folder}-gone")
    folder.touch()  # not writable
    for line in attached.stdout:
        if "restart 1 of 1" in line:
            break
    attached.send_signal(signal.SIGINT)
    ended(attached, 130, timeout_s=60, has=f"detached; {job_name} keeps running")
    folder.unlink()
    machines.expect(0, "wait", job_name)
    machines.wait_for(job_name, "tick 4: rank 0 of 2", attempt=2)
    copy = folder / job_name / "workdir"  # the node lost its copy, and got another one
    assert (copy / "ticks.py").exists()
    assert not (copy / "variables.env").exists()
    assert processes_of(job_name) == []


def test_a_spare_held_by_another_job_is_not_used(machines, run, launch, job_name):
    disks = machines.folder / "disks"
    # All nodes are this machine. No other test uses these GPU ids.
    for name, gpus in (("node-0", [10, 11]), ("node-1", [12, 13]), ("node-2", [14, 15])):
        describe(machines, {name: {"gpus": gpus, "run_dir": str(disks / name)}})
    holder = f"{job_name}-holder"
    run("ticks.py", "--only", "node-2", "--detach", name=holder, nodes=1)
    words = ["--spares", "1", "--max-restarts", "1", "--gpus", "2"]
    process = machines.start(*launch("ticks.py --ticks-later 5", *words, nodes="1:2"))
    try:
        machines.wait_for(job_name, "tick 1", node="node-1")
        (disks / "node-1").rename(disks / "gone")
        (disks / "node-1").touch()  # not writable
        text = ended(process, 0)
    finally:
        assert machines.run("stop", holder)[0] == 0
    assert f"spare not usable: node-2: job {holder} is using its GPUs" in text
    assert "attempt 2 on node-0," in text


@pytest.mark.parametrize(
    ("gpus", "ids"),
    [("2,1", {"node-2": [43, 44], "node-0": [41]}), ("all", {"node-1": [42], "node-2": [43, 44]})],
)
def test_a_waiting_job_gets_machines_for_its_unequal_nodes(machines, run, launch, job_name, gpus, ids):
    """One GPU of the first machine is in use."""
    for name, own in (("node-0", [40, 41]), ("node-1", [42]), ("node-2", [43, 44])):
        describe(machines, {name: {"gpus": own, "run_dir": str(machines.folder / "disks" / name)}})
    holder = f"{job_name}-holder"
    run("ticks.py", "--only", "node-0", "--device", "any", "--detach", name=holder, nodes=1)
    try:
        run("ticks.py --ticks 1", "--device", "any", "--gpus", gpus, "--wait", "60s")
    finally:
        assert machines.run("stop", holder)[0] == 0
    record = json.loads((machines.folder / "records" / f"{job_name}.json").read_text())
    assert {node["name"]: node["gpus"] for node in record["plan"]["nodes"]} == ids
    first = machines.folder / "runs" / job_name / "attempt-1" / "ranks" / next(iter(ids)) / "0.log"
    assert f"rank 0 of {sum(map(len, ids.values()))}" in first.read_text()


@pytest.mark.parametrize(
    ("gpus", "options", "nodes", "names", "numbers"),
    [
        ("2,1", ["--spares", "1"], "2", ["node-2", "node-1"], [2, 1]),
        ("all", ["--spares", "1"], "2", ["node-2", "node-1"], [3, 1]),
        ("2,1", [], "1:2", ["node-1"], [1]),
    ],
    ids=["spare", "spare of its own size", "fewer"],
)
def test_unequal_nodes_restart_with_their_own_numbers(
    machines, launch, job_name, gpus, options, nodes, names, numbers
):
    """After the loss of the first node, which had two ranks."""
    disks = machines.folder / "disks"
    for name, ids in (("node-0", [20, 21]), ("node-1", [22]), ("node-2", [23, 24, 25])):
        describe(machines, {name: {"gpus": ids, "run_dir": str(disks / name)}})
    words = ["--device", "any", "--max-restarts", "1", "--gpus", gpus, "--logs", "all", *options]
    process = machines.start(*launch("ticks.py --ticks-later 2", *words, nodes=nodes))
    machines.wait_for(job_name, "tick 1", node="node-1")
    (disks / "node-0").rename(disks / "gone")
    (disks / "node-0").touch()  # not writable
    text = ended(process, 0)
    world = sum(numbers)
    assert f"attempt 2 on {', '.join(names)}," in text
    assert " rank 2 of 3" in text
    later = machines.folder / "runs" / job_name / "attempt-2" / "ranks"
    first = 0
    for name, number in zip(names, numbers, strict=True):
        found = [path.read_text() for path in sorted((later / name).glob("*.log"))]
        assert len(found) == number
        for local, lines in enumerate(found):
            assert f"rank {first + local} of {world}" in lines
        first += number
    record = json.loads((machines.folder / "records" / f"{job_name}.json").read_text())
    assert [len(node["gpus"]) for node in record["plan"]["nodes"]] == numbers


@pytest.mark.parametrize(("there", "here"), [(0o077, 0o022), (0o002, 0o002), (0o002, 0o077)])
def test_files_have_the_umask_of_the_login_there_and_of_the_launcher_here(
    machines, run, sshd, job_name, there, here
):
    """A copy never has more permissions than the file on the node."""
    sshd.before_each_command(0, f"umask {there:o}")
    (machines.folder / "write.py").write_text(
        "import os, pathlib\nrun = pathlib.Path(os.environ['CLUSTER_RUN_DIR'])\n(run / 'out').mkdir()\n"
        "(run / 'out' / 'file').touch()\nassert 'TOKEN' in os.environ\n"
    )
    machines.env["TOKEN"] = SECRET
    mask = os.umask(here)
    try:
        run("write.py", "--env", "TOKEN", nodes=1)
    finally:
        os.umask(mask)
    remote = machines.folder / "remote" / job_name
    local = machines.folder / "runs" / job_name
    for top, denied in ((remote, there), (local, there | here)):
        for name in ("out/file", "attempt-1/ranks/node-0/0.log"):
            assert (top / name).stat().st_mode & 0o777 == 0o666 & ~denied, (top, name)
        assert (top / "out").stat().st_mode & 0o777 == 0o777 & ~denied, top
    assert (local / "report.html").stat().st_mode & 0o777 == 0o666 & ~here
    assert (remote / "attempt-1").stat().st_mode & 0o777 == 0o777 & ~there
    assert not (remote / "attempt-1" / "node-0.secrets").exists()


def test_the_prologues_of_the_cluster_and_of_the_job_reach_the_program(machines, run):
    """Also the preflight check runs them, so that it finds the interpreter that they put into PATH."""
    text = "import os; print('sees', os.environ['FIRST'], os.environ['LAST'])\n"
    (machines.folder / "sees.py").write_text(text)
    (machines.folder / "bin").mkdir()
    for name in ("python3", "mypython"):
        (machines.folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (machines.folder / "bin" / name).chmod(0o755)
    file = machines.folder / "cluster.yaml"
    lines = f"module() {{ PATH={machines.folder}/bin:$PATH; export FIRST=$1 LAST=$1; }}\nmodule use"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "prologue": lines}))
    python = ["--python", "mypython"]
    assert "sees use job" in run("sees.py", "--prologue", "export LAST=job", *python, "--logs", "all")
    text = run("sees.py", "--prologue", "module; (exit 9)", code=2, name="fails")
    assert text.count("the prologue failed with exit code 9") == 2, text  # for each machine
    doctor = machines.run("doctor", "--only", "node-0", "--skip", "here")[1]
    assert "with torch" in doctor
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "prologue": "false"}))
    doctor = machines.run("doctor", "--only", "node-0", "--skip", "here")[1]
    assert "the prologue failed with exit code 1: false" in " ".join(doctor.split())
