"""How late the first line of rank 0 comes on two machines: `clusterctl launch` beside `ssh` and `torchrun` by hand.

    python benchmarks/launch.py [--deepspeed venv/bin/deepspeed]

The machines are two addresses of a real sshd on this one; no containers. The contenders take turns. Two times each,
from the command's start: when the script of rank 0 runs, and when its first line is on the screen. Then how long
`clusterctl plan` and `--help` take.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.contract.sshd import Sshd, inventory  # noqa: E402

PROBE = 'import os, time\nif os.environ["RANK"] == "0":\n    print("first", time.time(), flush=True)\n'
BY_HAND = r"""
torchrun() {
    ssh -F "$1" "h$2" "cd $3 && OMP_NUM_THREADS=1 $4 -m torch.distributed.run --nnodes 2 --nproc_per_node 1 \
        --node_rank $2 --master_addr 127.0.1.1 --master_port $5 probe.py"
}
torchrun "$1" 1 "$2" "$3" "$4" &
torchrun "$1" 0 "$2" "$3" "$4"
wait
"""


class Bench:
    """Two machines, and a folder with the probe that both have."""

    def __init__(self, folder: Path) -> None:
        self.server = Sshd(folder / "sshd", ["127.0.1.1", "127.0.1.2"], bare=True)
        self.work, self.empty, remote = folder / "work", folder / "empty", folder / "remote"
        for made in (self.work, self.empty, folder / "bin"):
            made.mkdir()
            (made / "probe.py").write_text(PROBE)
        mirror = remote / "data" / str(self.work).lstrip("/")
        mirror.parent.mkdir(parents=True)
        mirror.symlink_to(self.work)
        inventory(self.work, self.server, remote)
        (self.work / "hostfile").write_text("h0 slots=1\nh1 slots=1\n")
        # What takes no ssh_config gets an `ssh` that does.
        (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.server.config} "$@"\n')
        (folder / "bin" / "ssh").chmod(0o755)
        self.env = {
            **os.environ,
            "CLUSTERCTL_STATE_DIR": str(folder / "records"),
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        self.clusterctl = [sys.executable, "-m", "cluster"]

    def ours(self) -> list[str]:
        """Our command, as a user types it."""
        return [*self.clusterctl, "launch", "--nodes", "2", "--command", "probe.py", "--python", sys.executable]

    def by_hand(self) -> list[str]:
        """Two ssh with a torchrun each."""
        with socket.socket() as probe:
            probe.bind(("127.0.1.1", 0))
            port = str(probe.getsockname()[1])
        return ["bash", "-c", BY_HAND, "by-hand", str(self.server.config), str(self.work), sys.executable, port]

    def first_line(self, argv: list[str]) -> tuple[float, float]:
        """Seconds until rank 0's script ran, and until its first line was read from the command's output."""
        began = time.time()
        process = subprocess.Popen(
            argv,
            cwd=self.work,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if "first " in line:
                    ran, seen = float(line.rpartition("first ")[2].split()[0]) - began, time.time() - began
                    process.stdout.read()
                    process.wait()
                    return ran, seen
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        sys.exit(f"{' '.join(argv)}\n{''.join(said)}")

    def time(self, *arguments: str, cwd: Path) -> float:
        """Seconds that a verb of ours takes."""
        began = time.monotonic()
        subprocess.run([*self.clusterctl, *arguments], cwd=cwd, env=self.env, check=True, capture_output=True)
        return time.monotonic() - began


def main() -> None:
    """Print a line per contender and round, then the medians and the differences from doing it by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deepspeed", default="", help="the deepspeed of a virtual environment; it needs pdsh")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        contenders: dict[str, Callable[[], list[str]]] = {"ssh + torchrun": bench.by_hand, "clusterctl": bench.ours}
        if options.deepspeed:
            deepspeed = [options.deepspeed, "--hostfile", "hostfile", "--master_addr", "127.0.1.1", "probe.py"]
            contenders["deepspeed"] = lambda: deepspeed
        try:
            firsts: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
            for nth in range(options.rounds):
                for name, argv in contenders.items():
                    firsts[name].append(bench.first_line(argv()))
                    print(f"round {nth + 1}: {name}: {firsts[name][-1][0]:.2f} {firsts[name][-1][1]:.2f} s", flush=True)
            _print(firsts)
            plan = ["plan", "--nodes", "2", "--command", "probe.py"]
            local = [*plan, "--backend", "local"]
            for title, arguments, cwd in (
                ("plan, of a cluster.yaml", plan, bench.work),
                ("plan, without", local, bench.empty),
                ("--help", ["--help"], bench.empty),
            ):
                took = [bench.time(*arguments, cwd=cwd) for _ in range(options.rounds)]
                print(f"{title}: median {statistics.median(took):.2f} s, least {min(took):.2f} s")
        finally:
            bench.server.stop()
    print(f"load {os.getloadavg()[0]:.1f}")


def _print(firsts: Mapping[str, list[tuple[float, float]]]) -> None:
    base = firsts["ssh + torchrun"]
    for name, rows in firsts.items():
        for title, column in (("script runs", 0), ("line is seen", 1)):
            mine = [row[column] for row in rows]
            late = [each - other[column] for each, other in zip(mine, base, strict=True)]
            ratio = [each / other[column] for each, other in zip(mine, base, strict=True)]
            print(
                f"{name}: {title} after {statistics.median(mine):.2f} s (least {min(mine):.2f}); by hand "
                f"{statistics.median(late):+.2f} s, x {statistics.median(ratio):.2f}"
            )


if __name__ == "__main__":
    main()
