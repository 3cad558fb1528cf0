"""What wrong commands print, compared with messages.txt; `make golden` rewrites it, and the diff is the review.

This is the only place where whole sentences are asserted. No command may print a traceback or leave anything behind.
"""

import os
import shlex
import signal
from pathlib import Path

import pytest

from cluster.cli.main import main
from tests.unit.trainer_process import run

GOLDEN = Path(__file__).with_name("messages.txt")
FILES = {
    "ok.py": "print(1)\n",
    "empty.yaml": "",
    "broken.yaml": "nodes: [a\n",
    "list.yaml": "- a\n- b\n",
    "typo.yaml": "nodes:\n  gpu-a: {adress: 10.0.0.1}\n",
    "ssh.yaml": "device: cpu\nnodes:\n  gpu-a: {login: a, address: 10.0.0.1, runtime: none, run_dir: /r}\n",
    "slurm.yaml": "backend: slurm\nimage: /shared/t.sif\nnodes:\n  login: {login: a, run_dir: /r}\n",
    "job.yaml": "comand: ok.py\n",
    "secrets.env": "TOKEN\n",
    "hosts": "a slots=1\n",
    "folder/cluster.yaml": "backend: local\n",
}
CLUSTERCTL = """\
launch --nodes two
launch --nodes 4:2 -b local
launch --gpus 0 -b local
launch -b slrum
launch --device gpu -b local
launch --name 'my job' -b local
launch --command missing.py -b local
launch --command 'python ok.py' -b local
launch --command ok.py --workdir none -b local
launch --command ok.py -b local -- train
launch -b local -- trian
launch -b local -- python ok.py
launch --env A-B=3 -b local
launch --env NOT_SET -b local
launch --env-file secrets.env -b local
launch --env-file none.env -b local
launch --master-port 99999 -b local
launch --grace soon -b local
launch --wait never -b local
launch --spares 2 -b local
launch --array jobs.txt -b local
launch --partition gpu -b local
launch --set mem=3G -b compose
launch --prologue 'module load cuda' -b compose
plan --prologue 'module load cuda' -b kubernetes --image t
launch --run-option '--network host' -b compose
launch --run-option=--memory -b compose
launch --run-option '--memory 3g --cpus 2' -b compose
launch --run-option memory=3g -b compose
launch --run-option=--blkio-weight=3 -b compose
launch --run-option=--memory=3g -b local
plan --run-option=--memory=3g -b slurm --image t.sif
launch --image trainer:0.1 -b local
launch --push -b local
launch --wait 1h -b slurm
launch --hosts a,b -b local
launch --hosts a --hostfile hosts
launch --hosts 'a b'
launch --hostfile none
launch --only a
launch -b ssh
launch -i folder
launch -i none.yaml
launch -i empty.yaml
launch -i broken.yaml
launch -i list.yaml
launch -i typo.yaml
launch -i ssh.yaml --only gpu-z
launch job.yaml
launch none.yaml
plan -b slurm --set mem
plan -b slurm --set nodes=3
plan -b slurm --time soon
plan -b kubernetes --image t --set namespce=v
plan -b local --export nomad
plan -b local --json -o x
status none
cp last.pt
port-forward none eighty
image push
image push -i ssh.yaml gpu-z
image ls -i slurm.yaml
sync folder
sync -i ssh.yaml none
sync -i ssh.yaml /
doctor -i ssh.yaml --skip adress
init
init gpu-a -o folder
init gpu-a -o ssh.yaml
init gpu-a --device gpu
lauch
attach
image pusj
launch --nodes
launch --wat 3
"""
TRAINER = """\
train --epochs 0
train --task clasify
train --data none.yaml
train --data folder
train --data broken.yaml
train --cfg yolov5q.yaml
train --cfg dfine-q
train --cfg detr
train --cfg dfine_n
train --cfg rtdetr-l
train --cfg rtdetr2-r18
train --cfg yolov10n.yaml
train --cfg yolov5s.pt
train --cfg yellow
train --task classify --cfg resnet5
train --weights none.pt
train --weights yolo12n.pt
train --weights folder
train --hyp none.yaml
train --imgsz 100
train --optimizer adamw
train --parallel pipelin
train --stages 2
train --freeze ten
train --unfreeze 3
train --save-every often
train --name a/b
train --resume none
train --ranks 0
train --label-smoothing 2
train --cos-lr --schedule linear
val --weights none.pt --data digits
predict --weights none.pt --source folder
bench scaling --ranks none
verify --precision fp16
hyp --cfg yolov5q.yaml
train --imgsz 640,480
val
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERCTL_STATE_DIR", str(tmp_path / "records"))
    monkeypatch.delenv("NOT_SET", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():  # `main` sets them
        signal.signal(number, handler)


def compared(program, printed, folder):
    """Compare the messages of a program with its part of messages.txt."""
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(
        FILES
    )
    assert [line for line, text in printed.items() if "Traceback" in text] == []
    text = "".join(
        f"$ {program} {line}\n{said.replace(str(folder), '~')}\n" for line, said in printed.items()
    )
    blocks = GOLDEN.read_text().split("\n\n") if GOLDEN.exists() else []
    own = [block for block in blocks if block.startswith(f"$ {program} ")]
    if os.environ.get("GOLDEN") == "write":
        others = [block for block in blocks if block.strip() and block not in own]
        GOLDEN.write_text(
            "\n\n".join(sorted([*others, *text.rstrip("\n").split("\n\n")], key=first_word)) + "\n\n"
        )
        return
    assert "\n\n".join(own) == text.rstrip("\n")


def first_word(block):
    return block.split()[1]


def test_wrong_clusterctl_commands(folder, monkeypatch, capfd):
    printed = {}
    for line in CLUSTERCTL.splitlines():
        monkeypatch.setattr("sys.argv", ["clusterctl", *shlex.split(line)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2, line
        printed[line] = "".join(capfd.readouterr()[::-1])
    compared("clusterctl", printed, folder)


def test_wrong_trainer_commands(folder):
    printed = {}
    for line in TRAINER.splitlines():
        done = run(folder, *shlex.split(line), code=2)
        printed[line] = "".join(
            each for each in done.stderr.splitlines(keepends=True) if "::cluster" not in each
        )
    compared("trainer", printed, folder)
