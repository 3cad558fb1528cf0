"""Speed of the command-line tools: seconds, their ratio to the base of the same round, and the goal.

    python benchmarks/tool.py                       # everything
    python benchmarks/tool.py start plan --rounds 9

    start       `clusterctl --help`, and `clusterctl plan` with a cluster.yaml of three nodes; base: `python -c pass`
    plan        `clusterctl plan --nodes 100000`; base: `python -c pass`
    first-line  the command until the script of rank 0 runs on two hosts; base: ssh and torchrun without clusterctl
    hosts       `clusterctl launch --detach` on 64 hosts; base: on one host, and two `ssh HOST true` for each host,
                16 at a time: a launch needs two connections to each host
    epoch       `trainer train` of one epoch of the digits; base: the seconds that the epoch itself takes
    page        first paint in Chromium of a job's page with 64 x 8 ranks after 100,000 steps; base: 2 x 2 ranks after
                100 steps. Statuses and logs are simulated, and each paint is from a new server

The hosts are addresses of one real sshd on this machine, without containers. Both ends of each connection and the
programs of all nodes share its processors. Commands take turns within a round.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cluster.spec.status import HostMemory, RankUsage, Usage  # noqa: E402
from tests.contract.sshd import Sshd, inventory  # noqa: E402

CLUSTERCTL = [sys.executable, "-m", "cluster"]
PASS = [sys.executable, "-c", "pass"]
THREE_NODES = """device: cpu
nodes:
  gpu-a: {login: gpu-a, address: 10.0.0.1, runtime: docker, run_dir: /data/runs, data_dir: /data}
  gpu-b: {login: gpu-b, address: 10.0.0.2, runtime: docker, run_dir: /data/runs, data_dir: /data}
  gpu-c: {login: gpu-c, address: 10.0.0.3, runtime: docker, run_dir: /data/runs, data_dir: /data}
"""
SLEEP = "#!/bin/sh\ncase $1 in -c | -IS) exit 0 ;; esac\nexec sleep 300\n"
PROBE = 'import os, time\nif os.environ["RANK"] == "0":\n    print("first", time.time(), flush=True)\n'
BY_HAND = r"""
torchrun() {
    ssh -F "$1" "h$2" "cd $3 && OMP_NUM_THREADS=1 $4 -m torch.distributed.run --nnodes 2 --nproc_per_node 1 \
        --node_rank $2 --master_addr $6 --master_port $5 probe.py"
}
torchrun "$1" 1 "$2" "$3" "$4" "$5" &
torchrun "$1" 0 "$2" "$3" "$4" "$5"
wait
"""

Measure = Callable[[], float]
#: Title, measurement and base in seconds, goal.
Row = tuple[str, Measure, Measure, str]


class Bench:
    """A folder with its own job records; `cwd` is where commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cwd = folder / "work"
        self.cwd.mkdir()
        self.env = {**os.environ, "CLUSTERCTL_STATE_DIR": str(folder / "records"), "PYTHONPATH": str(ROOT)}

    def seconds(self, *argv: str) -> float:
        """Return the seconds that a command takes; end the benchmark if it fails."""
        began = time.monotonic()
        done = subprocess.run(argv, cwd=self.cwd, env=self.env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(argv)}\n{done.stdout}{done.stderr}")
        return time.monotonic() - began

    @contextmanager
    def hosts(self, count: int) -> Iterator[Sshd]:
        """Start an sshd of `count` hosts which see the same folder, and write their cluster.yaml."""
        addresses = [f"127.0.2.{last}" for last in range(1, count + 1)]
        server = Sshd(self.folder / "sshd", addresses, bare=True, startups="200")
        mirror = self.folder / "remote" / "data" / str(self.cwd).lstrip("/")
        mirror.parent.mkdir(parents=True)
        mirror.symlink_to(self.cwd)
        inventory(self.cwd, server, self.folder / "remote")
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def start(bench: Bench) -> Iterator[list[Row]]:
    """Rows of commands that start no job."""
    (bench.cwd / "cluster.yaml").write_text(THREE_NODES)
    base = lambda: bench.seconds(*PASS)  # noqa: E731
    yield [
        ("clusterctl --help", lambda: bench.seconds(*CLUSTERCTL, "--help"), base, "0.2 s"),
        ("clusterctl plan, three nodes", lambda: bench.seconds(*CLUSTERCTL, "plan"), base, "0.25 s"),
    ]


