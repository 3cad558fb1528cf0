from dataclasses import replace
from pathlib import Path

import pytest

import trainer.config
from cluster import contract
from cluster.backends import BACKENDS
from cluster.errors import UsageError
from cluster.spec import resolver
from cluster.spec.counts import gpus_per_node, node_range
from cluster.spec.here import Here
from cluster.spec.model import Inventory, Job, Machine, nodes_of, this_machine
from cluster.spec.mount import Mount
from cluster.spec.port import auto_port
from cluster.spec.request import Request

LAPTOP = Here(cwd="/home/ann/work", user="1000:1000", python="/venv/bin/python", gpus=())


ON_CPU = "processes per node: 2, on the CPU over gloo"


def job(here=LAPTOP, backend="compose", **request):
    return resolver.job(Request(**request), here, BACKENDS[backend], BACKENDS)


@pytest.mark.parametrize(
    ("gpus", "device", "chosen", "notes"),
    [
        (
            (),
            "auto",
            "cpu",
            [
                "this machine has 0 of the 4 GPUs needed, so the ranks are CPU processes (--device cuda makes this an error)",
                ON_CPU,
            ],
        ),
        (
            (0, 1, 2),
            "auto",
            "cpu",
            [
                "this machine has 3 of the 4 GPUs needed, so the ranks are CPU processes (--device cuda makes this an error)",
                ON_CPU,
            ],
        ),
        ((0, 1, 2, 3), "auto", "cuda", []),
        ((0, 1, 2, 3), "cpu", "cpu", [ON_CPU]),
    ],
)
def test_a_downgrade_to_the_cpu_is_a_note_and_with_device_cuda_an_error(gpus, device, chosen, notes):
    here = replace(LAPTOP, gpus=gpus)
    made, said = job(here, nodes="2", gpus=2, device=device)
    assert (made.device, made.command[-2:], said) == (chosen, ("--device", chosen), notes)
    if len(gpus) < 4:
        with pytest.raises(UsageError, match=f"this machine has {len(gpus)} of the 4 GPUs"):
            job(here, nodes="2", gpus=2, device="cuda")


def test_a_device_among_the_trainer_arguments_is_kept():
    made, _ = job(arguments=["--device", "cpu"])
    assert made.command == ("-m", "trainer", "train", "--device", "cpu")


def test_a_named_file_is_mounted_read_only_at_its_own_path():
    here = Here("/home/ann/work", "1:1", "py", (), exists={"/home/ann/y.pt"}.__contains__)
    for option in ("--weights", "--cfg", "--hyp", "--data", "--resume", "--source"):
        made, _ = job(here, arguments=("train", option, "../y.pt", "--epochs", "3"))
        assert "/home/ann/y.pt" in made.command
        assert made.mounts == (Mount("/home/ann/y.pt", "/home/ann/y.pt", read_only=True),)


def test_a_file_in_a_mounted_folder_is_not_mounted_again():
    paths = {"/home/ann/set", "/home/ann/set/y.pt", "/home/ann/set.pt"}
    here = Here(
        "/home/ann/set", "1:1", "py", (), exists=paths.__contains__, is_folder={"/home/ann/set"}.__contains__
    )
    folder = Mount("/home/ann/set", "/home/ann/set")
    beside = Mount("/home/ann/set.pt", "/home/ann/set.pt")
    made, _ = job(here, arguments=("--data", "../set", "--weights", "./y.pt"))
    assert made.mounts == (folder,)
    made, _ = job(here, arguments=("--cfg", "../set.pt", "--weights", "./y.pt"), mounts=("/home/ann/set",))
    assert made.mounts == (folder, beside)


