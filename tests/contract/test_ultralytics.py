"""`trainer yolo` with the real package: ranks of several nodes, restarts, tasks, and errors."""

import csv
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, ended, processes_of, wait_until
from tests.contract.sshd import inventory
from tests.unit.yolo_folder import squares
from trainer.distributed.spawn import free_port
from trainer.ultralytics.package import TESTED

pytestmark = pytest.mark.timeout(900)
OLD, NEW = TESTED
#: Settings of a training of some seconds an epoch.
SMALL = ["imgsz=64", "batch=8", "plots=False", "workers=0"]
#: Prints a digest of each checkpoint's weights.
DIGEST = (
    "import hashlib, sys, torch\n"
    "for path in sys.argv[1:]:\n"
    "    content = torch.load(path, weights_only=False)\n"
    "    state = (content['ema'] or content['model']).state_dict()\n"
    "    print(hashlib.sha256(b''.join(v.numpy().tobytes() for v in state.values())).hexdigest())\n"
)


def python_of(version):
    """Return the Python of an environment with the package, which packaging/test.sh makes."""
    python = ROOT / ".make" / f"ultralytics-{version}" / "bin" / "python"
    if not python.exists():
        assert os.environ.get("CI") != "true", f"no {python}"
        pytest.skip(f"no {python} (CI=true make test installs it)")
    return str(python)


@pytest.fixture
def yolo(clusterctl, job_name):
    """Return the arguments of a launch on CPUs with a version of the package, in a folder with its dataset."""
    squares(clusterctl.folder / "squares", train=26, val=5)
    # The package takes `path: .` from the current folder, which here has no images.
    data = clusterctl.folder / "squares" / "data.yaml"
    data.write_text(data.read_text().replace(f"path: {data.parent}", "path: ."))
    clusterctl.env |= {
        "PYTHONPATH": str(ROOT),
        "YOLO_CONFIG_DIR": str(clusterctl.folder),
        "GOMP_SPINCOUNT": "3000",
    }

    def arguments(version, size, *words, backend="local", name=job_name, **more):
        nodes, ranks = size
        options = [f"--{key.replace('_', '-')}={value}" for key, value in more.items()]
        start = ["launch", "--backend", backend, "--name", name, "--nodes", str(nodes), "--gpus", str(ranks)]
        return [*start, "--device", "cpu", "--python", python_of(version), *options, "--", "yolo", *words]

    return arguments


def epochs_in(table: Path):
    """Return the epochs in results.csv."""
    rows = csv.DictReader(table.read_text().splitlines()) if table.exists() else []
    return [int(row["epoch"]) for row in rows]


def events_of(job: Path, attempt: int, kind: str, node: str = "node-0"):
    lines = job.joinpath(f"attempt-{attempt}", f"{node}.log").read_text().splitlines()
    found = [json.loads(line.partition("::cluster ")[2]) for line in lines if "::cluster " in line]
    return [event for event in found if event["event"] == kind]


@pytest.mark.parametrize(("version", "model"), [(OLD, "yolo11n.yaml"), (NEW, "yolo26n.yaml")], ids=TESTED)
def test_two_nodes_train_as_the_ranks_of_one(yolo, clusterctl, job_name, version, model):
    words = ["detect", "train", "data=squares/data.yaml", f"model={model}", "epochs=2", *SMALL, "plots=True"]
    clusterctl.expect(
        0, *yolo(version, (2, 1), *words), has=f"runs/{job_name}/weights/best.pt", timeout_s=300
    )
    one = f"{job_name}-1"
    clusterctl.expect(0, *yolo(version, (1, 2), *words, name=one), timeout_s=300)
    runs = clusterctl.folder / "runs"
    checkpoints = [runs / name / "weights" / "last.pt" for name in (job_name, one)]
    command = [python_of(version), "-c", DIGEST, *checkpoints]
    found = subprocess.run(command, env=clusterctl.env, capture_output=True, text=True, check=True).stdout
    assert len(set(found.splitlines()[-2:])) == 1, found

    job = runs / job_name
    names = {path.name for path in job.iterdir()}
    assert names >= {"results.csv", "results.png", "args.yaml", "confusion_matrix.png", "report.html"}
    assert not names & {"last.pt", "best.pt"}  # the copies for a restart
    assert epochs_in(job / "results.csv") == [1, 2]
    metrics = events_of(job, 1, "metric")
    assert [event["epoch"] for event in metrics] == [1, 2]
    assert {"map50", "map", "box_loss", "cls_loss", "images_per_s", "seconds"} <= metrics[-1].keys()
    assert metrics[-1]["images_per_s"] > 0
    steps = [(event["epoch"], event["step"]) for event in events_of(job, 1, "progress", "node-1")]
    assert steps[-1] == (2, 4)  # 26 images in batches of 2 x 4
    report = (job / "report.html").read_text()
    assert "mAP50-95" in report
    state = json.loads(clusterctl.expect(0, "ps", "--all", "--json"))
    assert {row["state"] for row in state} == {"done"}


