import pytest

from cluster.backends import BACKENDS
from cluster.errors import UsageError
from cluster.spec import inventory, schema
from cluster.spec.model import Inventory, Machine
from cluster.spec.mount import Mount
from cluster.transport import discovery

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
    "\t",
    "😀",
]


def read(text, path="cluster.yaml"):
    return schema.read(text, path, BACKENDS, "/home/ann")


def refused(text):
    with pytest.raises(UsageError) as caught:
        read(text)
    return caught.value


def test_a_list_of_names_is_enough_and_leaves_the_rest_to_discovery():
    made = read("nodes: [gpu-a, gpu-b]")
    nodes = tuple(Machine(name, "", login=name, runtime="") for name in ("gpu-a", "gpu-b"))
    assert made == Inventory(nodes, path="cluster.yaml")
    assert not inventory.is_complete(made)
    node = Machine("gpu-a", "10.0.0.5", (0,), run_dir="/data/runs", data_dir="/data/sets", runtime="docker")
    assert inventory.is_complete(Inventory((node,)))


def test_every_key_is_read_and_a_node_overrides_the_defaults():
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
    assert made.machines == (
        Machine(
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
        Machine("gpu-b", "fd00::5", (0, 2), "bob@10.9.9.9:22", "/scratch/runs", "~/data", "podman", config),
        Machine("here", "", (0, 1, 2, 3), "", "/data/runs", "~/data", "docker", config),
    )
    assert (made.image, made.device) == ("trainer:0.1", "cpu")
    # as written: YAML itself would make these 2, 493 and true
    assert made.env == {"OMP_NUM_THREADS": "2", "MODE": "0755", "WORD": "yes"}
    assert made.mounts == (
        Mount("/home/ann/data", "/home/ann/data"),
        Mount("/scratch", "/scratch", read_only=False),
    )


def test_an_unknown_key_is_named_with_its_line_and_the_closest_known_key():
    error = refused("device: cpu\nnodes:\n  gpu-a:\n    adress: 10.0.0.5\n")
    assert error.message == "cluster.yaml:4: nodes.gpu-a.adress: unknown key"
    assert error.hint == "did you mean address?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cluster.yaml is empty"),
        ("- gpu-a", "must contain keys and values"),
        ("device: cpu", "cluster.yaml: nodes: no node"),
        ("nodes: []", "1: nodes: no node"),
        ("nodes: 3", "1: nodes: '3': must be keys and values"),
        ("nodes: [a, b, a]", "1: nodes: 'a' occurs twice"),
        ("nodes:\n  a:\n  b:\n  a:", "4: the key 'a' occurs twice"),
        ("nodes: [a]\ndevice: auto", "2: device: 'auto'"),
        ("nodes:\n  a: {gpus: two}", "2: nodes.a.gpus: 'two'"),
        ("nodes:\n  a: {gpus: [0, 0]}", "2: nodes.a.gpus: .* is not a number or list"),
        ("nodes:\n  a: {gpus: -1}", "2: nodes.a.gpus: '-1'"),
        ("nodes:\n  a: {gpus: [0, MIG-a/b]}", "2: nodes.a.gpus: .* is not a number or list"),
        ("nodes:\n  a: {gpus: 0}", "2: nodes.a.gpus: no GPU, but device is cuda"),
        ("nodes:\n  a: {run_dir: runs}", "2: nodes.a.run_dir: 'runs': expected an absolute path"),
        ('nodes:\n  a: {run_dir: "/a\\0b"}', "2: a NUL"),
        ("nodes:\n  a: {address: gpu-a}", "2: nodes.a.address: 'gpu-a' is not an IP address"),
        ("nodes:\n  a: {address: 0.0.0.0}", "2: nodes.a.address: no other machine can connect to 0.0.0.0"),
        (
            "nodes:\n  a: {address: '::1'}\n  b:",
            "2: nodes.a.address: no other node can reach the loopback address ::1",
        ),
        (
            "nodes:\n  a: {address: fd::5}\n  b: {address: fd::5}",
            "3: nodes.b.address: fd::5 is also a's address",
        ),
        ("nodes:\n  a: {login: a b}", "2: nodes.a.login: 'a b': not a login"),
        ("nodes:\n  a: {login: -oProxyCommand=id}", "2: nodes.a.login"),
        ('nodes:\n  "a\'; echo foo":', "2: .*expected a node's name"),
        ("nodes: [a]\nenv: {A-B: 1}", "2: env.A-B: .*expected the name of a variable"),
        ("nodes: [a]\nenv: {A: [1]}", "2: env.A: "),
        ("nodes: [a]\ndefaults: {user: a b, port: 0}", "2: defaults.user: .*\n.*2: defaults.port: "),
        ("nodes: [a]\nmounts: ['/a:b']", "2: mounts.0: '/a:b': the target must be an absolute path"),
        ("slurm: {time: 10}\nnodes: [a]", "1: slurm: only backend slurm supports this key"),
        ("nodes: [a, b]\nbackend: slurm", "1: nodes: expected one node, the login node"),
        ("nodes:\n  a: {runtime: apptainer}", "1: nodes: runtime apptainer needs backend slurm"),
        ("backend: slurm\nslurm: {array: 0-3}\nnodes: [a]", "2: slurm: array=...: clusterctl sets it"),
        ("nodes:\n  a:\n    labels: fast", "3: nodes.a.labels: 'fast': must be a list"),
        ("nodes: [a", "1: expected"),
        ("nodes: &x [*x]", "1: aliases"),
        ("nodes: [!!python/name:os.system a]", "1: the tag .*python/name:os.system is not supported"),
        ("{a: " * 3000 + "}" * 3000, "cluster.yaml: nested too deeply"),
        ("nodes: [a]\nimage: \0", "special characters"),
    ],
)
def test_an_invalid_value_is_an_error_with_its_line(text, message):
    with pytest.raises(UsageError, match=message):
        read(text)


