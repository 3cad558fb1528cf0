"""Job files: the keys, and the options that override them."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
import typer
import yaml
from typer.testing import CliRunner

import cluster
import cluster.cli.main
from cluster.backends import BACKENDS
from cluster.errors import UsageError
from cluster.spec import job_file, job_text
from cluster.spec.request import LaunchOptions, UnchangedOptions, keyed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    return tmp_path


def clusterctl(*words):
    result = CliRunner().invoke(cluster.cli.main.app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def plan(*words):
    """The plan without the job's own name, which depends on the options."""
    return json.loads(clusterctl("plan", "--backend", "compose", "--name", "job", "--json", *words))


#: A value for each option that is not the default.
OTHER_VALUES = {
    "nodes": "2:4",
    "gpus": "2,1",
    "device": "cpu",
    "command": "train.py 'a b'",
    "grace": "90s",
    "workdir": "/data",
    "arguments": ["train"],
    "env": ["A=1", "KEY"],
    "mounts": ["/a:/b:rw"],
    "hosts": "a,b",
    "only": "a,b",
    "backend": "local",
    "settings": ["slurm.mem=3G"],
    "max_restarts": 2,
    "stall_timeout_s": 7.0,
}


def other_value(option):
    """Return a value of an option, which a new option needs no line for unless only some values are valid."""
    if option.field in OTHER_VALUES:
        return OTHER_VALUES[option.field]
    by_type = {str: "text", bool: True, int: 5, float: 5.0, list[str]: ["--memory=3g"]}
    return by_type[option.type]


@pytest.mark.parametrize("option", keyed(), ids=lambda option: option.field)
def test_an_option_is_declared_once_for_the_command_line_the_job_file_and_its_schema(option):
    value = other_value(option)
    assert value != option.default
    text = job_text.write(LaunchOptions(**{option.field: value}), "local", BACKENDS)
    assert job_file.read(text, "job.yaml", BACKENDS) == {option.field: value}
    assert len(job_file.json_schema(BACKENDS)["properties"][option.key_name]["description"]) > 10
    launch = typer.main.get_group(cluster.cli.main.app).commands["launch"]
    (parameter,) = [each for each in launch.params if each.name == option.field]
    assert option.field == "arguments" or option.flag in parameter.opts


def test_keys_are_saved_in_the_order_in_which_their_options_are_declared():
    every = LaunchOptions(**{option.field: other_value(option) for option in keyed()})
    saved = [*yaml.safe_load(job_text.write(every, "local", BACKENDS))]
    assert saved == [key for key in job_file.json_schema(BACKENDS)["properties"] if key not in BACKENDS]


@pytest.mark.parametrize("option", fields(UnchangedOptions), ids=lambda option: option.name)
def test_an_unchanged_option_reaches_the_job(folder, option):
    declared = next(each for each in keyed() if each.field == option.name)
    value = other_value(declared)
    assert plan(f"{declared.flag}={value}", "--command", "train.py")["job"][option.name] == value


def test_a_plan_of_options_does_without_the_slow_pydantic(folder):
    words = "plan", "--backend", "local", "--command", "train.py", "--save", "job.yaml"
    program = "import sys; from cluster.cli.main import app\napp(sys.argv[1:], standalone_mode=False)\n"
    program += "sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", program, *words], cwd=folder, check=True)
    assert (folder / "job.yaml").exists()


def test_the_schema_describes_every_option():
    properties = job_file.json_schema(BACKENDS)["properties"]
    assert "once per node" in properties["setup"]["description"]
    described = json.loads(clusterctl("plan", "--schema"))["properties"]
    assert described.keys() == job_file.file_type(BACKENDS).model_fields.keys()


