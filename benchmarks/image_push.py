"""Bytes and seconds to update a container image: `clusterctl image push` against `docker save | ssh docker load`.

    python benchmarks/image_push.py --host n0 --ssh-config testbed/.state/ssh_config

Each round appends a line to a copy of this project, builds its image, and sends it to a host with the image of the
previous round. The two take turns, each with its own change. The host needs twice the image's size on disk. The
benchmark removes its images from both machines at the end, but not trainer:0.1 and build caches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "clusterctl-bench"


def run(*argv: str, **options: object) -> str:
    """Return the output of a command; exit if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(argv)}\n{done.stdout}{done.stderr}")
    return str(done.stdout).strip()


def built(project: Path, nth: int) -> str:
    """Append a line, build the image like `make image`, and return its name."""
    with (project / "trainer" / "__init__.py").open("a") as file:
        file.write(f"# change {nth}\n")
    image = f"{NAME}:{nth}"
    run("packaging/image.sh", image, cwd=project)
    return image


def ours(image: str, host: str, ssh_config: str) -> tuple[int, float]:
    """Return bytes and seconds of `clusterctl image push`."""
    argv = ["image", "push", "--image", image, "--hosts", host, "--ssh-config", ssh_config, "--json"]
    began = time.monotonic()
    answer = run(sys.executable, "-m", "cluster", *argv, cwd=ROOT)
    return int(json.loads(answer)[host]["sent"]), time.monotonic() - began


def theirs(image: str, host: str, ssh_config: str) -> tuple[int, float]:
    """Return bytes and seconds of `docker save | ssh docker load`."""
    began = time.monotonic()
    count = 0
    save = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
    load = subprocess.Popen(
        ["ssh", "-F", ssh_config, host, "docker", "load"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert save.stdout is not None
    assert load.stdin is not None
    while piece := save.stdout.read(1 << 20):
        load.stdin.write(piece)
        count += len(piece)
    load.stdin.close()
    if save.wait() or load.wait():
        sys.exit("docker save | ssh docker load failed")
    return count, time.monotonic() - began


def main() -> None:
    """Print a line per round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", required=True)
    parser.add_argument("--ssh-config", default=str(Path.home() / ".ssh" / "config"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer-rounds", type=int, default=2, help="of docker save | ssh docker load: minutes each"
    )
    parser.add_argument(
        "--revision", default="HEAD", help="of this project; one whose image is in the build cache"
    )
    options = parser.parse_args()
    ssh_config = str(Path(options.ssh_config).resolve())
    print(f"{time.strftime('%Y-%m-%d')}  {platform.platform()}  {os.cpu_count()} cores", flush=True)
    names = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            project = Path(folder)
            archive = ("git", "-c", "tar.umask=022", "archive")  # the build cache compares file modes
            tracked = subprocess.run(
                [*archive, options.revision], cwd=ROOT, capture_output=True, check=True
            ).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=tracked, check=True)
            names.append(built(project, 0))
            sent, seconds = ours(names[0], options.host, ssh_config)
            print(f"first push of the image: {sent / 1e6:.1f} MB, {seconds:.1f} s", flush=True)
            for nth in range(options.rounds):
                for who, send in (("ours", ours), ("save | load", theirs)):
                    if who != "ours" and nth >= options.peer_rounds:
                        continue
                    names.append(built(project, len(names)))
                    size = int(run("docker", "image", "inspect", "--format", "{{.Size}}", names[-1]))
                    sent, seconds = send(names[-1], options.host, ssh_config)
                    share = 100 * sent / size
                    print(
                        f"{who:<12} {sent / 1e6:9.1f} MB  {share:7.3f} % of the image  {seconds:7.1f} s",
                        flush=True,
                    )
    finally:
        remove = ["docker", "image", "rm", "--force", *names]
        for argv in (remove, ["ssh", "-F", ssh_config, options.host, *remove]):
            subprocess.run(argv, capture_output=True, check=False)


if __name__ == "__main__":
    main()