def test_a_written_file_reads_back_as_the_same_inventory():
    nodes = [
        Machine("gpu-a", "10.0.0.5", (0, 1), "gpu-a", "/data/runs", "/data/data", "docker", "/k/config"),
        Machine("on", "10.0.0.6", (0, 3), "ann@h:22", "/d/a b'; echo foo", '/d/"\\', "none", "/k/config"),
    ]
    for number, text in enumerate(HOSTILE):
        nodes.append(
            Machine(str(number), f"10.0.1.{number}", (), "", f"/d/{text}x", "/d", "podman", "/k/config")
        )
    made = Inventory(tuple(nodes), device="cpu", path="cluster.yaml")
    text = schema.write(made, {"on": ["found: x\nnodes: [evil]"]}, ["head\nimage: evil"])
    assert read(text) == made


def test_hosts_are_logins_and_name_the_nodes():
    made = inventory.from_hosts(
        "gpu-a, ann@gpu-b:2222,10.0.0.7,fd00::7,[fd00::8],me@[fd00::9]:2222,fe80::1%eth0"
    )
    assert [(node.name, node.login) for node in made.machines] == [
        ("gpu-a", "gpu-a"),
        ("gpu-b", "ann@gpu-b:2222"),
        ("10.0.0.7", "10.0.0.7"),
        ("fd00--7", "fd00::7"),
        ("fd00--8", "[fd00::8]"),
        ("fd00--9", "me@[fd00::9]:2222"),
        ("fe80--1-eth0", "fe80::1%eth0"),
    ]


@pytest.mark.parametrize(
    ("login", "expected"),
    [
        ("a", "ann@a:22"),
        ("a:23", "ann@a:23"),
        ("fd00::5", "ann@[fd00::5]:22"),
        ("bob@[fd00::5]", "bob@[fd00::5]:22"),
        ("[fd00::5]:23", "ann@[fd00::5]:23"),
    ],
)
def test_the_port_of_the_defaults_follows_a_login_without_one(login, expected):
    made = read(f"defaults: {{user: ann, port: 22}}\nnodes:\n  a: {{login: '{login}'}}\n  b: {{login: b}}\n")
    assert made.machines[0].login == expected


@pytest.mark.parametrize(
    "text",
    [
        "a,,b",
        "a,a",
        "a,bob@a",
        "a b",
        "-a",
        "a;b",
        "a,",
        "@a",
        "a:x",
        "[a]:22",
        "[fd00::1",
        "[fd00::1]:x",
        "fd00::1]:22",
    ],
)
def test_invalid_hosts_are_errors(text):
    with pytest.raises(UsageError, match="--hosts"):
        inventory.from_hosts(text)