def test_the_checkpoint_before_the_last_is_mounted_with_it():
    paths = [f"/home/ann/run/{name}" for name in ("last.pt", "previous.pt")]
    here = Here("/home/ann", "1:1", "py", (), exists=paths.__contains__)
    made, _ = job(here, arguments=("train", "--resume", "run/last.pt"))
    assert made.mounts == tuple(Mount(path, path) for path in paths)


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        ("path: set\ntrain: images/train\nval: images/val", ["/home/ann/set"]),
        ("train: set/images/train\nval: [set/images/val, ../pool/images]", ["/home/ann/set", "/home/pool"]),
        (
            "train: ../set/images/train",
            ["/home/ann/set"],
        ),  # Roboflow's, relative to a folder that does not exist
        ("train: set/flat\nval: set/lists/val.txt", ["/home/ann/set/flat", "/home/ann/set/lists"]),
        ("path: /home/ann/absent\ntrain: images/train", []),
        ("train: 3\nval: {a: b}", []),
        ("- a list", []),
        ("{", []),
        ("val: 2020-99-99", []),
    ],
)
def test_a_data_yaml_is_mounted_with_the_folders_that_it_names(text, folders, tmp_path):
    file = tmp_path / "home" / "ann" / "data.yaml"
    for name in (
        "ann/set/images/train",
        "ann/set/images/val",
        "ann/set/flat",
        "ann/set/lists",
        "ann/.ssh",
        "pool/images",
    ):
        (tmp_path / "home" / name).mkdir(parents=True)
    (tmp_path / "home/ann/set/lists/val.txt").touch()
    file.write_text(text.replace("/home", f"{tmp_path}/home"))
    here = Here(
        str(tmp_path),
        "1:1",
        "py",
        exists=lambda path: Path(path).exists(),
        is_folder=lambda path: Path(path).is_dir(),
        read=lambda path: Path(path).read_bytes() if Path(path).is_file() else b"",
    )
    made, _ = job(here, arguments=("train", "--data", "home/ann/data.yaml"))
    assert [each.source for each in made.mounts] == [
        str(file),
        *(f"{tmp_path}{folder}" for folder in folders),
    ]
    assert all(each.read_only and each.source == each.target for each in made.mounts)


def test_a_missing_file_is_an_error_unless_it_is_in_a_mount():
    with pytest.raises(UsageError, match=r"--data /d/coco\.yaml: no such file"):
        job(arguments=("--data", "/d/coco.yaml"))
    with pytest.raises(UsageError, match="no such file"):
        job(arguments=("--data=../coco.yaml",))
    made, _ = job(arguments=("--data", "/d/coco.yaml"), mounts=("/home/ann/coco:/d",))
    assert "/d/coco.yaml" in made.command


def test_a_word_is_not_a_path_although_a_folder_has_that_name():
    folders = frozenset({"/home/ann/work/digits", "/home/ann/work/train", "/home/ann/work/SGD"})
    here = Here(
        "/home/ann/work", "1:1", "py", (), exists=folders.__contains__, is_folder=folders.__contains__
    )
    made, _ = job(here, arguments=("train", "--data", "digits", "--optimizer", "SGD"))
    assert made.mounts == ()
    assert made.command[2:7] == ("train", "--data", "digits", "--optimizer", "SGD")


def test_a_folder_of_images_needs_no_slash():
    folders = frozenset({"/home/ann/work/images"})
    here = Here(
        "/home/ann/work", "1:1", "py", (), exists=folders.__contains__, is_folder=folders.__contains__
    )
    for arguments in (("--data", "images"), ("--data=images",)):
        made, _ = job(here, arguments=("train", *arguments))
        assert "/home/ann/work/images" in made.command
        assert made.mounts == (Mount("/home/ann/work/images", "/home/ann/work/images"),)


@pytest.mark.parametrize(("text", "grace_s"), [("", 120), ("0s", 0), ("90s", 90), ("1.5m", 90), ("2h", 7200)])
def test_the_grace_is_a_time(text, grace_s):
    assert job(grace=text)[0].grace_s == grace_s


@pytest.mark.parametrize("text", ["90", "-1s", "forever", "19h"])
def test_a_wrong_grace_is_an_error(text):
    with pytest.raises(UsageError, match="--grace"):
        job(grace=text)


