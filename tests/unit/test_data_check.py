"""`trainer data check`: faults of both splits, and the table of classes."""

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from tests.unit.test_bad_data import break_labels
from tests.unit.yolo_folder import DATA_YAML, make_yolo_set, write_image
from trainer.cli import app


def run_check(path: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["data", "check", "--data", str(path), *options])
    assert done.stderr == ""
    return done.exit_code, done.stdout


def test_a_good_set_is_a_table_and_exit_0(tmp_path):
    path = make_yolo_set(tmp_path)
    path.write_text(path.read_text().replace("[cat, dog]", "[cat, dog, eel]").replace("nc: 2", "nc: 3"))
    code, out = run_check(path)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines() if not line.startswith("warning: ")]
    # Images 1 and 2 of 4 have one and two boxes of a fifth of 72 and 80 px by two fifths of 48 px.
    assert lines[:5] == [
        "train: 4 images (2 without boxes), 3 boxes",
        "class images boxes share median box, px",
        "cat 2 2 66.7% 15 x 19",
        "dog 1 1 33.3% 16 x 19",
        "eel 0 0 0.0% no boxes",
    ]
    assert lines[5] == "val: 2 images (1 without boxes), 1 box"


def test_every_fault_of_both_splits_is_printed(tmp_path):
    path = make_yolo_set(tmp_path)
    faults = break_labels(tmp_path)
    (tmp_path / "labels/val/001.txt").write_text("0 0.5 0.5 0.1 0.1\n0 7 7 7 7\n")
    (tmp_path / "labels/val/000.txt").write_text("0 0.5 0.5 0.1 0.1\n" * 2)
    faults.append(f"{tmp_path / 'labels/val/001.txt'}:2: pixels instead of fractions: `0 7 7 7 7`")
    code, out = run_check(path)
    assert code == 2
    assert out.splitlines()[:7] == faults
    assert f"warning: {tmp_path / 'labels/val/000.txt'}:2: the same box twice" in out
    code, out = run_check(path, "--json")
    assert code == 2
    report = json.loads(out)
    assert [f"{f['file']}:{f['line']}: {f['what']}".replace(":0:", ":") for f in report["faults"]] == faults
    assert report["splits"]["val"]["classes"][0]["boxes"] == 2


def test_faults_of_the_data_yaml_are_printed_once(tmp_path):
    path = make_yolo_set(tmp_path)
    path.write_text("train: images/train\nval: images/vla\nnames: [cat, dog, dog]\ntets: x\n")
    code, out = run_check(path)
    assert code == 2
    assert [line.partition(": ")[0] for line in out.splitlines()[:3]] == [
        f"{path}:4",
        f"{path}:3",
        f"{path}:2",
    ]


def test_decoding_finds_a_damaged_image(tmp_path):
    path = make_yolo_set(tmp_path)
    image = tmp_path / "images/train/004.png"
    write_image(image)
    data = image.read_bytes()
    image.write_bytes(data[:60] + data[-12:])  # header and last chunk are whole
    code, out = run_check(path, "--headers")
    assert code == 0
    code, out = run_check(path)
    assert code == 2
    assert out.startswith(f"{image}: not a readable image: it cannot be decoded\n")


def test_an_image_in_both_splits_is_a_warning(tmp_path):
    path = make_yolo_set(tmp_path)
    for k in (0, 1):
        (tmp_path / f"images/val/{k:03}.jpg").unlink()
    (tmp_path / "labels/val/001.txt").rename(tmp_path / "labels/val/copy.txt")
    shutil.copy(tmp_path / "images/train/002.jpg", tmp_path / "images/val/copy.jpg")
    code, out = run_check(path)
    assert code == 0
    twin = f"{tmp_path / 'images/val/copy.jpg'}: the same image as {tmp_path / 'images/train/002.jpg'}"
    assert f"warning: {twin} of the training" in out


def test_a_missing_data_yaml(tmp_path):
    code, out = run_check(tmp_path / "nowhere.yaml")
    assert code == 2
    assert out.startswith(f"{tmp_path / 'nowhere.yaml'}: no such dataset\n")


def test_missing_images_that_could_be_fetched(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text(DATA_YAML + "download: https://example.com/pets.zip\n")
    code, out = run_check(path)
    assert code == 2
    assert f"{path}:2: the train images are missing" in out
    assert f"{path}:3: the val images are missing" in out
    assert f"hint: `trainer data download --data {path}` fetches them" in out