def test_hostfiles_of_mpi_deepspeed_and_horovod_are_read():
    text = "# cluster\nworker-1 slots=4\n\nworker-2 slots=2 max_slots=8  # two\r\nworker-3:8\nann@worker-4\n[fd00::1]:4\n"
    made = inventory.from_hostfile(text, "hostfile")
    assert [(node.name, node.login, len(node.gpus)) for node in made.machines] == [
        ("worker-1", "worker-1", 4),
        ("worker-2", "worker-2", 2),
        ("worker-3", "worker-3", 8),
        ("worker-4", "ann@worker-4", 0),
        ("fd00--1", "[fd00::1]", 4),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hostfile: no machine"),
        ("# only a comment\n", "hostfile: no machine"),
        ("a slots=2\na slots=2", "hostfile:2: a occurs twice"),
        ("a\nb slots=0", "hostfile:2: 'b slots=0': not HOST slots=N"),
        ("a slots=x", "hostfile:1: 'a slots=x': not HOST slots=N"),
        ("a slots=1 slots=2", "hostfile:1: 'a slots=1 slots=2': not HOST slots=N"),
        ("a;reboot slots=2", "hostfile:1: 'a;reboot' is not a login"),
    ],
)
def test_an_invalid_hostfile_is_an_error_with_its_line(text, message):
    with pytest.raises(UsageError, match=message):
        inventory.from_hostfile(text, "hostfile")


def test_load_reads_the_file_in_the_folder_and_none_means_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert discovery.load(BACKENDS) is None
    (tmp_path / "cluster.yaml").write_text("nodes: [a, b]")
    assert [node.name for node in discovery.load(BACKENDS).machines] == ["a", "b"]
    assert [node.name for node in discovery.load(BACKENDS, hosts="c").machines] == ["c"]
    assert [node.name for node in discovery.load(BACKENDS, only="b").machines] == ["b"]
    with pytest.raises(UsageError, match="no node 'c'"):
        discovery.load(BACKENDS, only="a,c")


def test_a_missing_file_that_an_option_names_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in ("path", "hostfile", "ssh_config"):
        arguments = {option: "nowhere", **({"hosts": "a"} if option == "ssh_config" else {})}
        with pytest.raises(UsageError, match=r"nowhere: No such file"):
            discovery.load(BACKENDS, **arguments)
    (tmp_path / "cluster.yaml").write_text("ssh_config: nowhere\nnodes: [a]")
    with pytest.raises(UsageError, match=r"cluster\.yaml: ssh_config .*nowhere: No such file"):
        discovery.load(BACKENDS)
    with pytest.raises(UsageError, match="--hosts and --hostfile cannot be used together"):
        discovery.load(BACKENDS, hosts="a", hostfile="b")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(UsageError, match=r"--only: no cluster\.yaml"):
        discovery.load(BACKENDS, only="a")


def test_nodes_are_chosen_by_name_or_label():
    made = Inventory(
        (Machine("a", "", labels=("fast",)), Machine("b", ""), Machine("c", "", labels=("fast", "new")))
    )
    assert [node.name for node in inventory.select(made, "fast").machines] == ["a", "c"]
    assert [node.name for node in inventory.select(made, "b,new").machines] == ["b", "c"]
    with pytest.raises(UsageError, match="no node 'slow'") as refused:
        inventory.select(made, "slow")
    assert "a, b, c, fast, new" in refused.value.hint


def test_json_schema_has_the_keys_of_the_file():
    found = schema.json_schema(schema.file_type(BACKENDS))
    assert {"backend", "image", "nodes", "defaults", "slurm"} <= found["properties"].keys()
    assert {"login", "gpus", "run_dir", "runtime"} <= found["$defs"]["MachineKeys"]["properties"].keys()
    assert found["$defs"]["MachineKeys"]["properties"]["gpus"]["anyOf"][0] == {
        "minimum": 0,
        "type": "integer",
    }


@pytest.mark.parametrize("line", ["defaults: {run_dir: /r}", "ssh_config: x", "pass_env: [A]", "nodes: [a]"])
def test_a_key_without_an_effect_on_kubernetes_is_refused(line):
    with pytest.raises(UsageError, match=f"cluster.yaml:2: {line.partition(':')[0]}: "):
        read(f"backend: kubernetes\n{line}\n")
    assert read("backend: kubernetes\n").is_assigned