def test_the_inputs_of_yolo_are_brought_to_the_nodes(tmp_path):
    """They are written NAME=VALUE, and a data.yaml brings its folders."""
    set_folder = tmp_path / "set"
    (set_folder / "images" / "train").mkdir(parents=True)
    (set_folder / "data.yaml").write_text("path: .\ntrain: images/train\nval: images/train\n")
    (tmp_path / "my.pt").touch()
    real = replace(
        LAPTOP,
        cwd=str(tmp_path),
        exists=lambda path: Path(path).exists(),
        is_folder=lambda path: Path(path).is_dir(),
        read=lambda path: Path(path).read_bytes(),
    )
    words = (
        "yolo",
        "detect",
        "train",
        "data=set/data.yaml",
        "model=my.pt",
        "epochs=3",
        "lr0=0.01",
        "name=set",
    )
    made, _ = job(real, arguments=words)
    inputs = (f"data={set_folder}/data.yaml", f"model={tmp_path}/my.pt")
    assert made.command[:-2] == (
        "-m",
        "trainer",
        "yolo",
        "detect",
        "train",
        *inputs,
        "epochs=3",
        "lr0=0.01",
        "name=set",
    )
    assert [mount.source for mount in made.mounts] == [str(set_folder), f"{tmp_path}/my.pt"]
    assert (made.max_restarts, made.says_ready) == (3, True)
    assert (
        job(real, arguments=("yolo", "train", "data=set"))[0].command[4] == f"data={set_folder}"
    )  # a classifier's
    assert (
        job(real, arguments=("yolo", "train", "data=coco8.yaml"))[0].mounts == ()
    )  # which the package downloads
    for word in ("data=none/data.yaml", "model=./none.pt"):
        with pytest.raises(UsageError, match=f"{word}: no such file"):
            job(real, arguments=("yolo", "train", word))


def test_the_data_sets_are_those_of_the_trainer():
    names = {name for presets in trainer.config.PRESETS.values() for name in presets}
    assert {*contract.DATA_SETS, ""} == names


def test_a_foreign_program_gets_the_current_folder_and_writes_no_events():
    made, _ = job(command="train.py --lr '0.1 0.2'")
    assert made.command == ("train.py", "--lr", "0.1 0.2")
    assert made.workdir == "/home/ann/work"
    assert made.mounts == (Mount("/home/ann/work", "/home/ann/work", read_only=False),)
    assert not made.says_ready


def test_the_default_name_depends_on_the_whole_job():
    first, _ = job(nodes="2")
    again, _ = job(nodes="2")
    other, _ = job(nodes="3")
    assert first.name == again.name != other.name
    assert first.name.startswith("digits-")
    there = Here("/", "1:1", "py", (), exists={"/d/Bccd/data.yaml"}.__contains__)
    assert job(there, arguments=("--data", "/d/Bccd/data.yaml"))[0].name.startswith("bccd-")
    assert job(arguments=("--data", "coco128.yaml"))[0].name.startswith("coco128-")
    assert job(arguments=("yolo", "train", "data=coco128.yaml"))[0].name.startswith("coco128-")


def test_the_default_name_of_a_module_or_script_is_its_stem():
    names = [job(command=text)[0].name for text in ("-m acme.train --lr 0.1", "acme/train.py --lr 0.1", "-m")]
    assert [name.rpartition("-")[0] for name in names] == ["acme", "train", "m"]


