"""What 64 machines cost to start beside one: `clusterctl launch --detach`, and beside it `ssh HOST true` on each.

    python benchmarks/hosts.py

The machines are 64 addresses of one real sshd on this one, so that both ends of every connection, and all nodes'
scripts, share its processors: `ssh` says how much of the ratio is theirs. The program is a shell script.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.contract.sshd import Sshd, inventory  # noqa: E402

PROGRAM = "#!/bin/sh\ncase $1 in -c | -IS) exit 0 ;; esac\nexec sleep 300\n"


class Bench:
    """A folder that is common to all of the machines, as the launcher finds it."""

    def __init__(self, folder: Path, most: int, startups: str) -> None:
        self.server = Sshd(
            folder / "sshd", [f"127.0.2.{last}" for last in range(1, most + 1)], bare=True, startups=startups
        )
        self.work, remote = folder / "work", folder / "remote"
        self.work.mkdir()
        mirror = remote / "data" / str(self.work).lstrip("/")
        mirror.parent.mkdir(parents=True)
        mirror.symlink_to(self.work)
        inventory(self.work, self.server, remote)
        self.program = self.work / "program"
        self.program.write_text(PROGRAM)
        self.program.chmod(0o755)
        self.env = {**os.environ, "CLUSTERCTL_STATE_DIR": str(folder / "records"), "PYTHONPATH": str(ROOT)}

    def clusterctl(self, *arguments: str) -> None:
        """Run a verb; ends the benchmark when it fails."""
        argv = [sys.executable, "-m", "cluster", *arguments]
        done = subprocess.run(argv, cwd=self.work, env=self.env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(argv)}\n{done.stdout}{done.stderr}")

    def launch(self, hosts: int, name: str) -> tuple[float, float]:
        """Seconds until all scripts are started, and the launcher's own processor seconds in that."""
        cpu, began = _children_s(), time.monotonic()
        arguments = ["--nodes", str(hosts), "--python", str(self.program), "--command", "it.py", "--detach"]
        self.clusterctl("launch", "--name", name, *arguments)
        took_s = time.monotonic() - began, _children_s() - cpu
        self.clusterctl("stop", name)
        return took_s

    def ssh(self, hosts: int) -> float:
        """Seconds until `ssh HOST true` has ended for each, all at once; who is turned away tries again."""
        each = f"until ssh -F {self.server.config} $0 true 2> /dev/null; do sleep 0.$((RANDOM % 9 + 1)); done"
        began = time.monotonic()
        for process in [subprocess.Popen(["bash", "-c", each, f"h{host}"]) for host in range(hosts)]:
            process.wait()
        return time.monotonic() - began


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a line per round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--startups", default="200", help="sshd's MaxStartups; its default, 10:30:100, is for one machine, not for 64"
    )
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rows: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.hosts, options.startups)
        try:
            for nth in range(options.rounds):
                one, one_cpu = bench.launch(1, f"one-{nth}")
                ssh_one = bench.ssh(1)
                many, many_cpu = bench.launch(options.hosts, f"many-{nth}")
                ssh_many = bench.ssh(options.hosts)
                rows.append((one, many, many / one, one_cpu, many_cpu, ssh_one, ssh_many, ssh_many / ssh_one))
                print(_line(f"round {nth + 1}", rows[-1], options.hosts), flush=True)
        finally:
            bench.server.stop()
    print(_line("median", [statistics.median(column) for column in zip(*rows, strict=True)], options.hosts))
    print(f"load {os.getloadavg()[0]:.1f}")


def _line(name: str, row: tuple[float, ...] | list[float], hosts: int) -> str:
    one, many, ratio, one_cpu, many_cpu, ssh_one, ssh_many, ssh_ratio = row
    return (
        f"{name}: launch 1: {one:.2f} s, {hosts}: {many:.2f} s, ratio {ratio:.1f} (the launcher's CPU {one_cpu:.2f} "
        f"and {many_cpu:.2f} s);  ssh 1: {ssh_one:.2f} s, {hosts}: {ssh_many:.2f} s, ratio {ssh_ratio:.1f}"
    )


if __name__ == "__main__":
    main()