@contextmanager
def plan(bench: Bench) -> Iterator[list[Row]]:
    """Row of a large plan."""
    argv = [*CLUSTERCTL, "plan", "--nodes", "100000", "--backend", "local", "--device", "cpu"]
    yield [
        (
            "clusterctl plan --nodes 100000",
            lambda: bench.seconds(*argv),
            lambda: bench.seconds(*PASS),
            "seconds",
        )
    ]


@contextmanager
def first_line(bench: Bench) -> Iterator[list[Row]]:
    """Row of the command until rank 0 runs."""
    (bench.cwd / "probe.py").write_text(PROBE)
    launch = [*CLUSTERCTL, "launch", "--nodes", "2", "--command", "probe.py", "--python", sys.executable]

    def by_hand() -> float:
        with socket.socket() as probe:
            probe.bind(("127.0.2.1", 0))
            port = str(probe.getsockname()[1])
        words = [str(server.config), str(bench.cwd), sys.executable, port, "127.0.2.1"]
        return _until_first(bench, ["bash", "-c", BY_HAND, "by-hand", *words])

    with bench.hosts(2) as server:
        yield [
            ("clusterctl launch until rank 0 runs", lambda: _until_first(bench, launch), by_hand, "+0.3 s")
        ]


def _until_first(bench: Bench, argv: list[str]) -> float:
    """Return the seconds until the script of rank 0 runs."""
    began = time.time()
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(argv, cwd=bench.cwd, env=bench.env, start_new_session=True, **piped)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    _, found, rest = output.partition("first ")
    return float(rest.split()[0]) - began if found else sys.exit(f"{' '.join(argv)}\n{output}")


@contextmanager
def hosts(bench: Bench) -> Iterator[list[Row]]:
    """Row of a launch on many hosts."""
    program = bench.cwd / "program"
    program.write_text(SLEEP)
    program.chmod(0o755)
    (bench.cwd / "it.py").touch()
    number = itertools.count()

    def launch(count: int) -> float:
        name = f"tool-{os.getpid()}-{next(number)}"
        argv = [
            "launch",
            "--name",
            name,
            "--nodes",
            str(count),
            "--python",
            str(program),
            "--command",
            "it.py",
        ]
        took_s = bench.seconds(*CLUSTERCTL, *argv, "--detach")
        bench.seconds(*CLUSTERCTL, "stop", name)
        return took_s

    with bench.hosts(64) as server:
        names = "\n".join([f"h{rank}" for rank in range(64)] * 2)
        by_hand = ("bash", "-c", f"echo '{names}' | xargs -P 16 -I HOST ssh -F {server.config} HOST true")
        yield [
            ("clusterctl launch --detach, 64 hosts", lambda: launch(64), lambda: launch(1), "x 2"),
            ("the same, against 128 ssh commands", lambda: launch(64), lambda: bench.seconds(*by_hand), ""),
        ]


@contextmanager
def epoch(bench: Bench) -> Iterator[list[Row]]:
    """Row of a training of one epoch."""
    argv = [sys.executable, "-m", "trainer", "train", "--data", "digits", "--epochs", "1", "--device", "cpu"]

    def inside() -> float:
        """Return the seconds of the epoch in results.csv of the previous training."""
        with (bench.cwd / "out" / "results.csv").open() as file:
            return sum(float(row["seconds"]) for row in csv.DictReader(file))

    train = [*argv, "--project", str(bench.cwd), "--name", "out", "--exist-ok"]
    yield [("trainer train, one epoch", lambda: bench.seconds(*train), inside, "+5 s")]