@pytest.mark.parametrize(("text", "option"), [("2", "2"), ("[2, 1]", "2,1"), ("2,1", "2,1"), ("[2, 2]", "2")])
def test_gpus_are_a_number_or_a_list(folder, text, option):
    (folder / "job.yaml").write_text(f"nodes: 2\ngpus: {text}\ncommand: train.py\n")
    options = ["--nodes", "2", "--command", "train.py", "--gpus", option, "--device", "cpu"]
    wanted = plan(*options)
    assert plan("job.yaml", "--device", "cpu") == wanted
    clusterctl("plan", "--backend", "compose", *options, "--save", "saved.yaml")
    assert yaml.safe_load((folder / "saved.yaml").read_text())["gpus"] == yaml.safe_load(
        option if option == "2" else "[2, 1]"
    )
    assert plan("saved.yaml", "--run-dir", wanted["job"]["run_root"]) == wanted


def test_all_gpus_are_saved_as_all(folder):
    text = job_text.write(LaunchOptions(gpus="all"), "local", BACKENDS)
    assert yaml.safe_load(text) == {"gpus": "all"}
    assert job_file.read(text, "job.yaml", BACKENDS) == {"gpus": "all"}


def test_settings_are_saved_at_their_place_and_with_their_type():
    settings = ["limits.nvidia.com/mem=4", "pod.spec.priority=30", r"pod.metadata.labels.a\.b/c=x"]
    settings += ['pod.spec.hostAliases=[{ip: "10", n: 1}]', "slurm.mem=007", "slurm.contiguous="]
    text = job_text.write(LaunchOptions(settings=settings), "kubernetes", BACKENDS)
    saved = yaml.load(text, yaml.BaseLoader)
    spec = {"priority": "30", "hostAliases": [{"ip": "10", "n": "1"}]}
    assert saved["kubernetes"]["pod"] == {"spec": spec, "metadata": {"labels": {"a.b/c": "x"}}}
    assert saved["kubernetes"]["limits"] == {"nvidia.com/mem": "4"}
    assert saved["slurm"] == {"mem": "007", "contiguous": ""}
    given = LaunchOptions(settings=job_file.read(text, "job.yaml", BACKENDS)["settings"])
    made = BACKENDS["kubernetes"].settings({}, given.given_settings("kubernetes", BACKENDS, unnamed=False))
    assert made["pod"]["spec"] == {"priority": 30, "hostAliases": [{"ip": "10", "n": 1}]}
    assert given.given_settings("slurm", BACKENDS, unnamed=False) == {"mem": "007", "contiguous": ""}


def test_a_file_gives_the_same_plan_as_the_options(folder):
    (folder / "job.yaml").write_text(
        "nodes: 2\ngpus: 2\ncommand: [train.py, --name, two words]\nenv: {A: 1, B: x=y}\nsecrets: [KEY]\n"
        "mounts: ['./data:/data']\nmaster_port: 23456\nmax_restarts: 1\nsetup: pip install x\ngrace: 10m\n"
    )
    options = [
        "--nodes",
        "2",
        "--gpus",
        "2",
        "--command",
        "train.py --name 'two words'",
        "-e",
        "A=1",
        "-e",
        "B=x=y",
    ]
    options += ["-e", "KEY", "-v", "./data:/data", "--master-port", "23456", "--max-restarts", "1"]
    assert plan("job.yaml") == plan(*options, "--setup", "pip install x", "--grace", "600s")


def test_options_override_keys_and_repeatable_ones_are_added(folder):
    (folder / "job.yaml").write_text(
        "nodes: 2\ncommand: train.py --lr 1\nenv: {A: 1, B: 2}\nstall_timeout: 7\n"
    )
    found = plan("job.yaml", "--nodes", "3", "-e", "B=3", "--", "--lr", "2")
    assert len(found["nodes"]) == 3
    assert found["job"]["command"] == ["train.py", "--lr", "1", "--lr", "2"]
    text = "".join(found["steps"][0]["files"].values())
    assert "A: 1" in text
    assert "B: 3" in text
    assert plan("job.yaml", "--command", "other.py")["job"]["command"] == ["other.py"]


def test_settings_of_a_backend_come_back_from_a_saved_file(folder):
    settings = [
        "--set",
        "limits.memory=4Gi",
        "--set",
        "volumes=[{claim: data, path: /data}]",
        "--set",
        "slurm.mem=1G",
    ]
    words = ["--backend", "kubernetes", "--name", "job", *settings]
    clusterctl("plan", *words, "--save", "saved.yaml")
    assert yaml.safe_load((folder / "saved.yaml").read_text())["slurm"] == {"mem": "1G"}
    text = clusterctl("plan", "saved.yaml")
    assert text == clusterctl("plan", *words)
    assert "claimName: data" in text
    assert "memory: '4Gi'" in text


