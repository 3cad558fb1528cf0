"""How many loading processes pay: the decision from given rates, and what is remembered."""

import json
import re
from pathlib import Path

import pytest

from tests.unit.trainer_process import TINY, ranks, run, start, wait
from tests.unit.yolo_folder import squares
from trainer.config import workers_of
from trainer.errors import TrainerError
from trainer.training.workers import KEPT, choose, next_to_try, recall, remember, together


def tried(rate_of: dict[int, float], most: int, waiting: float = 0.5) -> list[int]:
    """The numbers that are tried on a machine with such rates."""
    rates: dict[int, float] = {}
    while (workers := next_to_try(rates, waiting, most)) is not None:
        rates[workers] = rate_of[workers]
    return list(rates)


def test_more_are_tried_for_as_long_as_they_pay() -> None:
    assert tried({0: 10, 1: 12, 2: 24, 3: 36, 4: 36.5, 6: 36}, 32) == [0, 1, 2, 3, 4, 6]
    assert tried({0: 10, 1: 9, 2: 8}, 32) == [0, 1, 2]  # on a CPU they take the training's cores
    assert tried({0: 10, 1: 9, 2: 18, 3: 27, 4: 30}, 4) == [0, 1, 2, 3, 4]  # one worker alone may be slower than none
    assert tried({0: 10, 1: 12}, 1) == [0, 1]
    assert tried({0: 10}, 0) == [0]


def test_more_are_not_tried_where_there_is_nothing_to_wait_for() -> None:
    assert next_to_try({0: 10.0}, 0.01, 8) is None
    assert next_to_try({0: 10.0, 1: 20.0}, 0.01, 8) is None
    assert next_to_try({0: 10.0, 1: 20.0}, 0.2, 8) == 2


def test_of_those_that_are_alike_the_fewest_are_taken() -> None:
    assert choose({0: 48.5, 1: 50, 2: 49}) == 0
    assert choose({0: 40, 1: 50, 2: 51}) == 1
    assert choose({0: 10, 1: 9, 2: 8}) == 0


def test_what_is_compared_is_compared_within_a_turn() -> None:
    slower_every_minute = [{0: 50, 1: 55}, {1: 44, 0: 40}, {0: 30, 1: 33}]  # 1 is always a tenth faster
    found = together(slower_every_minute)
    assert found[1] / found[0] == pytest.approx(1.1)
    assert choose(found) == 1
    disturbed_once = [*slower_every_minute[:2], {0: 30, 1: 3}]
    assert choose(together(disturbed_once)) == 1
    assert together([{0: 50, 1: 10, 2: 60}, {2: 30, 0: 25}]) == pytest.approx({2: 41.25 * 12 / 11, 0: 41.25 * 10 / 11})
    assert together([{0: 50}]) == {0: 50}


def test_what_was_found_is_remembered_until_it_is_found_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert recall("bccd") is None
    assert remember("bccd", {0: 40, 1: 50})
    assert remember("cifar", {0: 50, 1: 40})
    assert (recall("bccd"), recall("cifar")) == (1, 0)
    assert remember("bccd", {0: 50, 1: 50})
    assert recall("bccd") == 0
    for k in range(KEPT):
        remember(f"set {k}", {0: 1})
    assert (recall("bccd"), recall(f"set {KEPT - 1}")) == (None, 0)


def test_a_broken_or_unwritable_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "clusterctl" / "workers.json"
    file.parent.mkdir()
    for broken in ("{", "[]", '"x"', "\xff", json.dumps({"bccd": 3}), json.dumps({"bccd": {"workers": "many"}})):
        file.write_text(broken, encoding="latin-1")
        assert recall("bccd") is None
        assert remember("bccd", {2: 1})
        assert recall("bccd") == 2
    file.write_text(json.dumps({"bccd": {"workers": 10**9}}))
    assert recall("bccd") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no folder
    assert recall("bccd") is None
    assert not remember("bccd", {0: 1})


QUICK = (
    "import trainer.training.workers as workers\n"
    "from trainer.__main__ import main\n"
    "workers.SECONDS, workers.FEWEST, workers.IDLE = 0.0, 2, 0.0\n"  # what is measured in seconds, in steps
    "workers.LADDER, workers.NEAR, workers.TURNS = (0, 1), 1.0, 2\n"
    "use_workers = workers.Run.use_workers\n"
    "def said(run, number):\n"
    "    print('use', number)\n"
    "    use_workers(run, number)\n"
    "workers.Run.use_workers = said\n"
    "if __name__ == '__main__':\n"  # workers import it, too
    "    main()\n"
)


def train(folder: Path, data: Path, *more: str) -> tuple[str, str]:
    """What a training says, and its steps' losses; `--workers auto` tries its numbers for a few steps each."""
    (folder / "quick.py").write_text(QUICK)
    arguments = ["train", "--data", str(data), "--project", str(folder / "runs"), "--imgsz", "64", "--batch", "4"]
    arguments += ["--epochs", "4", "--noval", "--device", "cpu", "--cfg", TINY, "--log-steps", *more]
    done = run(folder, *arguments, program=["quick.py"], XDG_CACHE_HOME=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    newest = max((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    return done.stdout, (newest / "steps.csv").read_text()


def test_auto_tries_in_the_first_steps_changes_no_loss_and_is_remembered(tmp_path: Path) -> None:
    data = squares(tmp_path / "set", train=32)
    found, losses = train(tmp_path, data, "--workers", "auto")
    said = next(line for line in found.splitlines() if line.startswith("--workers auto: "))
    assert " with 0, " in said
    assert " with 1 " in said
    taken = re.search(r"; (\d) is taken, and remembered$", said)
    assert taken, said
    assert re.findall(r"^use (\d)$", found, re.MULTILINE) == ["0", "1", "1", "0", taken[1]]  # in turns
    again, same = train(tmp_path, data, "--workers", "auto")
    assert f"--workers auto: {taken[1]}, as found before" in again
    assert "is taken" not in again
    _, plain = train(tmp_path, data, "--workers", "0")
    assert losses == same == plain
    assert len(losses.splitlines()) == 1 + 4 * 8


def test_two_ranks_agree_on_one_number(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(QUICK)
    data = squares(tmp_path / "set", train=32)
    arguments = ["train", "--data", str(data), "--imgsz", "64", "--batch", "4", "--epochs", "4", "--device", "cpu"]
    arguments += ["--noval", "--cfg", TINY, "--workers", "auto"]
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = start(tmp_path, ranks(2), *arguments, program=["quick.py"], **home)
    (code, out, err), (other_code, other_out, _) = wait(processes)
    assert (code, other_code) == (0, 0), err
    assert re.search(r"--workers auto: [\d.]+ with 0, [\d.]+ with 1.* is taken, and remembered", out)
    assert "--workers auto" not in other_out
    (kept,) = json.loads((tmp_path / "cache" / "clusterctl" / "workers.json").read_text()).items()
    assert "2 of 2 ranks" in kept[0]


def test_an_unknown_number_of_workers_is_refused() -> None:
    assert [workers_of(text) for text in ("", "0", "3", "auto")] == [None, 0, 3, "auto"]
    with pytest.raises(TrainerError, match="--workers many: not a number"):
        workers_of("many")