@contextmanager
def page(bench: Bench) -> Iterator[list[Row]]:
    """Row of the page of a large job."""
    from playwright.sync_api import sync_playwright

    from cluster.backends import BACKENDS
    from cluster.spec.model import Job, JobRecord
    from cluster.spec.node_status import NodeStatus
    from cluster.store import JobStore
    from cluster.web.server import Server

    store = JobStore(bench.folder / "jobs")
    backend = BACKENDS["local"]
    backend.observe = lambda plan: [  # type: ignore[method-assign]
        NodeStatus(node.name, "starting", usage=_usage(rank, plan.world_size // len(plan.nodes)))
        for rank, node in enumerate(plan.nodes)
    ]
    for nodes, ranks, steps in ((64, 8, 100_000), (2, 2, 100)):
        job = Job(f"job-{nodes}", ("train.py",), nodes, ranks, str(bench.cwd), image="trainer:0.1")
        plan = backend.plan(job, attempt=1, port=20000)
        store.reserve(JobRecord(plan, time.time(), job))
        _write_logs(Path(plan.attempt_dir), [node.name for node in plan.nodes], steps)

    def first_paint(job_id: str) -> float:
        server = Server(("localhost", 0), store)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://localhost:{server.server_address[1]}/jobs/{job_id}/")
        page.get_by_text("ranks", exact=False).first.wait_for()
        paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        page.close()
        server.shutdown()
        server.server_close()
        return paint_ms / 1000

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield [
            ("first paint, 64 x 8 ranks", lambda: first_paint("job-64"), lambda: first_paint("job-2"), "1 s")
        ]
        browser.close()


def _usage(node: int, ranks: int) -> Usage:
    """Return a simulated sample of the use of a node with GPUs."""
    gpu = {"use": 97, "memory": 40 << 30, "memory_total": 80 << 30, "temperature": 61}
    rows = [RankUsage(node * ranks + k, 1.25, 4 << 30, gpu=str(k), **gpu) for k in range(ranks)]
    return Usage(tuple(rows), HostMemory(900 << 30, 1000 << 30))


def _write_logs(folder: Path, names: list[str], steps: int) -> None:
    """Write the nodes' logs: on each node 1,000 progress events, on the first the metrics of `steps` / 100 epochs."""
    folder.mkdir(parents=True)
    for index, name in enumerate(names):
        with (folder / f"{name}.log").open("w") as log:
            events = [{"event": "ready", "node": index, "device": "cuda", "world_size": 8 * len(names)}]
            for step in range(0, steps, 100):
                progress = {
                    "event": "progress",
                    "node": index,
                    "epoch": step // 100 + 1,
                    "step": 99,
                    "steps": 100,
                }
                events.append(
                    progress | {"epochs": steps // 100, "loss": 1.5, "images_per_s": 20_000, "eta_s": 1}
                )
                if index == 0:
                    scores = {
                        "map50": 0.5 + step % 700 / 1e4,
                        "map": 0.4,
                        "images_per_s": 20_000 + step % 900,
                    }
                    events.append(
                        {"event": "metric", "epoch": step // 100 + 1, "box_loss": 100 / (step + 100)} | scores
                    )
            log.writelines(f"::cluster {json.dumps(event)}\n" for event in events)


PARTS = {"start": start, "plan": plan, "first-line": first_line, "hosts": hosts, "epoch": epoch, "page": page}


def main() -> None:
    """Measure the parts in rounds and print a row of each: medians, and the ratio and the difference by round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    print("| command | seconds | base | ratio by round | later by | goal |\n|---|---|---|---|---|---|")
    for name in options.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder, PARTS[name](Bench(Path(folder))) as rows:
            found: dict[str, list[tuple[float, float]]] = {title: [] for title, *_ in rows}
            for _ in range(options.rounds):
                for title, measure, base, _ in rows:
                    took_s = measure()
                    found[title].append((took_s, base()))
        for title, _, _, goal in rows:
            ours, bases = zip(*found[title], strict=True)
            ratios = "  ".join(f"{mine / base:.1f}" for mine, base in found[title])
            late = statistics.median(mine - base for mine, base in found[title])
            medians = f"{statistics.median(ours):.2f} | {statistics.median(bases):.2f}"
            print(f"| {title} | {medians} | {ratios} | {late:+.2f} s | {goal} |", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
