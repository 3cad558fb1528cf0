"""doctor against a real sshd on three loopback addresses."""

import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import pytest

from cluster import doctor
from cluster.errors import UsageError
from cluster.spec.model import Inventory
from cluster.transport import close_all
from tests.conftest import wait_until

WITHOUT_IMAGE = ("runtime", "versions", "link")


@pytest.fixture
def inventory(sshd, tmp_path):
    nodes = tuple(sshd.node(number, run_dir=str(tmp_path / f"runs of h{number}")) for number in range(3))
    yield Inventory(nodes, device="cpu")
    close_all()


def found(report, check):
    return {finding.node: finding for finding in report.findings if finding.check == check}


def test_probes_every_node_and_connects_each_pair(inventory, tmp_path):
    began = time.monotonic()
    report = doctor.examine(inventory, skip=WITHOUT_IMAGE)
    assert time.monotonic() - began < 60
    assert {finding.level for finding in found(report, "login").values()} == {"ok"}
    assert found(report, "reachable")["h1"].detail == "from h0, h2"
    assert {finding.level for finding in found(report, "run_dir").values()} == {"ok"}
    assert {finding.level for finding in found(report, "clock").values()} == {"ok"}
    # Several machines cannot use loopback addresses.
    assert {finding.level for finding in found(report, "address").values()} == {"failure"}
    assert f"{inventory.machines[0].address} is on lo" in found(report, "address")["h0"].detail
    assert list(tmp_path.glob("**/.clusterctl-doctor*")) == []
    assert list(tmp_path.glob("runs of *")) == []


def test_no_listener_remains(inventory, sshd):
    seen = set()
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(doctor.examine, inventory, skip=WITHOUT_IMAGE)
        while not report.done():
            seen |= set(_listeners(sshd))
            time.sleep(0.01)
    report.result()
    assert seen
    assert wait_until(lambda: not _listeners(sshd))


def _listeners(sshd):
    """Return the pids of listeners started through this sshd."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            login = re.search(rb"SSH_CONNECTION=.* (\d+)\0", (folder / "environ").read_bytes() + b"\0")
        except OSError:
            continue
        ours = login is not None and int(login[1]) == sshd.port
        if ours and words[0].endswith(b"python3") and any(b"listener.listen(" in word for word in words):
            found.append(folder.name)
    return found


def test_different_data_fails_and_a_missing_folder_is_an_error(inventory, tmp_path):
    nodes = tuple(
        replace(node, data_dir=str(tmp_path / "data of" / node.name)) for node in inventory.machines
    )
    inventory = replace(inventory, machines=nodes)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("a")
    skip = (*doctor.CHECKS, "reachable", "link")
    report = doctor.examine(inventory, skip=skip, data=[str(tmp_path / "set")])
    assert {finding.level for finding in found(report, "data").values()} == {"failure"}
    assert found(report, "data")["h2"].fix == f"clusterctl sync {tmp_path / 'set'}"
    with pytest.raises(UsageError, match="no such set"):
        doctor.examine(inventory, skip=skip, data=[str(tmp_path / "no such set")])


def test_changed_host_key_fails_one_node_and_others_are_checked(inventory, sshd):
    other = " ".join((sshd.folder / "user.pub").read_text().split()[:2])
    lines = sshd.known_hosts.read_text().splitlines()
    sshd.known_hosts.write_text(
        "\n".join([lines[0], f"[{sshd.addresses[1]}]:{sshd.port} {other}", lines[2], ""])
    )
    report = doctor.examine(inventory, skip=WITHOUT_IMAGE)
    login = found(report, "login")
    assert [node for node, finding in login.items() if finding.level == "failure"] == ["h1"]
    assert "its host key is not the one in known_hosts" in login["h1"].detail
    assert "ssh-keygen -R" in login["h1"].fix
    assert found(report, "reachable")["h0"].detail == "from h2"
    assert doctor.exit_code(report.findings) == 5


def test_run_dir_that_cannot_be_created_or_has_shell_characters(inventory, tmp_path):
    (tmp_path / "a file").write_text("")
    runs = [str(tmp_path / "a file" / "runs"), str(tmp_path / "a'; touch $HOME `id` \\"), str(tmp_path)]
    nodes = tuple(replace(node, run_dir=run) for node, run in zip(inventory.machines, runs, strict=True))
    report = doctor.examine(replace(inventory, machines=nodes), skip=(*WITHOUT_IMAGE, "reachable"))
    levels = {node: finding.level for node, finding in found(report, "run_dir").items()}
    assert levels == {"h0": "failure", "h1": "ok", "h2": "ok"}
    assert "Not a directory" in found(report, "run_dir")["h0"].detail


def test_processes_of_an_unknown_job_are_orphans(inventory, job_name):
    launch_id = token_hex(8)
    variables = {"CLUSTER_JOB_ID": job_name, "CLUSTER_LAUNCH_ID": launch_id, "CLUSTER_BACKEND": "ssh"}
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, **variables, "CLUSTER_ATTEMPT": "1"})
    try:
        report = doctor.examine(inventory, skip=(*WITHOUT_IMAGE, "reachable"))
        assert job_name in found(report, "orphans")["h0"].detail
        report = doctor.examine(
            inventory, skip=(*WITHOUT_IMAGE, "reachable"), supervised=frozenset({launch_id})
        )
        assert f"orphans of {job_name}" not in found(report, "orphans")["h0"].detail
    finally:
        child.kill()
        child.wait()


def test_unknown_check_is_an_error_that_lists_the_checks(inventory):
    with pytest.raises(UsageError, match="--skip links: unknown check") as refused:
        doctor.examine(inventory, skip=["links"])
    assert "link" in refused.value.hint
    with pytest.raises(UsageError, match="--skip login: unknown check"):
        doctor.examine(inventory, skip=["login"])


SKIP = [f"--skip={check}" for check in WITHOUT_IMAGE]


def test_command_groups_equal_findings_and_prints_a_fix_per_failure(sshd, clusterctl, tmp_path):
    names = "".join(f"  h{index}: {{address: {address}}}\n" for index, address in enumerate(sshd.addresses))
    where = f"ssh_config: {sshd.config}\ndevice: cpu\ndefaults: {{runtime: none, run_dir: {tmp_path}}}\n"
    (tmp_path / "cluster.yaml").write_text(f"{where}nodes:\n{names}")
    code, text = clusterctl.run("doctor", *SKIP)
    assert (code, "error: " in text) == (3, False)
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith("ok   login")]) == 1
    assert "all" in next(line for line in lines if line.startswith("ok   login"))
    failures = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert len(failures) == 3
    assert all(lines[index + 1].lstrip().startswith("fix: ") for index in failures)
    assert "3 would stop a launch" in lines[-1]
    assert "\x1b" not in text

    report = json.loads(clusterctl.run("doctor", *SKIP, "--json", "--only", "h0")[1])
    nodes = {finding["node"] for finding in report["findings"]}
    assert (report["exit_code"], nodes) == (0, {"h0", "this machine"})
    sshd.known_hosts.write_text("")
    assert clusterctl.run("doctor", *SKIP, "--json")[0] == 5


def test_command_without_inventory_suggests_init(clusterctl):
    code, text = clusterctl.run("doctor")
    assert (code, "Traceback" in text) == (2, False)
    assert "hint: clusterctl init" in text