@pytest.mark.parametrize(
    "setting", ["volumes=[{", "volumes=[{claim: a, path: b}]", "limits.memory=4GB", "foo=1"]
)
def test_a_wrong_setting_is_one_error_line(folder, setting):
    done = CliRunner().invoke(cluster.cli.main.app, ["launch", "--backend", "kubernetes", "--set", setting])
    assert isinstance(done.exception, UsageError)
    assert done.exception.message.startswith(f"--set {setting.partition('=')[0]}")


def test_arguments_after_the_file_are_the_trainers(folder):
    (folder / "job.yaml").write_text("args: train --epochs 3\n")
    assert plan("job.yaml", "--device", "cpu", "--", "--epochs", "5")["job"]["command"] == [
        *("-m", "trainer", "train", "--epochs", "3", "--epochs", "5", "--device", "cpu")
    ]


def test_a_saved_file_gives_the_plan_of_the_options(folder, monkeypatch):
    options = [
        "--nodes",
        "2",
        "--command",
        "train.py",
        "-e",
        "A=1",
        "-e",
        "KEY",
        "-v",
        "data:/data",
        "--spares",
        "0",
    ]
    options += ["--grace", "90s"]
    clusterctl("plan", "--backend", "compose", *options, "--save", "saved.yaml")
    wanted = plan(*options, "--run-dir", str(folder / "runs"))
    monkeypatch.chdir("/")
    assert plan(str(folder / "saved.yaml")) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml is empty"),
        ("comand: train.py", "job.yaml:1: comand: unknown key"),
        ("gpus: two", "job.yaml:1: gpus: two: expected a number, one number per node, or all"),
        ("gpus: [2, x]", "job.yaml:1: gpus: 2,x: expected a number, one number per node, or all"),
        ("gpus: {a: 1}", "job.yaml:1: gpus: {'a': '1'} is not a number, a list of numbers or all"),
        ("gpus: [[1], 2]", "job.yaml:1: gpus: [['1'], '2'] is not a number, a list of numbers or all"),
        ("gpus: []", "job.yaml:1: gpus: [] is not a number, a list of numbers or all"),
        ("gpus:", "job.yaml:1: gpus: None is not a number, a list of numbers or all"),
        ("gpus: [2, 0]", "job.yaml:1: gpus: 2,0: must be at least 1 for each node"),
        ("nodes: 0", "job.yaml:1: nodes: 0: must be at least 1"),
        ("command: {a: b}", "job.yaml:1: command: {'a': 'b'} is not a text or a list of words"),
        ('command: "\'"', 'job.yaml:1: command: "\'": No closing quotation'),
        ("env: [A]", "job.yaml:1: env: ['A']: must be keys and values"),
        ("secrets: [A-B]", "job.yaml:1: secrets.0: 'A-B': expected the name of a variable"),
        ("slurm:\n  nodes: 2", "job.yaml:1: slurm: nodes=...: clusterctl sets it"),
        ("gpus: 1\ncommand: a\nargs: b", "job.yaml:3: args: command and args cannot be used together"),
        ("backend: k8s", "job.yaml:1: backend: 'k8s': input should be 'auto', "),
        ("grace: 90", "job.yaml:1: grace: '90': expected a time"),
    ],
)
def test_a_wrong_file_is_one_error_with_line_and_key(text, message):
    with pytest.raises(UsageError) as refused:
        job_file.read(text, "job.yaml", BACKENDS)
    assert refused.value.message.startswith(message)


def test_a_missing_file_is_an_error(folder):
    with pytest.raises(UsageError, match=r"^none.yaml: No such file"):
        clusterctl("launch", "none.yaml")


def test_the_python_interface_refuses_a_build(folder):
    with pytest.raises(UsageError, match="build: only clusterctl builds images"):
        cluster.launch(build=".", backend="local")
