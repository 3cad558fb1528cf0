"""Effective training time ratio of a job on the testbed with a fault every few minutes.

    make testbed
    python benchmarks/faults.py --minutes 60 --every 10

Two of the three hosts run the job, the third is a spare. A random fault hits a random host of the job, and is
undone a minute later. Every step costs a second and ends with a checkpoint.

The effective training time ratio is R * D / T. R is the number of steps that the job has reached, D the duration of a
step without faults, and T the time since the first step.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = "faults"
HEAL_AFTER_S = 60

PROGRAM = """
import json, os, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, node = dist.get_rank(), int(os.environ["GROUP_RANK"])
checkpoint = Path(os.environ["CLUSTER_RUN_DIR"], "last.pt")
done = torch.tensor([json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0])
dist.all_reduce(done, dist.ReduceOp.MAX)  # each node has a disk of its own
step = int(done)

def emit(event, **fields):
    content = {"event": event, "node": node, "time": time.time(), **fields}
    print("::cluster", json.dumps(content), flush=True)

emit("ready", rank=rank, world_size=dist.get_world_size(), backend="gloo", device="cpu")
while True:
    time.sleep(1)
    dist.all_reduce(torch.ones(1))
    step += 1
    partial = checkpoint.with_suffix(".tmp")
    partial.write_text(json.dumps({"step": step}))
    partial.replace(checkpoint)
    emit("progress", epoch=1, epochs=1, step=step, steps=10**6, loss=0, images_per_s=1, eta_s=0)
"""


class Testbed:
    """The three hosts and their faults."""

    def __init__(self) -> None:
        self.state = Path(os.environ.get("TESTBED_STATE", ROOT / "testbed" / ".state"))
        self.ssh_config = self.state / "ssh_config"
        text = self.ssh_config.read_text()
        self.addresses = dict(re.findall(r"Host (n\d)\n    HostName (\S+)", text))

    def fault(self, *words: str) -> None:
        """Run testbed/fault.sh."""
        subprocess.run([ROOT / "testbed" / "fault.sh", *words], check=True)

    def run(self, host: str, command: str) -> None:
        """Run a command on a host, whatever its exit code."""
        subprocess.run(["ssh", "-F", self.ssh_config, host, command], check=False)


FAULTS = {
    "kill a rank": lambda bed, host: bed.run(host, "pkill -9 -f 'python3 -u program.py'"),
    "kill a container": lambda bed, host: bed.run(host, f"docker kill {JOB}-{host} > /dev/null"),
    "kill a host": lambda bed, host: bed.fault("kill", host),
    "freeze a host": lambda bed, host: bed.fault("freeze", host),
    "cut a host off": lambda bed, host: bed.fault("cut", host),
    "drop SSH": lambda bed, host: bed.fault("drop-ssh", host),
    "restart the engine": lambda bed, host: bed.fault("restart-engine", host),
}


class Job:
    """The job's launcher, and its output of steps and attempts."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.folder = folder / "work"  # sync compares it with the hosts: no other files here
        self.folder.mkdir()
        self.log = folder / "launch.log"
        nodes = {
            name: {"address": address, "gpus": 1, "runtime": "docker", "run_dir": "/root/clusterctl/runs"}
            | {"data_dir": "/root/clusterctl/data"}
            for name, address in bed.addresses.items()
        }
        described = {"ssh_config": str(bed.ssh_config), "device": "cpu", "nodes": nodes}
        (self.folder / "cluster.yaml").write_text(json.dumps(described))
        (self.folder / "program.py").write_text(PROGRAM)
        self.environment = {**os.environ, "CLUSTERCTL_STATE_DIR": str(folder / "records")}
        self.call("sync", ".", check=True)
        self.output = self.log.open("w")
        command = [
            "launch",
            "--name",
            JOB,
            "--nodes",
            "2",
            "--gpus",
            "1",
            "--spares",
            "1",
            "--max-restarts",
            "1000",
        ]
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "cluster", *command, "--command", "program.py"],
            cwd=self.folder,
            env=self.environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def call(self, *words: str, check: bool = False) -> None:
        """Run clusterctl in the job's folder."""
        command = [sys.executable, "-m", "cluster", *words]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=check, stdout=subprocess.DEVNULL)

    def steps(self) -> list[tuple[float, int]]:
        """Return time and number of each step of the first node, over all attempts."""
        found = []
        for log in sorted(self.folder.glob(f"runs/{JOB}/attempt-*/*.log")):
            for line in log.read_text(errors="replace").splitlines():
                _, mark, text = line.partition("::cluster ")
                event = json.loads(text) if mark and text.endswith("}") else {}
                if event.get("event") == "progress" and event["node"] == 0:
                    found.append((event["time"], event["step"]))
        return sorted(found)

    def nodes(self) -> list[str]:
        """Return the hosts of the newest attempt."""
        attempts = re.findall(r"attempt \d+ on ([^\n]*?), \d+\.\d s after", self.log.read_text())
        return attempts[-1].split(", ") if attempts else ["n0", "n1"]


def main() -> None:
    """Run the job, inject the faults, print a table and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="minutes between two faults")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    bed = Testbed()
    bed.fault("heal")
    for host in bed.addresses:
        bed.run(host, f"rm -rf /root/clusterctl/runs/{JOB}")
    with tempfile.TemporaryDirectory() as name:
        job = Job(bed, Path(name))
        while not job.steps():
            assert job.launcher.poll() is None, job.log.read_text()
            time.sleep(1)
        began = time.time()
        injected = []
        while (due := began + (len(injected) + 1) * 60 * arguments.every) < began + 60 * arguments.minutes:
            time.sleep(max(0.0, due - time.time()))
            kind = chance.choice(list(FAULTS))
            host = chance.choice(job.nodes())
            before = job.steps()[-1][1]
            at = time.time()
            FAULTS[kind](bed, host)
            injected.append((kind, host, at, before))
            time.sleep(HEAL_AFTER_S)
            bed.fault("heal")
        time.sleep(max(0.0, began + 60 * arguments.minutes - time.time()))
        steps = job.steps()
        job.call("stop", JOB)
        job.launcher.wait(60)
        report(steps, injected)
        print(job.log.read_text()[-4000:], file=sys.stderr)


def report(steps: list[tuple[float, int]], injected: list[tuple[str, str, float, int]]) -> None:
    """Print the time that each fault cost, and the effective training time ratio."""
    usual = statistics.median(b[0] - a[0] for a, b in pairwise(steps))
    print("| fault | host | next step after | steps done again |\n|---|---|---|---|")
    for kind, host, at, before in injected:
        later = [(time_, step) for time_, step in steps if time_ > at]
        beyond = next((time_ for time_, step in later if step > before + 1), float("nan"))
        again = sum(step <= before for _, step in later)
        print(f"| {kind} | {host} | {beyond - at:.1f} s | {again} |")
    elapsed = steps[-1][0] - steps[0][0]
    reached = steps[-1][1] - steps[0][1]
    print(f"\n{reached} steps of {usual:.3f} s in {elapsed:.0f} s, {len(injected)} faults")
    print(f"effective training time ratio: {reached * usual / elapsed:.4f}")


if __name__ == "__main__":
    main()