def test_automatic_ports_depend_on_the_name_and_are_outside_the_ephemeral_range():
    assert auto_port("digits") == auto_port("digits")
    assert auto_port("digits", 1) != auto_port("digits")
    assert all(20000 <= auto_port(f"job-{i}", i) < 30000 for i in range(500))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"nodes": "0"}, "--nodes 0"),
        ({"nodes": "4:2"}, "--nodes 4:2"),
        ({"gpus": -1}, "--gpus -1"),
        ({"name": "Not/Good"}, "--name 'Not/Good'"),
        ({"name": "a'; echo foo"}, "--name"),
        ({"master_port": "http"}, "--master-port 'http'"),
        ({"master_port": "80"}, "--master-port '80'"),
        ({"device": "gpu"}, "--device gpu: unknown"),
        ({"env": ("1FOO",)}, "--env 1FOO"),
        ({"env": ("A;B=1",)}, "--env A;B"),
        ({"mounts": ("a:b",)}, "absolute"),
        ({"mounts": ("/a:/b:rx",)}, "--mount"),
        ({"command": "x 'y"}, "--command"),
        ({"command": " "}, "empty"),
        ({"command": "x", "arguments": ("train",)}, "used together"),
        ({"rendezvous_timeout_s": 0.0}, "--rendezvous-timeout"),
    ],
)
def test_an_invalid_option_is_named(request_, message):
    with pytest.raises(UsageError, match=message) as caught:
        job(**request_)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("local", {"image": "trainer:0.1"}),
        ("local", {"mounts": ("/data",)}),
        ("local", {"nodes": "2:4"}),
        ("local", {"settings": ["mem=1G"]}),
        ("local", {"spares": 1}),
    ],
)
def test_an_option_that_the_backend_does_not_support_is_an_error(backend, given):
    (option,) = given
    with pytest.raises(UsageError, match=f"--{option.removesuffix('s').replace('setting', 'set')}"):
        job(backend=backend, **given)


def test_nodes_on_one_machine_divide_its_gpus():
    here = replace(LAPTOP, gpus=(3, 1))
    made, _ = job(here, nodes="2", gpus=1)
    assert [node.gpus for node in nodes_of(made, this_machine())] == [(3,), (1,)]
    assert job(here, nodes="2", gpus=1, device="any")[0].gpus == (3, 1)
    assert job(here, nodes="2", gpus=2, device="any")[0].gpus == ()  # too few to divide: it sees both
    assert job(here, nodes="2", gpus=1, device="cpu")[0].gpus == ()


def test_a_range_of_nodes_begins_with_the_minimum():
    assert node_range("2:4", 1) == (2, 4)
    assert node_range("", 3) == (3, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "0"}, "--nodes 0: must be at least 1"),
        ({"nodes": "-2"}, "--nodes -2: must be at least 1"),
        ({"nodes": "0:2"}, "--nodes 0:2: must be at least 1"),
        ({"nodes": "2:1"}, "--nodes 2:1: MIN (2) must not exceed MAX (1)"),
        ({"nodes": "x"}, "--nodes x: expected a number, or MIN:MAX"),
        ({"nodes": "99999999"}, "--nodes 99999999: must be at most 10000"),
        ({"spares": 1}, "--spares 1: cluster.yaml has 1 machine, so none is left for a node"),
        ({"spares": 7}, "--spares 7: cluster.yaml has 1 machine, so none is left for a node"),
        ({"spares": 1, "nodes": "1"}, "--nodes 1 --spares 1: cluster.yaml has only n0"),
        ({"nodes": "2"}, "--nodes 2: cluster.yaml has only n0"),
        ({"spares": -1}, "--spares -1: must be at least 0"),
        ({"gpus": 0}, "--gpus 0: must be at least 1"),
        ({"gpus": -1}, "--gpus -1: must be at least 1"),
        ({"max_restarts": -1}, "--max-restarts -1: must be at least 0"),
    ],
)
def test_a_number_out_of_range_names_the_option_that_was_typed(given, message):
    machines = (Machine("n0", "10.0.0.1", login="n0", run_dir="/r", runtime="none"),)
    listed = Inventory(machines, path="cluster.yaml", device="cpu")
    with pytest.raises(UsageError) as caught:
        resolver.job(Request(command="true", **given), LAPTOP, BACKENDS["ssh"], BACKENDS, listed)
    assert caught.value.message == message


FILES = {
    "/w/requirements.txt": b"torch\n-r more/base.txt\n--constraint=pins.txt\n",
    "/w/more/base.txt": b"numpy\n",
    "/w/pins.txt": b"numpy==2\n",
    "/w/setup.sh": b"pip install $WHAT\n",
    "/w/pip": b"not what the shell runs",
    "/w/log.txt": b"written by the last setup",
    "/w/editable.txt": b"numpy\n-e ./package[dev]\n",
    "/w/huge.whl": None,
}
INSTALL = "pip install -r requirements.txt"


