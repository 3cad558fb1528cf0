import json
from pathlib import Path

import pytest

from cluster import discovery, inventory, keys
from cluster.errors import UsageError
from cluster.model import Inventory, Mount, Node

HOSTILE = [
    "a'; echo foo",
    'a"=0"',
    "one\ntwo",
    "$HOME `id` \\",
    "",
    "-n",
    "ünïcode",
    "!x *",
    "# no",
    "yes",
    "010",
    "\t",
    "😀",
]


def read(text, path="cluster.yaml"):
    return inventory.from_yaml(text, path, "/home/ann")


def refused(text):
    with pytest.raises(UsageError) as caught:
        read(text)
    return caught.value


def test_a_list_of_names_is_enough_and_leaves_the_rest_to_be_looked_for():
    made = read("nodes: [gpu-a, gpu-b]")
    assert made == Inventory(
        (Node("gpu-a", "", login="gpu-a", runtime=""), Node("gpu-b", "", login="gpu-b", runtime="")),
        path="cluster.yaml",
    )
    assert not inventory.is_complete(made)


def test_every_key_arrives_and_a_node_wins_over_the_defaults():
    made = read(
        """
        backend: ssh
        image: trainer:0.1
        device: cpu
        ssh_config: keys/config
        env: {OMP_NUM_THREADS: 2, MODE: 0755, WORD: yes}
        mounts: [data, "/scratch:/scratch:rw"]
        defaults: {user: ann, port: 2222, gpus: 4, run_dir: /data/runs, data_dir: ~/data, runtime: docker}
        nodes:
          gpu-a: {address: 10.0.0.5, labels: [a100, rack-1]}
          gpu-b: {login: bob@10.9.9.9:22, gpus: [0, 2], run_dir: /scratch/runs/, runtime: podman, address: "fd00::5"}
          here: {login: ""}
        """
    )
    config = "/home/ann/keys/config"
    assert made.nodes == (
        Node(
            name="gpu-a",
            address="10.0.0.5",
            gpus=(0, 1, 2, 3),
            login="ann@gpu-a:2222",
            run_dir="/data/runs",
            data_dir="~/data",
            runtime="docker",
            ssh_config=config,
            labels=("a100", "rack-1"),
        ),
        Node("gpu-b", "fd00::5", (0, 2), "bob@10.9.9.9:22", "/scratch/runs", "~/data", "podman", config),
        Node("here", "", (0, 1, 2, 3), "", "/data/runs", "~/data", "docker", config),
    )
    assert (made.image, made.device) == ("trainer:0.1", "cpu")
    # as written: YAML itself would make these 2, 493 and true
    assert made.env == {"OMP_NUM_THREADS": "2", "MODE": "0755", "WORD": "yes"}
    assert made.mounts == (Mount("/home/ann/data", "/home/ann/data"), Mount("/scratch", "/scratch", read_only=False))


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one():
    error = refused("device: cpu\nnodes:\n  gpu-a:\n    adress: 10.0.0.5\n")
    assert error.message == "cluster.yaml:4: nodes.gpu-a.adress: unknown key"
    assert error.hint == "did you mean address?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cluster.yaml: it is empty"),
        ("- gpu-a", "not a file of keys and values"),
        ("device: cpu", "nodes is missing"),
        ("nodes: []", "1: nodes: no node"),
        ("nodes: 3", "nodes: 3: must be keys and values"),
        ("nodes:\n  a: 1", "2: nodes.a: 1: must be keys and values"),
        ("nodes: [a, b, a]", "1: nodes.2: 'a' stands there twice"),
        ("nodes:\n  a:\n  b:\n  a:", "4: 'a' stands there twice"),
        ("device: cpu\ndevice: cuda\nnodes: [a]", "2: 'device' stands there twice"),
        ("nodes: [a]\ndevice: auto", "2: device: 'auto'"),
        ("nodes: [a]\nbackend: k8s", "2: backend: 'k8s'"),
        ("nodes:\n  a: {gpus: '2'}", "2: nodes.a.gpus: '2'"),
        ("nodes:\n  a: {gpus: [0, x]}", "2: nodes.a.gpus.1: 'x'"),
        ("nodes:\n  a: {gpus: [0, 0]}", "2: nodes.a.gpus: .* no number or list"),
        ("nodes:\n  a: {gpus: -1}", "2: nodes.a.gpus: -1"),
        ("nodes:\n  a: {gpus: 0}", "2: nodes.a.gpus: no GPU, and device is cuda"),
        ("defaults:\n  gpus: 0\nnodes: [a]", "2: defaults.gpus: no GPU"),
        ("nodes:\n  a: {run_dir: runs}", "2: nodes.a.run_dir: 'runs' is relative"),
        ("defaults:\n  data_dir: data\nnodes: [a]", "2: defaults.data_dir: 'data' is relative"),
        ('nodes:\n  a: {run_dir: "/a\\0b"}', "2: nodes.a.run_dir: there is a NUL"),
        ("nodes:\n  a: {address: gpu-a}", "2: a: the address 'gpu-a' is not a number"),
        ("nodes:\n  a: {address: 0.0.0.0}", "2: a: nobody can dial 0.0.0.0"),
        ("nodes:\n  a: {address: 127.0.0.1}\n  b:", "2: nodes.a.address: a: 127.0.0.1 means a machine itself"),
        ("nodes:\n  a: {address: 10.0.0.5}\n  b: {address: 10.0.0.5}", "3: nodes.b.address: 10.0.0.5 is a's address"),
        ("nodes:\n  a: {login: a b}", "2: nodes.a.login: 'a b': not a login"),
        ("nodes:\n  a: {login: -oProxyCommand=id}", "2: nodes.a.login"),
        ('nodes:\n  "a\'; echo foo":', "2: a node's name \"a'; echo foo\""),
        ("nodes:\n  ../a:", "2: a node's name '../a'"),
        ("nodes: [a]\nenv: {A-B: 1}", "2: env.A-B: not a variable's name"),
        ("nodes: [a]\nenv: {A: [1]}", "2: env.A: "),
        ("nodes: [a]\nmounts: ['/a:b']", "2: mounts.0: '/a:b': the target must be an absolute path"),
        ("nodes: [a", "1: expected"),
        ("nodes: &x [*x]", "1: aliases"),
        ("nodes: [!!python/name:os.system a]\ndevice: !!python/name:os.system a", "2: could not determine"),
        ("{a: " * 3000 + "}" * 3000, "cluster.yaml: nested too deeply"),
        ("nodes: [a]\nimage: \0", "special characters"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(text, message):
    with pytest.raises(UsageError, match=message):
        read(text)


def test_what_is_written_reads_back_the_same_whatever_is_in_it():
    nodes = (
        Node("gpu-a", "10.0.0.5", (0, 1), "gpu-a", "/data/runs", "/data/data", "docker", "/k/config", ("x y", "#")),
        Node("on", "10.0.0.6", (0, 3), "ann@h:22", "/d/a b'; echo foo", '/d/"\\', "none", "/k/config"),
        Node("10", "fd00::5", (), "", "/d/$HOME\n", "/d/ünï", "podman", "/k/config"),
    )
    made = Inventory(
        nodes,
        image="localhost:5000/trainer:0.1",
        device="cpu",
        env={f"V{index}": text for index, text in enumerate(HOSTILE)},
        mounts=(Mount("/a b", "/c'd"), Mount("/e", "/e", read_only=False)),
        path="cluster.yaml",
    )
    text = inventory.write(made, {"on": ["found: x\nnodes: [evil]"]}, ["head\nimage: evil"])
    assert read(text) == made


def test_hosts_are_logins_and_their_names():
    made = inventory.from_hosts("gpu-a, ann@gpu-b:2222,10.0.0.7,fd00::7")
    assert [(node.name, node.login) for node in made.nodes] == [
        ("gpu-a", "gpu-a"),
        ("gpu-b", "ann@gpu-b:2222"),
        ("10.0.0.7", "10.0.0.7"),
        ("fd00--7", "fd00::7"),
    ]


@pytest.mark.parametrize("text", ["a,,b", "a,a", "a,bob@a", "a b", "-a", "a;b", "a,", "@a", "a:x"])
def test_hosts_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="--hosts"):
        inventory.from_hosts(text)


