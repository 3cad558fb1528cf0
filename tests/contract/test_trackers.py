"""`trainer train --track` with a real MLflow server, Weights & Biases offline, and Trackio's local database."""

import csv
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request

import pytest

from tests.conftest import ROOT
from tests.unit.yolo_folder import squares

pytestmark = pytest.mark.timeout(900)
PYTHON = ROOT / ".make" / "trackers" / "bin" / "python"  # packaging/test.sh makes it
TINY = str(ROOT / "tests/unit/tiny.yaml")
EPOCHS = 6


@pytest.fixture
def train(tmp_path):
    """Start a training of six short epochs with --track."""
    if not PYTHON.exists():
        assert os.environ.get("CI") != "true", f"no {PYTHON}"
        pytest.skip(f"no {PYTHON} (CI=true make test installs it)")
    data = squares(tmp_path / "squares", train=26)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_EXPERIMENT_NAME": "squares"}
    words = [
        "train",
        "--data",
        str(data),
        "--cfg",
        TINY,
        "--imgsz",
        "64",
        "--batch",
        "5",
        "--epochs",
        str(EPOCHS),
    ]
    words += ["--device", "cpu", "--project", str(tmp_path), "--name", "run"]

    def start(*more, **variables):
        return subprocess.Popen(
            [PYTHON, "-m", "trainer", *words, *more],
            cwd=tmp_path,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def epochs_of(folder):
    path = folder / "run" / "results.csv"
    return len(list(csv.DictReader(path.read_text().splitlines()))) if path.exists() else 0


def kill_and_resume(train, folder, *more, flush_s=0, **variables):
    """Kill a training in its third epoch, and resume it to its end."""
    process = train(*more, **variables)
    until = time.time() + 300
    run = folder / "run"
    while epochs_of(folder) < 2 or (run / "results.csv").stat().st_mtime > (run / "last.pt").stat().st_mtime:
        assert process.poll() is None, process.stdout.read()
        assert time.time() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    time.sleep(flush_s)
    process.kill()
    process.communicate()
    text, _ = train(*more, "--resume", str(folder / "run"), **variables).communicate(timeout=200)
    assert "resuming in epoch" in text
    assert epochs_of(folder) == EPOCHS, text
    return text


def test_mlflow_has_one_run_with_each_epoch_once(train, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [PYTHON.with_name("mlflow"), "server", "--host", "127.0.0.1", "--port", address.partition(":")[2]]
    words += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    with (tmp_path / "server.log").open("w") as log:
        without_jobs = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }  # five processes for its evaluations
        server = subprocess.Popen(
            words, cwd=tmp_path, env=without_jobs, start_new_session=True, stdout=log, stderr=log
        )
    try:
        until = time.time() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/health", timeout=5).close()
                break
            except OSError:
                assert time.time() < until, (tmp_path / "server.log").read_text()
                time.sleep(0.5)
        kill_and_resume(train, tmp_path, "--track", "mlflow", MLFLOW_TRACKING_URI=f"http://{address}")
        read = (
            "import mlflow; c = mlflow.MlflowClient()\n"
            "runs = c.search_runs([c.get_experiment_by_name('squares').experiment_id])\n"
            "for r in runs: print(r.info.status, r.data.params['batch'], "
            "[m.step for m in c.get_metric_history(r.info.run_id, 'box_loss')])\n"
        )
        env = {**os.environ, "MLFLOW_TRACKING_URI": f"http://{address}"}
        found = subprocess.run(
            [PYTHON, "-c", read], env=env, capture_output=True, text=True, check=True
        ).stdout
        print(f"MLflow: {found}")
        assert found == f"FINISHED 5 {list(range(1, EPOCHS + 1))}\n"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # after SIGTERM it can wait for its workers
        server.wait(20)
    process = train("--track", "mlflow", "--exist-ok", MLFLOW_TRACKING_URI=f"http://{address}")
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 2, text
    assert text.splitlines()[-2].startswith("error: --track mlflow: ")
    assert "Traceback" not in text


def test_wandb_offline_has_one_run_with_each_epoch_once(train, tmp_path):
    kill_and_resume(
        train, tmp_path, "--track", "wandb", flush_s=20, WANDB_MODE="offline"
    )  # its client writes every few seconds
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1  # the same ID, which `wandb sync` makes one run
    read = (
        "import pathlib, sys\nfrom wandb.proto import wandb_internal_pb2\n"
        "def records(data, at=7, whole=b''):\n"  # LevelDB's log format, after a header of 7 bytes
        "    while at < len(data):\n"
        "        if 32768 - at % 32768 < 7: at += 32768 - at % 32768; continue\n"
        "        size, kind = int.from_bytes(data[at + 4:at + 6], 'little'), data[at + 6]\n"
        "        whole += data[at + 7:at + 7 + size]; at += 7 + size\n"
        "        if kind in (1, 4): yield whole; whole = b''\n"
        "for path in sys.argv[1:]:\n"
        "    for data in records(pathlib.Path(path).read_bytes()):\n"
        "        record = wandb_internal_pb2.Record.FromString(data)\n"
        "        if record.WhichOneof('record_type') == 'history': print(record.history.step.num)\n"
    )
    found = subprocess.run([PYTHON, "-c", read, *files], capture_output=True, text=True, check=False)
    print(f"W&B: {found.stdout.split()}")
    assert [int(step) for step in found.stdout.split()] == list(range(1, EPOCHS + 1)), found.stderr


@pytest.mark.parametrize(
    "storage", ["sqlite", "jsonl"]
)  # the client's choice on a local disk, on a network disk
def test_trackio_has_one_run_with_each_epoch_once(train, tmp_path, storage):
    # The client writes every half second. After the pause, the database has the first epoch at the kill, and no other.
    (tmp_path / "slow.py").write_text(
        "import time, trainer\nclass Slow(trainer.Callback):\n"
        "    def on_epoch_end(self, metrics): time.sleep(metrics['epoch'] == 1)\n"
    )
    kill_and_resume(
        train, tmp_path, "--track", "trackio", "--callback", "slow:Slow", TRACKIO_STORAGE_MODE=storage
    )
    query = "SELECT run_id, run_name, step, json_extract(metrics, '$.box_loss') FROM metrics ORDER BY step"
    words = [
        PYTHON.with_name("trackio"),
        "query",
        "project",
        "--project",
        "trainer",
        "--sql",
        query,
        "--json",
    ]
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "run" / "trackio")}
    copy = "from trackio import fragments; fragments.import_inbox_dir()"  # as the dashboard does
    subprocess.run([PYTHON, "-c", copy], env=env, check=True)
    found = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    print(f"Trackio: {found}")
    rows = [list(row.values()) for row in json.loads(found)["rows"]]
    assert {tuple(row[:2]) for row in rows} == {(rows[0][0], "run")}
    assert [row[2] for row in rows] == list(range(1, EPOCHS + 1))
    with (tmp_path / "run" / "results.csv").open() as file:
        losses = [float(row["box_loss"]) for row in csv.DictReader(file)]
    assert [row[3] for row in rows] == pytest.approx(losses, rel=1e-4)