def setup_key(text, env=(), **changed):
    files = {**FILES, **{f"/w/{name.replace('_', '.')}": content for name, content in changed.items()}}
    folders = {"/w", "/w/package", "/w/more"}
    here = Here("/w", "1:1", "py", (), read=lambda path: files.get(path, b""), is_folder=folders.__contains__)
    made, _ = job(here, setup=text, command="x.py", env=env)
    return made.setup_key


@pytest.mark.parametrize(
    ("text", "env", "changed"),
    [
        (f"{INSTALL} --pre", (), {}),
        (INSTALL, (), {"requirements_txt": b"torch==2\n"}),
        (INSTALL, (), {"more/base_txt": b"numpy==1\n"}),
        (INSTALL, (), {"pins_txt": b"numpy==1\n"}),
        (INSTALL, ("PIP_INDEX_URL=https://mirror/simple",), {}),
        (f"FOO=1 {INSTALL}; bash setup.sh", ("WHAT=numpy",), {}),
        ("bash <setup.sh", (), {"setup_sh": b"true\n"}),
        ("./setup.sh", (), {"setup_sh": b"true\n"}),
        ("pip install x==$V && true", ("V=2",), {}),
    ],
)
def test_the_key_of_a_setup_changes_with_all_that_it_depends_on(text, env, changed):
    before = setup_key(INSTALL if text.startswith(INSTALL) and not env and not changed else text)
    assert len(before) == 16
    assert setup_key(text, env, **changed) not in (before, "")


def test_another_prologue_is_another_setup():
    here = Here("/w", "1:1", "py", ())
    keys = {
        job(here, "local", setup="true", command="x.py", prologue=lines)[0].setup_key
        for lines in ("", "module load a", "b")
    }
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("text", "env", "changed"),
    [
        (INSTALL, ("LR=0.1",), {}),
        (INSTALL, (), {"pip": b"another file with the command's name"}),
        (f"{INSTALL} > log.txt 2>&1", (), {"log_txt": b"again"}),
    ],
)
def test_jobs_share_a_setup_that_depends_on_nothing_else(text, env, changed):
    assert setup_key(text, env, **changed) == setup_key(text) != ""


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        "pip install -e '.[dev]'",
        "pip install ./package",
        "pip install -r editable.txt",
        "pip install huge.whl",
    ],
)
def test_a_setup_of_a_folder_or_of_a_huge_file_is_the_jobs_own(text):
    assert setup_key(text) == ""


def machines(*counts):
    """Machines n0, n1, ... with so many GPUs."""
    return tuple(
        Machine(
            f"n{index}",
            f"10.0.0.{index}",
            tuple(range(count)),
            login=f"n{index}",
            run_dir="/r",
            runtime="none",
        )
        for index, count in enumerate(counts)
    )


def over_ssh(counts, usual="cuda", **request):
    listed = Inventory(machines(*counts), path="cluster.yaml", device=usual)
    return resolver.job(Request(command="true", **request), LAPTOP, BACKENDS["ssh"], BACKENDS, listed)[0]


@pytest.mark.parametrize(
    ("counts", "request_", "gpus"),
    [
        ((2, 1), {"gpus": "2,1"}, [(0, 1), (0,)]),
        ((2, 1), {"gpus": "2, 1"}, [(0, 1), (0,)]),
        ((2, 4, 1), {"gpus": "1,3,1"}, [(0,), (0, 1, 2), (0,)]),
        ((2, 1), {"gpus": "all"}, [(0, 1), (0,)]),
        ((2, 1), {"gpus": "all", "device": "any"}, [(0, 1), (0,)]),
        ((2, 1, 4), {"gpus": "all", "nodes": "1:2", "spares": 1}, [(0, 1), (0,)]),
        ((2, 1, 2), {"gpus": "2,1", "spares": 1}, [(0, 1), (0,)]),
        ((2, 2), {"gpus": "2,2"}, [(0, 1), (0, 1)]),
    ],
)
def test_each_node_has_its_own_number_of_processes(counts, request_, gpus):
    made = over_ssh(counts, **request_)
    plan = BACKENDS["ssh"].plan(made, attempt=1, port=20000)
    assert [node.gpus for node in plan.nodes] == gpus
    assert (made.nodes, made.world_size) == (len(gpus), sum(map(len, gpus)))
    assert made.procs == tuple(map(len, gpus))