def test_a_hostfile_is_read_as_mpi_deepspeed_and_horovod_write_it():
    text = "# cluster\nworker-1 slots=4\n\nworker-2 slots=2 max_slots=8  # two\r\nworker-3:8\nann@worker-4\n"
    made = inventory.from_hostfile(text, "hostfile")
    assert [(node.name, node.login, len(node.gpus)) for node in made.nodes] == [
        ("worker-1", "worker-1", 4),
        ("worker-2", "worker-2", 2),
        ("worker-3", "worker-3", 8),
        ("worker-4", "ann@worker-4", 0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hostfile: names no machine"),
        ("# only a comment\n", "hostfile: names no machine"),
        ("a slots=2\na slots=2", "hostfile:2: a stands there twice"),
        ("a\nb slots=0", "hostfile:2: slots '0'"),
        ("a slots=x", "hostfile:1: slots 'x'"),
        ("a:x", "hostfile:1: slots 'x'"),
        ("a slots=1 slots=2", "hostfile:1: 'slots=2' is not understood"),
        ("a gpus=2", "hostfile:1: 'gpus=2' is not understood"),
        ("a;reboot slots=2", "hostfile:1: 'a;reboot' is not a machine"),
    ],
)
def test_a_hostfile_that_makes_no_sense_is_refused_with_its_line(text, message):
    with pytest.raises(UsageError, match=message):
        inventory.from_hostfile(text, "hostfile")