def test_unequal_nodes_train_as_the_ranks_of_one(yolo, clusterctl, job_name):
    words = ["detect", "train", "data=squares/data.yaml", "model=yolo26n.yaml", "epochs=1", *SMALL, "batch=6"]
    one = f"{job_name}-1"
    clusterctl.expect(0, *yolo(NEW, (2, "2,1"), *words), has="world size 3", timeout_s=300)
    clusterctl.expect(0, *yolo(NEW, (1, 3), *words, name=one), timeout_s=300)
    checkpoints = [clusterctl.folder / "runs" / name / "weights" / "last.pt" for name in (job_name, one)]
    command = [python_of(NEW), "-c", DIGEST, *checkpoints]
    found = subprocess.run(command, env=clusterctl.env, capture_output=True, text=True, check=True).stdout
    assert len(set(found.splitlines()[-2:])) == 1, found


def rank_of(job, rank):
    """Return the pid of a rank of a job on this machine."""

    def find():
        for pid in processes_of(job):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"RANK=%d" % rank in variables and b"trainer" in words:
                return pid
        return None

    pid = wait_until(find)
    assert pid
    return pid


def test_a_job_without_a_shared_disk_resumes_on_every_node(yolo, clusterctl, job_name, sshd):
    """A rank gets a stop signal, then rank 0 is killed and its machine loses its files."""
    folders = [clusterctl.folder / "remote" / name for name in ("a", "b")]
    file = inventory(clusterctl.folder, sshd, folders[0])
    described = yaml.safe_load(file.read_text())
    del described["nodes"]["node-2"]
    described["nodes"]["node-1"] |= {"run_dir": str(folders[1]), "data_dir": f"{folders[1]}/data"}
    file.write_text(yaml.safe_dump(described))
    words = ["detect", "train", "data=squares/data.yaml", "model=yolo26n.yaml", "epochs=6", *SMALL]
    arguments = yolo(NEW, (2, 1), *words, backend="ssh", env=f"PYTHONPATH={ROOT}")
    with clusterctl.start(*arguments) as process:
        first, second = (folder / job_name for folder in folders)
        assert wait_until(lambda: 2 in epochs_in(first / "results.csv"), 200), (
            process.kill() or process.stdout.read()
        )
        os.kill(rank_of(job_name, 1), signal.SIGUSR2)
        log = first / "attempt-2" / "node-0.log"
        assert wait_until(lambda: log.exists() and '"event":"checkpoint"' in log.read_text(), 200)
        os.kill(rank_of(job_name, 0), signal.SIGKILL)
        for path in (first / "last.pt", first / "best.pt", first / "results.csv"):
            path.unlink(missing_ok=True)
        text = ended(process, 0, timeout_s=300)
    assert "stopped by SIGUSR2 after the checkpoint of epoch" in text
    assert "restart 2 of 3" in text
    here = clusterctl.folder / "runs" / job_name
    assert epochs_in(here / "results.csv") == [1, 2, 3, 4, 5, 6]
    assert (here / "weights" / "best.pt").stat().st_size > 1 << 20
    done = [event["epoch"] for attempt in (1, 2, 3) for event in events_of(here, attempt, "checkpoint")]
    assert done == [1, 2, 3, 4, 5, 6]  # no epoch was repeated
    assert not list(first.glob("*.pt")) + list(second.glob("*.pt"))