def test_equal_numbers_give_the_plan_of_one_number():
    one = over_ssh((2, 2), gpus="2")
    assert over_ssh((2, 2), gpus="2,2") == one
    plans = [
        BACKENDS["ssh"].plan(made, attempt=1, port=20000)
        for made in (one, over_ssh((2, 2), gpus="all", name=one.name))
    ]
    assert plans[0].steps == plans[1].steps


ONLY = "use fewer --gpus, other nodes, or --device cpu (CPU processes instead)"
OR_ALL = f"use all GPUs of each machine: --gpus all; or {ONLY}"


@pytest.mark.parametrize(
    ("counts", "request_", "message", "hint"),
    [
        ((2, 1), {"gpus": "2"}, "n1: --gpus 2 asks for more than its GPUs (1)", OR_ALL),
        ((2, 0), {"gpus": "2"}, "n1: --gpus 2 asks for more than its GPUs (0)", ONLY),
        ((2, 1), {"gpus": "1,2"}, "n1: --gpus 1,2 asks for 2 here, more than its GPUs (1)", OR_ALL),
        (
            (2, 1, 1),
            {"gpus": "2,1", "spares": 1},
            "n2: --gpus 2,1 asks for 2 of a spare, more than its GPUs (1)",
            OR_ALL,
        ),
        (
            (2, 1),
            {"gpus": "2,1,1"},
            "--gpus 2,1,1: 3 numbers, but the job has 2 nodes",
            "give one number per node (--nodes 3), or one for all nodes: --gpus 2",
        ),
        (
            (2, 1, 1),
            {"gpus": "2,1", "nodes": "1"},
            "--gpus 2,1: 2 numbers, but the job has 1 node",
            "give one number per node (--nodes 2), or one for all nodes: --gpus 2",
        ),
        (
            (2, 0, 1),
            {"gpus": "all"},
            "n1: --gpus all, but it has no GPUs",
            "leave it out (--only n0,n2), or start processes on CPUs: --device cpu --gpus 1",
        ),
        (
            (2, 1, 0),
            {"gpus": "all", "spares": 1},
            "n2: --gpus all, but it has no GPUs",
            "leave it out (--only n0,n1), or start processes on CPUs: --device cpu --gpus 1",
        ),
        (
            (2, 1),
            {"gpus": "all", "device": "cpu"},
            "--gpus all: there are no GPUs to count with --device cpu",
            "give the number of CPU processes per node: --gpus 2",
        ),
    ],
)
def test_numbers_that_machines_do_not_have_are_an_error_that_helps(counts, request_, message, hint):
    with pytest.raises(UsageError) as caught:
        over_ssh(counts, **request_)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_all_gpus_of_machines_for_cpu_processes_are_an_error():
    with pytest.raises(UsageError, match=r"no GPUs to count with device: cpu in cluster\.yaml"):
        over_ssh((2, 1), "cpu", gpus="all")


def test_cpu_processes_do_not_depend_on_the_number_of_gpus():
    """The hint of a number that is too large names --device cpu."""
    assert over_ssh((2, 1), gpus="4", device="cpu").procs == (4, 4)
    assert over_ssh((2, 1), "cpu", gpus="4,1").procs == (4, 1)