def test_load_takes_the_file_of_the_folder_and_none_means_this_machine(tmp_path):
    assert discovery.load(cwd=str(tmp_path)) is None
    (tmp_path / "cluster.yaml").write_text("nodes: [a, b]")
    assert [node.name for node in discovery.load(cwd=str(tmp_path)).nodes] == ["a", "b"]
    assert [node.name for node in discovery.load(hosts="c", cwd=str(tmp_path)).nodes] == ["c"]
    assert [node.name for node in discovery.load(only="b", cwd=str(tmp_path)).nodes] == ["b"]
    with pytest.raises(UsageError, match="no node 'c'"):
        discovery.load(only="a,c", cwd=str(tmp_path))


def test_a_file_that_was_named_and_is_not_there_is_never_one_machine(tmp_path):
    for option in ("path", "hostfile", "ssh_config"):
        arguments = {option: "nowhere", **({"hosts": "a"} if option == "ssh_config" else {})}
        with pytest.raises(UsageError, match=r"nowhere: No such file"):
            discovery.load(**arguments, cwd=str(tmp_path))
    (tmp_path / "cluster.yaml").write_text("ssh_config: nowhere\nnodes: [a]")
    with pytest.raises(UsageError, match=r"cluster\.yaml: ssh_config .*nowhere: No such file"):
        discovery.load(cwd=str(tmp_path))
    with pytest.raises(UsageError, match="--hosts and --hostfile exclude each other"):
        discovery.load(hosts="a", hostfile="b")
    with pytest.raises(UsageError, match=r"--only: there is no cluster\.yaml"):
        discovery.load(only="a", cwd=str(tmp_path.parent))


def test_the_committed_schema_is_current():
    committed = Path(__file__).parents[2] / "docs" / "cluster.schema.json"
    assert json.loads(committed.read_text()) == keys.schema()


def test_the_examples_are_read():
    examples = Path(__file__).parents[2] / "examples"
    full = discovery.load(str(examples / "cluster.yaml"))
    assert inventory.is_complete(discovery.load(str(examples / "cluster.yaml"), only="gpu-a")) is False  # data_dir
    assert [(node.login, len(node.gpus), node.run_dir) for node in full.nodes] == [
        ("ann@gpu-a", 4, "/data/runs"),
        ("ann@gpu-b", 3, "/data/runs"),
        ("root@10.20.0.7:2222", 4, "/mnt/disk/runs"),
    ]
    assert [node.name for node in discovery.load(str(examples / "cluster-cpu.yaml")).nodes] == ["worker-1", "worker-2"]
    assert [len(node.gpus) for node in discovery.load(hostfile=str(examples / "hostfile")).nodes] == [4, 4]


def test_nodes_are_chosen_by_name_or_label():
    nodes = (
        Node("a", "10.0.0.1", labels=("fast",)),
        Node("b", "10.0.0.2"),
        Node("c", "10.0.0.3", labels=("fast", "new")),
    )
    made = Inventory(nodes)
    assert [node.name for node in inventory.only(made, "fast").nodes] == ["a", "c"]
    assert [node.name for node in inventory.only(made, "b,new").nodes] == ["b", "c"]
    with pytest.raises(UsageError, match="no node 'slow'") as refused:
        inventory.only(made, "slow")
    assert "a, b, c, fast, new" in refused.value.hint