def trainer(clusterctl, version, *words, **variables):
    """Start `trainer yolo` as one process."""
    return subprocess.Popen(
        [python_of(version), "-m", "trainer", "yolo", *words],
        cwd=clusterctl.folder,
        env={**clusterctl.env, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_after_the_last_epoch_only_the_final_validation_is_repeated(yolo, clusterctl):
    folder = clusterctl.folder / "run"
    kept = clusterctl.folder / "kept"
    folder.mkdir()
    kept.mkdir()
    words = ["train", "data=squares/data.yaml", "model=yolo26n.yaml", "device=cpu", "epochs=2", *SMALL]
    variables = {"CLUSTER_RUN_DIR": str(folder), "CLUSTER_JOB_ID": "job", "CLUSTER_ATTEMPT": "1"}
    with trainer(clusterctl, NEW, *words, **variables) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if '"event":"checkpoint"' in line:  # before the final validation, which removes the copies
                process.send_signal(signal.SIGSTOP)
                for path in folder.glob("*.pt"):
                    (kept / path.name).write_bytes(path.read_bytes())
                process.send_signal(signal.SIGCONT)
    assert process.returncode == 0, "".join(lines)
    for path in kept.iterdir():
        path.rename(folder / path.name)
    for path in (folder / "weights").iterdir():
        path.write_bytes(b"torn")
    with trainer(clusterctl, NEW, *words, **variables | {"CLUSTER_ATTEMPT": "2"}) as process:
        text = ended(process, 0, timeout_s=200)
    assert '"event":"progress"' not in text
    assert '"event":"done"' in text
    assert "Optimizer stripped" in text
    assert epochs_in(folder / "results.csv") == [1, 2]
    assert not list(folder.glob("*.pt"))


def make_task_data(root, task):
    """Write a dataset of a task with boxes of other forms, or a classifier's folders; return the value of data=."""
    source = squares(root, train=10, val=4)
    if task == "classify":
        for split in ("train", "val"):
            for number, path in enumerate(sorted((root / "images" / split).iterdir())):
                target = root / "folders" / split / ("green", "red")[number % 2] / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
        return root / "folders"
    for path in root.glob("labels/*/*.txt"):
        rows = []
        for line in path.read_text().splitlines():
            cls, x, y, w, h = line.split()
            x, y, w, h = map(float, (x, y, w, h))
            corners = [x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2]
            values = {"segment": corners, "obb": corners, "pose": [x, y, w, h, x, y, 2, x + w / 4, y, 2]}
            rows.append(" ".join(map(str, [cls, *values.get(task, (x, y, w, h))])))
        path.write_text("\n".join(rows))
    if task == "pose":
        source.write_text(source.read_text() + "kpt_shape: [2, 3]\nflip_idx: [1, 0]\n")
    return source


@pytest.mark.parametrize(
    ("task", "model", "scores"),
    [
        ("segment", "yolo26n-seg.yaml", {"map50", "map", "box_loss", "seg_loss"}),
        ("classify", "yolo26n-cls.yaml", {"top1", "top5", "loss"}),
        ("pose", "yolo26n-pose.yaml", {"map50", "map", "pose_loss"}),
        ("obb", "yolo26n-obb.yaml", {"map50", "map", "box_loss"}),
        ("detect", "rtdetr-l.yaml", {"map50", "map", "giou_loss"}),
    ],
)
def test_every_task_trains_on_two_ranks(yolo, clusterctl, job_name, task, model, scores):
    data = make_task_data(clusterctl.folder / task, task)
    words = [task, "train", f"data={data}", f"model={model}", "epochs=1", *SMALL, "batch=4"]
    clusterctl.expect(0, *yolo(NEW, (1, 2), *words), has="weights/best.pt", timeout_s=300)
    (metric,) = events_of(clusterctl.folder / "runs" / job_name, 1, "metric")
    assert scores <= metric.keys(), metric


def test_it_trains_without_a_launcher(yolo, clusterctl):
    """As one process, and as the ranks of torchrun, which leave the folder of an older run as it is."""
    out = clusterctl.folder / "out"
    words = [
        "train",
        "data=squares/data.yaml",
        "model=yolo26n.yaml",
        "epochs=1",
        *SMALL,
        f"project={out}",
        "name=one",
    ]
    with trainer(
        clusterctl, OLD, *words, "model=yolo11n.yaml", "device=cpu"
    ) as process:  # the last of a name counts
        text = ended(process, 0, timeout_s=200)
    assert epochs_in(out / "one" / "results.csv") == [1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    numbers = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    for process in [trainer(clusterctl, NEW, *words, "device=cpu", **shared, **number) for number in numbers]:
        ended(process, 0, timeout_s=200)
    assert epochs_in(out / "one-2" / "results.csv") == [1]
    assert epochs_in(out / "one" / "results.csv") == [1]
    with trainer(clusterctl, NEW, *words, "device=0,1", CUDA_VISIBLE_DEVICES="") as process:
        text = ended(process, 2, timeout_s=200)
    assert "error: device=0,1: no GPU can be used on this machine\n" in text


#: Arguments that are refused before anything is trained, and words of the error.
REFUSED = [
    ("train data=squares/data.yaml epoch=3", "'epoch' is not a valid YOLO argument"),
    ("train data=squares/data.yaml epochs=many", "many"),
    ("train data=squares/data.yaml epochs", "epochs has no value"),
    ("train", "data= is missing"),
    ("train data=none/data.yaml", "data=none/data.yaml: no such file or folder on this node"),
    ("train data=empty.yaml", "the train images are not on this node"),
    ("train data=squares/data.yaml model=none.yaml", "model=none.yaml"),
    ("train data=squares/data.yaml model=best.onnx", "model=best.onnx"),
    ("train data=squares/data.yaml cfg=none.yaml", "cfg=none.yaml: no such file"),
    (
        "train data=squares/data.yaml model=yolo11n.yaml optimizer=Sgdd",
        "not found in list of available optimizers",
    ),
    ("val model=best.pt", "yolo val: only `train` runs on several machines"),
    ("semantic train data=squares/data.yaml", "yolo semantic train"),
]


@pytest.mark.parametrize("version", TESTED)
def test_bad_input_is_an_error_of_two_lines(yolo, clusterctl, version):
    (clusterctl.folder / "empty.yaml").write_text("train: images/none\nval: images/none\nnames: [a]\n")
    program = (
        "import json, sys\nfrom trainer.errors import TrainerError\nfrom trainer.ultralytics.training import train\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try:\n        train([*line.split(), 'device=cpu'], '')\n        print('error: none')\n"
        "    except TrainerError as error:\n        print(f'error: {error.message}')\n"
    )
    words = [python_of(version), "-c", program, json.dumps([line for line, _ in REFUSED])]
    done = subprocess.run(
        words, cwd=clusterctl.folder, env=clusterctl.env, capture_output=True, text=True, check=True
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(REFUSED), done.stdout
    for (line, expected), error in zip(REFUSED, errors, strict=True):
        assert expected in error, (line, error)


def test_a_job_that_cannot_train_ends_with_the_cause(yolo, clusterctl):
    """An error that only a rank of several can have: one line, without restarts."""
    words = ["train", "data=squares/data.yaml", "model=yolo26n.yaml", "epochs=1", "imgsz=64"]
    expected = "batch=-1: the batch size cannot be chosen automatically on 2 ranks"
    text = clusterctl.expect(2, *yolo(NEW, (1, 2), *words, "batch=-1"), has=expected)
    assert "Traceback" not in text
    assert "not restarted: the program refused its input" in text