@pytest.mark.parametrize(
    "text", ["", "two", "2;1", "2,", ",1", "2,,1", "1.5", "ALL", "all,1", "2 1", "١", "1_0", "9" * 19]
)
def test_other_values_of_gpus_are_an_error(text):
    with pytest.raises(UsageError, match="expected a number, one number per node, or all"):
        gpus_per_node(text)


@pytest.mark.parametrize(
    ("text", "why"), [("0", "at least 1$"), ("2,0", "at least 1 for each node"), ("1,-1", "at least")]
)
def test_each_node_has_a_process(text, why):
    with pytest.raises(UsageError, match=f"--gpus {text}: must be {why}"):
        gpus_per_node(text)


@pytest.mark.parametrize("backend", ["local", "compose"])
def test_nodes_on_one_machine_divide_its_gpus_unequally(backend):
    here = replace(LAPTOP, gpus=(3, 1, 5, 7))
    made, notes = job(here, backend=backend, nodes="3", gpus="1,2,1")
    assert [node.gpus for node in nodes_of(made, this_machine())] == [(3,), (1, 5), (7,)]
    assert (made.device, notes, made.world_size) == ("cuda", [], 4)
    made, notes = job(replace(here, gpus=(0, 1)), backend=backend, nodes="2", gpus="2,1")
    assert notes[0].startswith("this machine has 2 of the 3 GPUs")
    assert notes[1] == "processes per node: 2 and 1, on the CPU over gloo"
    assert [node.gpus for node in nodes_of(made, this_machine())] == [(), ()]


@pytest.mark.parametrize(
    ("gpus", "request_", "message", "hint"),
    [
        (
            (),
            {},
            "--gpus all: this machine has no GPU that can be used",
            "give a number, for CPU processes: --gpus 2",
        ),
        (
            (0, 1),
            {"device": "cpu"},
            "--gpus all: there are no GPUs to count with --device cpu",
            "give the number of CPU processes per node: --gpus 2",
        ),
        (
            (0, 1, 2, 3, 4),
            {"nodes": "2"},
            "--gpus all: this machine's GPUs are for one node, but the job has 2",
            "use one node: --nodes 1; or divide them: --gpus 2",
        ),
        (
            (0,),
            {"nodes": "2"},
            "--gpus all: this machine's GPUs are for one node, but the job has 2",
            "use one node: --nodes 1",
        ),
    ],
)
def test_all_gpus_of_this_machine_are_for_one_node(gpus, request_, message, hint):
    assert job(replace(LAPTOP, gpus=(3, 1)), gpus="all")[0].gpus == (3, 1)
    with pytest.raises(UsageError) as caught:
        job(replace(LAPTOP, gpus=gpus), gpus="all", **request_)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize("backend", ["slurm", "kubernetes"])
@pytest.mark.parametrize(("gpus", "number"), [("2,1", 2), ("all", 2), ("1,4", 4)])
def test_a_scheduler_gives_all_nodes_one_number(backend, gpus, number):
    with pytest.raises(UsageError) as caught:
        job(backend=backend, nodes="2", gpus=gpus, image="registry/trainer:1")
    assert caught.value.message.startswith(f"--gpus {gpus}: ")
    assert "chooses the machines, so all nodes get the same number" in caught.value.message
    assert caught.value.hint == f"give all nodes one number: --gpus {number}"
    assert (
        job(backend=backend, nodes="2", gpus=f"{number},{number}", image="registry/trainer:1")[0].procs
        == (number,) * 2
    )


def test_only_a_node_with_several_processes_must_not_have_mig_slices():
    mixed = (
        replace(machines(2)[0], gpus=(0, 1)),
        replace(machines(1)[0], name="n1", gpus=("MIG-1", "MIG-2")),
    )
    made = Job("job", ("x.py",), 2, (2, 1), "/r", hosts=mixed)
    assert made.gpus_of_nodes == ((0, 1), ("MIG-1",))
    for procs, given in (((1, 2), "1,2"), ("all", "all"), (2, "2")):
        with pytest.raises(UsageError, match=f"--gpus {given}: CUDA shows a process only one MIG slice"):
            replace(made, procs_per_node=procs)
