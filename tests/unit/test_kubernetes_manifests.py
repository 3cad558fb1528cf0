"""The manifests of jobs on Kubernetes."""

import base64
import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml

from cluster.agent import scripts
from cluster.backends.kubernetes import manifests, template
from cluster.errors import UsageError
from cluster.spec.model import Job, Machine, Queue
from cluster.spec.mount import Mount
from tests.conftest import ROOT, wait_until

PYTHON = ROOT / ".make" / "kubernetes" / "bin" / "python"  # packaging/test.sh makes it
VERSIONS = ("1.25", "1.29", "1.31", "1.34", "1.37")
#: Every key of the section, so that each field of a manifest is checked against the schemas.
ALL_KEYS = {
    "context": "a cluster",
    "namespace": "team-a",
    "runs": {"claim": "shared", "sub_path": "runs"},
    "volumes": [
        {"path": "/data", "claim": "shared", "sub_path": "data", "read_only": True},
        {"path": "/scratch", "empty_dir": "5Gi"},
        {"path": "/models", "host_path": "/mnt/models", "read_only": True},
    ],
    "gpu_resource": "nvidia.com/mig-1g.10gb",
    "requests": {"cpu": "1500m", "memory": "2Gi"},
    "limits": {"memory": "4Gi"},
    "shared_memory": "1Gi",
    "devices": {"rdma/hca": 1},
    "host_network": True,
    "node_selector": {"pool": "1"},
    "tolerations": [{"key": "pool", "value": "a", "effect": "NoExecute", "seconds": 0}, {}],
    "priority_class": "high",
    "runtime_class": "nvidia",
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "image_pull_policy": "Always",
    "security_context": {
        "run_as_user": 0,
        "run_as_group": 0,
        "fs_group": 1000,
        "supplemental_groups": [5],
        "run_as_non_root": False,
        "privileged": False,
        "allow_privilege_escalation": False,
        "add_capabilities": ["SYS_PTRACE"],
        "drop_capabilities": ["ALL"],
        "seccomp_profile": "RuntimeDefault",
    },
    "labels": {"team": "1"},
    "annotations": {"example.com/note": "yes"},
    "kueue_queue": "gpus",
    "pod": {
        "metadata": {"labels": {"mesh": "no"}},
        "spec": {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]
                    }
                }
            },
            "schedulerName": "fair",
            "initContainers": [{"name": "mesh", "image": "mesh:1", "restartPolicy": "Always"}],
            "containers": [
                {"name": "metrics", "image": "metrics:1"},
                {
                    "name": "node",
                    "env": [{"name": "HUB", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
                    "envFrom": [{"configMapRef": {"name": "common"}}],
                    "volumeMounts": [{"name": "certificates", "mountPath": "/certificates"}],
                },
            ],
            "volumes": [{"name": "certificates", "configMap": {"name": "certificates"}}],
            "tolerations": [{"key": "spot", "operator": "Exists"}],
        },
    },
    "half_started_s": 5,
}


def job(options=None, **more):
    queue = Queue(Machine("kubernetes", "", run_dir="/runs"), options or {})
    fields = {"name": "digits", "command": ("-m", "trainer", "train"), "nodes": 2, "procs_per_node": 2}
    return Job(**{**fields, "run_root": "/home/ann/runs", "image": "trainer:0.1", "queue": queue, **more})


def everything(pod=None, **more):
    """A job that has something of everything that a manifest may contain."""
    mounts = (
        Mount("/home/ann/a b", "/home/ann/a b", synced=True),
        Mount("/mnt/x", "/mnt/x", read_only=False),
    )
    fields = {
        "device": "cuda",
        "secrets": ("TOKEN", "KEY"),
        "mounts": mounts,
        "env": {"LR": "1e-3"},
        "setup": "a\nb",
    }
    code = {"workdir": "/home/ann/it's", "copies_workdir": True, "says_ready": False, "grace_s": 0.5}
    keys = ALL_KEYS if pod is None else {**ALL_KEYS, "pod": pod}
    return job(keys, **{"nodes": 3, **fields, **code, **more})


def text_of(made, **more):
    (step,) = manifests.plan(made, **{"attempt": 1, "port": 29500, "merge": template.merged, **more}).steps
    (text,) = step.files.values()
    return text


def objects(made, **more):
    return [document for document in yaml.safe_load_all(text_of(made, **more)) if document]


def pods(made, **more):
    return [document for document in objects(made, **more) if document["kind"] == "Pod"]


def node(made, rank=0):
    return pods(made)[rank]["spec"]["containers"][0]


def variables(made, rank=0):
    return {each["name"]: each.get("value") for each in node(made, rank)["env"]}


def mounted(pod, path, container=None):
    """Return the volume at a path in a pod, and the keys of its mount."""
    (mount,) = [
        each
        for each in (container or pod["spec"]["containers"][0])["volumeMounts"]
        if each["mountPath"] == path
    ]
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == mount["name"]]
    return {key: volume[key] for key in volume if key != "name"}, mount


def test_what_the_pods_need_is_created_before_them():
    found = [(each["kind"], each["metadata"]["name"]) for each in objects(job(), attempt=12)]
    names = [
        ("ConfigMap", "digits-a12-agent"),
        ("Service", "digits-a12"),
        ("Pod", "digits-a12-0"),
        ("Pod", "digits-a12-1"),
    ]
    assert found == names


def test_the_plan_has_the_manifest_and_its_command():
    plan = manifests.plan(
        job({"context": "a b", "namespace": "team-a"}), attempt=2, port=29501, merge=template.merged
    )
    (step,) = plan.steps
    (file,) = step.files
    assert step.argv == ("kubectl", "--context=a b", "--namespace=team-a", "create", "-f", file)
    assert file == "/home/ann/runs/digits/attempt-2/pods.yaml"
    assert [each.name for each in plan.nodes] == ["node-0", "node-1"]
    assert (plan.master_addr, plan.master_port) == ("digits-a2-0.digits-a2", 29501)
    assert manifests.plan(job(), attempt=1, port=1, merge=template.merged).steps[0].argv[:2] == (
        "kubectl",
        "create",
    )


def test_the_pod_of_a_node_is_known_without_the_other_nodes():
    plan = manifests.plan(job(), attempt=2, port=1, merge=template.merged)
    names = [manifests.pod_of(plan, node) for node in plan.nodes]
    assert names == [each["metadata"]["name"] for each in objects(job(), attempt=2) if each["kind"] == "Pod"]
    rest = replace(plan, nodes=plan.nodes[1:])
    assert [manifests.pod_of(rest, node) for node in rest.nodes] == names[1:]


def test_all_objects_are_found_by_their_labels_and_an_attempts_by_its_own():
    launch = {"clusterctl/launch": "0" * 16}
    ours = {"app.kubernetes.io/managed-by": "clusterctl", "clusterctl/job": "digits", **launch}
    section = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    agent, *rest = made = objects(job(section), attempt=3)
    secret = manifests.secret(job(section), manifests.options_of(job(section)), {})
    assert secret["metadata"]["labels"] == {**ours, "team": "a"}
    service, *of_ranks = [each["metadata"]["labels"] for each in rest]
    assert service == agent["metadata"]["labels"] == {**ours, "team": "a", "clusterctl/attempt": "3"}
    assert of_ranks == [{**service, "clusterctl/rank": rank} for rank in ("0", "1")]
    assert {each["metadata"]["annotations"]["note"] for each in made} == {"b"}


def test_the_service_gives_every_pod_a_name_before_it_is_ready():
    _, service, *of_ranks = objects(job())
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    for rank, pod in enumerate(of_ranks):
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"digits-a1-{rank}", "digits-a1")
    assert variables(job())["PET_MASTER_ADDR"] == "digits-a1-0.digits-a1"


def test_pods_of_another_attempt_have_another_name():
    assert not {each["metadata"]["name"] for each in pods(job(), attempt=1)} & {
        each["metadata"]["name"] for each in pods(job(), attempt=2)
    }


@pytest.mark.parametrize("name", ["3d-net", "a" * 48, "0" * 48])
def test_names_are_valid_as_names_of_hosts_and_services(name):
    made = objects(job(name=name), attempt=9999)
    for document in made:
        pattern = (
            r"[a-z][a-z0-9-]*[a-z0-9]" if document["kind"] == "Service" else r"[a-z0-9][a-z0-9-]*[a-z0-9]"
        )
        assert re.fullmatch(pattern, document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= 60  # room for 1000 nodes
    service = made[1]["metadata"]["name"]
    assert made[2]["spec"]["subdomain"] == service
    assert variables(job(name=name))["PET_MASTER_ADDR"].endswith(f".{service.replace('9999', '1')}")


def test_a_name_that_kubernetes_refuses_is_an_error():
    with pytest.raises(UsageError, match="end with a letter or digit"):
        manifests.plan(job(name="digits-"), attempt=1, port=29500, merge=template.merged)


def test_the_agent_is_the_archive_in_the_config_map():
    agent = objects(job())[0]
    assert base64.b64decode(agent["binaryData"]["agent.pyz"]) == scripts.archive()
    volume, _ = mounted(pods(job())[0], "/clusterctl")
    assert volume == {"configMap": {"name": agent["metadata"]["name"]}}
    assert node(job())["args"] == ["python3", "/clusterctl/agent.pyz", "-m", "trainer", "train"]


@pytest.mark.parametrize("runs", [{}, {"claim": "shared"}, {"host_path": "/mnt/runs"}])
def test_the_variables_are_the_contracts_and_the_jobs(runs):
    made = job(
        {"runs": runs},
        env={"LR": "1e-3", "CLUSTER_RUN_DIR": "/x", "PET_NNODES": "9"},
        rendezvous_timeout_s=77,
    )
    for rank in (0, 1):
        found = variables(made, rank)
        assert (
            found.items()
            >= {
                "LR": "1e-3",
                "CLUSTER_RUN_DIR": "/runs/digits",
                "CLUSTER_CACHE_DIR": "/runs/.cache",
                "CLUSTER_NODE": f"node-{rank}",
                "CLUSTER_ATTEMPT": "1",
                "CLUSTER_NODES_ON_HOST": "1",
                "CLUSTER_RENDEZVOUS_TIMEOUT": "77",
                "PET_NODE_RANK": str(rank),
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "2",
                "PET_MASTER_PORT": "29500",
            }.items()
        )
        # longer if the files are lost with the pod
        assert found["CLUSTER_HOLD"] == ("120" if runs else "600")


def test_kubernetes_replaces_no_variables_in_arguments_and_values():
    """It would replace $(HOME), and $$ by $."""
    made = job(command=("--no-python", "sh", "-c", "echo $(id) $$ $HOME"), env={"A": "$(LR)$$", "LR": "1"})
    assert node(made)["args"][-1] == "echo $$(id) $$$$ $$HOME"
    assert variables(made)["A"] == "$$(LR)$$$$"


def test_values_of_secrets_are_only_in_the_secret():
    made = job(secrets=("TOKEN", "KEY"))
    secret = manifests.secret(
        made, manifests.options_of(made), {"TOKEN": "hunter2", "KEY": "ä", "OTHER": "x"}
    )
    assert {name: base64.b64decode(text).decode() for name, text in secret["data"].items()} == {
        "TOKEN": "hunter2",
        "KEY": "ä",
    }
    assert secret["kind"] not in [each["kind"] for each in objects(made)]
    for pod in pods(made):
        refer = {
            each["name"]: each["valueFrom"]
            for each in pod["spec"]["containers"][0]["env"]
            if "valueFrom" in each
        }
        assert refer == {
            name: {"secretKeyRef": {"name": secret["metadata"]["name"], "key": name}}
            for name in ("TOKEN", "KEY")
        }
    assert variables(made)["CLUSTER_SECRETS"] == "TOKEN,KEY"
    assert variables(made)["TOKEN"] is None


@pytest.mark.parametrize(
    ("device", "resource", "taints"),
    [
        ("cuda", "nvidia.com/gpu", ["nvidia.com/gpu"]),
        ("cuda", "nvidia.com/mig-1g.10gb", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"]),
        ("cuda", "amd.com/gpu", ["amd.com/gpu"]),
        ("cpu", "nvidia.com/gpu", []),
        ("any", "nvidia.com/gpu", []),
    ],
)
def test_gpus_are_limits_and_their_taints_are_tolerated(device, resource, taints):
    made = job({"gpu_resource": resource, "limits": {"cpu": "4"}}, device=device)
    limits = node(made)["resources"]["limits"]
    assert limits == {"cpu": "4", **({resource: "2"} if device == "cuda" else {})}
    tolerations = pods(made)[0]["spec"].get("tolerations", [])
    assert tolerations == [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
    visible = {"cuda": "0,1", "cpu": "", "any": None}[device]
    assert variables(made).get("CUDA_VISIBLE_DEVICES") == visible


def test_tolerations_compare_a_value_if_there_is_one():
    section = {
        "tolerations": [{"key": "a", "value": "b", "effect": "NoExecute", "seconds": 0}, {"key": "c"}, {}]
    }
    assert pods(job(section))[0]["spec"]["tolerations"] == [
        {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 0},
        {"key": "c", "operator": "Exists"},
        {"operator": "Exists"},
    ]


@pytest.mark.parametrize(
    ("runs", "volume", "sub_path"),
    [
        ({}, {"emptyDir": {}}, None),
        ({"claim": "a"}, {"persistentVolumeClaim": {"claimName": "a"}}, None),
        ({"host_path": "/a", "sub_path": "b"}, {"hostPath": {"path": "/a", "type": "Directory"}}, "b"),
    ],
)
def test_the_volume_of_the_runs(runs, volume, sub_path):
    found, mount = mounted(pods(job({"runs": runs}))[0], "/runs")
    assert (found, mount.get("subPath")) == (volume, sub_path)


def test_more_volumes_and_a_claim_that_is_mounted_twice_is_one_volume():
    pod = pods(everything())[0]
    claim = {"persistentVolumeClaim": {"claimName": "shared"}}
    assert mounted(pod, "/data") == (
        claim,
        {"name": "runs", "mountPath": "/data", "subPath": "data", "readOnly": True},
    )
    assert mounted(pod, "/runs")[1]["subPath"] == "runs"
    assert mounted(pod, "/scratch")[0] == {"emptyDir": {"sizeLimit": "5Gi"}}
    volume, mount = mounted(pod, "/models")
    assert (volume, mount["readOnly"]) == ({"hostPath": {"path": "/mnt/models", "type": "Directory"}}, True)
    volume, mount = mounted(pod, "/mnt/x")
    assert (volume, "readOnly" in mount) == ({"hostPath": {"path": "/mnt/x", "type": "Directory"}}, False)
    assert mounted(pod, "/dev/shm")[0] == {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    names = [each["name"] for each in pod["spec"]["volumes"]]
    assert len(set(names)) == len(names)


def test_two_empty_folders_are_two_volumes():
    section = {"volumes": [{"path": f"/{name}", "empty_dir": "1Gi"} for name in "ab"]}
    pod = pods(job(section))[0]
    names = [mounted(pod, path)[1]["name"] for path in ("/a", "/b", "/runs")]
    assert len(set(names)) == 3


def test_a_path_that_two_volumes_want_is_an_error():
    made = job({"volumes": [{"path": "/data", "claim": "a"}]}, mounts=(Mount("/x", "/data"),))
    with pytest.raises(UsageError, match="/data would be mounted twice"):
        manifests.plan(made, attempt=1, port=29500, merge=template.merged)


DATA = Mount("/home/ann/data", "/data", synced=True)


@pytest.mark.parametrize(
    ("more", "paths"),
    [
        ({}, {}),
        ({"workdir": "/app"}, {}),
        ({"mounts": (Mount("/mnt/x", "/x"),)}, {}),
        ({"mounts": (DATA,)}, {"/data": "home/ann/data"}),
        ({"workdir": "/home/ann/p", "copies_workdir": True}, {"/home/ann/p": "home/ann/p"}),
        (
            {"workdir": "/home/ann/p", "copies_workdir": True, "mounts": (DATA,)},
            {"/home/ann/p": "home/ann/p", "/data": "home/ann/data"},
        ),
    ],
)
def test_pods_wait_for_files_exactly_if_there_are_files_to_send(more, paths):
    made = job(**more)
    for pod in pods(made):
        (container,) = pod["spec"]["containers"]
        found = {
            each["mountPath"]: each["subPath"]
            for each in container["volumeMounts"]
            if each["name"] == "inputs"
        }
        assert found == paths
        assert container.get("workingDir") == more.get("workdir")
        assert [each["name"] for each in pod["spec"].get("initContainers", [])] == (
            ["files"] if paths else []
        )
        assert ("inputs" in [each["name"] for each in pod["spec"]["volumes"]]) == bool(paths)
        for waiting in pod["spec"].get("initContainers", []):
            assert mounted(pod, "/inputs", waiting)[0] == {"emptyDir": {}}
            assert waiting["image"] == made.image
        for path in paths:
            assert mounted(pod, path)[1].get("readOnly", False) == (path == "/data")


@pytest.mark.parametrize("mounts", [(DATA,), ()], ids=["data", "no data"])
def test_a_volume_for_runs_keeps_the_working_directory(mounts):
    """In a folder with the job's name, below the folder that the section names; its path may have spaces."""
    runs = {"claim": "runs", "sub_path": "of ann"}
    made = job({"runs": runs}, workdir="/home/ann/my p", copies_workdir=True, mounts=mounts)
    for pod in pods(made):
        claim, mount = mounted(pod, "/home/ann/my p")
        assert claim == {"persistentVolumeClaim": {"claimName": "runs"}}
        assert mount["subPath"] == "of ann/digits/workdir"
        assert [mounted(pod, each.target)[1]["subPath"] for each in mounts] == ["home/ann/data"] * len(mounts)
        (waiting,) = pod["spec"]["initContainers"]
        assert mounted(pod, "/runs", waiting)[1]["subPath"] == "of ann"
        assert "mkdir -p /runs/digits/workdir " in waiting["command"][-1]
        assert mounted(pod, "/inputs", waiting)[0] == {"emptyDir": {}}
    text = manifests.plan(made, attempt=1, port=29500, merge=template.merged).steps[0].files.popitem()[1]
    assert "tar -C '/home/ann/my p' -c . | " in text
    assert "exec -i digits-a1-0 -c files -- tar -x -C /runs/digits/workdir\n" in text


def test_pods_wait_until_the_first_has_filled_the_folder_that_they_share(tmp_path):
    made = job({"runs": {"claim": "runs"}}, workdir="/home/ann/p", copies_workdir=True)
    (container,) = pods(made)[1]["spec"]["initContainers"]
    words = [
        word.replace("/inputs/", f"{tmp_path}/").replace("/runs/", f"{tmp_path}/")
        for word in container["command"]
    ]
    with subprocess.Popen(words) as process:
        try:
            assert wait_until((tmp_path / "digits/workdir").is_dir)
            (tmp_path / "digits/workdir/.clusterctl-sent").write_text("an earlier job")
            (tmp_path / ".complete").write_text("this launch")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            (tmp_path / "digits/workdir/.clusterctl-sent").write_text("this launch")
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("ends", ["files", "SIGTERM"])
def test_the_init_container_waits_for_the_files_and_obeys_sigterm(tmp_path, ends):
    (container,) = pods(job(mounts=(DATA,)))[0]["spec"]["initContainers"]
    words = [word.replace("/inputs/", f"{tmp_path}/") for word in container["command"]]
    words[-1] = words[-1].replace("; until", "; echo waits; until")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        assert process.poll() is None
        if ends == "files":
            (tmp_path / ".complete").touch()
        else:
            process.terminate()
        assert process.wait(60) == (0 if ends == "files" else 143)


def test_the_comment_has_the_commands_for_what_the_launcher_sends(tmp_path):
    """They are run here, with a kubectl that does in a folder what the real one does in a pod."""
    source = tmp_path / "it's\nhere"
    source.mkdir()
    (source / "a.py").write_text("a")
    made = job(
        {"namespace": "team-a"}, mounts=(Mount(str(tmp_path / "d a"), "/d", synced=True),), secrets=("TOKEN",)
    )
    (tmp_path / "d a").mkdir()
    (tmp_path / "d a" / "b").write_text("b")
    head = [line[2:] for line in text_of(made).splitlines() if line.startswith("# ")]
    kubectl = tmp_path / "kubectl"
    inputs = tmp_path / "inputs"
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$2" = exec ] || exit 0\n'
        'while [ "$1" != -- ]; do case $1 in digits-*) pod=$1 ;; esac; shift; done; shift\n'
        f'mkdir -p "{inputs}/$pod"; eval "set -- $(echo "$@" | sed "s#/inputs#{inputs}/$pod#")"; exec "$@"\n'
    )
    kubectl.chmod(0o755)
    commands = "\n".join(line for line in head if line.startswith("  ")).replace("FILE", "/dev/null")
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-euc", commands], check=True, env={**os.environ, "PATH": path})
    for pod in ("digits-a1-0", "digits-a1-1"):
        assert (inputs / pod / str(tmp_path)[1:] / "d a" / "b").read_text() == "b"
        assert (inputs / pod / ".complete").exists()
    first = (tmp_path / "calls").read_text().splitlines()[0]
    assert shlex.split(first)[:5] == ["--namespace=team-a", "create", "secret", "generic", "digits-secrets"]


def test_a_strange_path_cannot_end_the_comment():
    made = job(mounts=(Mount("/a\nkind: Pod\r\x85\u2028b", "/d", synced=True),))
    assert [each["kind"] for each in objects(made)] == ["ConfigMap", "Service", "Pod", "Pod"]
    assert mounted(pods(made)[0], "/d")[1]["subPath"] == "a\nkind: Pod\r\x85\u2028b"


def test_the_hosts_network_keeps_the_names_of_the_cluster_and_one_master_per_port():
    first, second = pods(job({"host_network": True}))
    assert (first["spec"]["hostNetwork"], first["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert first["spec"]["containers"][0]["ports"] == [{"containerPort": 29500}]
    assert "ports" not in second["spec"]["containers"][0]
    assert "hostNetwork" not in pods(job())[0]["spec"]
    assert not [name for name in variables(job({"host_network": True})) if "IFNAME" in name]


def test_rdma_devices_come_with_the_right_to_lock_memory():
    container = node(job({"devices": {"rdma/hca": 2}}, device="cuda"))
    assert container["resources"]["limits"] == {"rdma/hca": "2", "nvidia.com/gpu": "2"}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "securityContext" not in node(job())


def test_pods_get_no_token_and_stay_as_they_ended():
    for pod in pods(job(grace_s=0.5)):
        spec = pod["spec"]
        assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
        assert spec["enableServiceLinks"] is False
        assert spec["terminationGracePeriodSeconds"] == 11  # the grace, and the margin of the agent


def test_a_pod_may_satisfy_the_strictest_pod_security():
    """Each container needs these, the one that waits for files, too."""
    security = {"run_as_non_root": True, "run_as_user": 1000, "seccomp_profile": "RuntimeDefault"}
    security |= {"allow_privilege_escalation": False, "drop_capabilities": ["ALL"]}
    pod = pods(job({"security_context": security}, mounts=(DATA,)))[0]
    assert pod["spec"]["securityContext"] == {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_kueue_admits_the_pods_of_an_attempt_together():
    for pod in pods(job({"kueue_queue": "gpus", "annotations": {"note": "a"}}, nodes=3), attempt=2):
        found = {key: value for key, value in pod["metadata"]["labels"].items() if "kueue" in key}
        assert found == {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/pod-group-name": "digits-a2"}
        assert pod["metadata"]["annotations"] == {
            "note": "a",
            "kueue.x-k8s.io/pod-group-total-count": "3",
            "kueue.x-k8s.io/retriable-in-group": "false",
        }
    assert "kueue" not in text_of(job())


def test_the_remaining_keys_of_the_section_are_fields_of_the_pods():
    spec = pods(everything(pod={}))[0]["spec"]
    assert spec["nodeSelector"] == {"pool": "1"}
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "nvidia")
    assert (spec["serviceAccountName"], spec["imagePullSecrets"]) == ("trainer", [{"name": "registry"}])
    assert (
        spec["securityContext"].items()
        >= {"runAsUser": 0, "fsGroup": 1000, "supplementalGroups": [5]}.items()
    )
    waiting = spec["initContainers"][0]
    container = spec["containers"][0]
    assert container["resources"]["requests"] == {"cpu": "1500m", "memory": "2Gi"}
    assert waiting["resources"] == {
        "requests": {"cpu": "1500m", "memory": "2Gi"},
        "limits": {"memory": "4Gi"},
    }
    assert container["securityContext"]["capabilities"] == {
        "add": ["IPC_LOCK", "SYS_PTRACE"],
        "drop": ["ALL"],
    }


@pytest.mark.parametrize("made", [job(), everything()], ids=["plain", "everything"])
def test_the_text_is_the_documents_in_blocks(made):
    options = manifests.options_of(made)
    text = text_of(made)
    assert objects(made) == manifests.documents(made, options, attempt=1, port=29500, merge=template.merged)
    assert text == text_of(made)
    events = list(yaml.parse(text))
    assert not [each for each in events if isinstance(each, yaml.AliasEvent)]
    for event, following in pairwise(events):
        if (
            isinstance(event, yaml.CollectionStartEvent) and event.flow_style
        ):  # only what is empty has no block
            assert isinstance(following, yaml.CollectionEndEvent)


#: Texts that YAML 1.1, YAML 1.2 or the library that kubectl uses would read as numbers, truth values or nothing.
TEXTS = (
    "1e-3",
    "1e5",
    ".5",
    "010",
    "0x1F",
    "0b1",
    "0o7",
    "1_000",
    "1:30",
    "2026-01-01",
    "y",
    "N",
    "yes",
    "off",
    "~",
    "",
)
TEXTS += (
    "null",
    ".nan",
    ".inf",
    "+1",
    "<<",
    "=",
    "a: b",
    "- a",
    "# a",
    "a #b",
    "a\nb\n",
    "a\n b",
    " a",
    "a ",
    "\ta",
    "'",
)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_stays_a_text_for_kubectl(text):
    made = job(env={"VALUE": text}, command=("a.py", text))
    assert variables(made)["VALUE"] == text
    assert node(made)["args"][-1] == text
    values = [
        each
        for each in yaml.parse(text_of(made))
        if isinstance(each, yaml.ScalarEvent) and each.value == text
    ]
    assert values
    assert not [each for each in values if each.style is None]


PROGRAM = """
import json, sys, kubernetes_validate
documents = json.load(sys.stdin)
for version in sys.argv[1:]:
    for document in documents:
        name = version + " " + document["kind"] + " " + document["metadata"]["name"]
        try:
            # without the schemas of this version, it takes those of an older one
            assert kubernetes_validate.validate(document, version, strict=True) == version
            print(name, "fits")
        except kubernetes_validate.ValidationError as error:
            print(name, list(error.path), error.message[:200])
"""


def validate(documents):
    """Return what the schemas of each version say of each document."""
    if not PYTHON.exists():
        assert os.environ.get("CI") != "true", f"no {PYTHON}"
        pytest.skip(f"no {PYTHON} (CI=true make test installs it)")
    words = [PYTHON, "-c", PROGRAM, *VERSIONS]
    done = subprocess.run(words, input=json.dumps(documents), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("made", [job(nodes=3), everything()], ids=["plain", "everything"])
def test_the_documents_fit_the_schemas_of_five_versions(made):
    documents = objects(made)
    documents.append(manifests.secret(made, manifests.options_of(made), dict.fromkeys(made.secrets, "x")))
    found = validate(documents)
    assert len(found) == len(VERSIONS) * 6
    # native sidecars came with 1.28
    native = r"1\.25 Pod .*\['spec', 'initContainers', 0\] .*\('restartPolicy' was unexpected\)"
    assert [line for line in found if not line.endswith(" fits") and not re.fullmatch(native, line)] == []


def test_a_field_that_no_version_has_does_not_fit():
    (pod, *_) = pods(job())
    pod["spec"]["containers"][0]["arguments"] = ["a"]
    assert [line for line in validate([pod]) if "'arguments' was unexpected" not in line] == []


def test_jobs_of_one_name_differ_only_in_what_they_ask_for():
    first = objects(job())
    second = objects(replace(job(), env={"A": "b"}))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("image", "policy"),
    [
        ("trainer:0.1", "IfNotPresent"),
        ("trainer", "Always"),
        ("trainer:latest", "Always"),
        ("registry.example.com:5000/trainer", "Always"),
        ("registry.example.com:5000/trainer:latest", "Always"),
        ("registry.example.com:5000/trainer:1", "IfNotPresent"),
        (f"registry.example.com:5000/trainer@sha256:{'0' * 64}", "IfNotPresent"),
    ],
)
def test_an_image_whose_tag_moves_is_pulled_each_time(image, policy):
    mounts = (Mount("/home/ann/a", "/home/ann/a", synced=True),)

    def policies(options=None):
        spec = pods(job(options, image=image, mounts=mounts))[0]["spec"]
        return [each["imagePullPolicy"] for each in (*spec["initContainers"], *spec["containers"])]

    assert policies() == [policy] * 2
    assert policies({"image_pull_policy": "Never"}) == ["Never"] * 2


def test_the_fields_of_a_pod_are_merged_as_kubernetes_merges_them():
    made = everything()
    for pod, plain in zip(pods(made), pods(everything(pod={})), strict=True):
        node_container, sidecar = pod["spec"]["containers"]
        assert (node_container["name"], sidecar["name"]) == ("node", "metrics")
        assert [each["name"] for each in pod["spec"]["initContainers"]] == ["mesh", "files"]
        (before,) = plain["spec"]["containers"]
        assert node_container["env"][:-1] == before["env"]
        assert node_container["env"][-1]["name"] == "HUB"
        assert node_container["envFrom"] == [{"configMapRef": {"name": "common"}}]
        assert node_container["volumeMounts"][:-1] == before["volumeMounts"]
        assert [each["name"] for each in pod["spec"]["volumes"]][-1] == "certificates"
        assert pod["spec"]["volumes"][:-1] == plain["spec"]["volumes"]
        assert {key: pod["spec"][key] for key in ("hostname", "subdomain")} == {
            key: plain["spec"][key] for key in ("hostname", "subdomain")
        }
        assert pod["metadata"]["labels"] == {**plain["metadata"]["labels"], "mesh": "no"}
        assert pod["spec"]["schedulerName"] == "fair"
        assert "nodeAffinity" in pod["spec"]["affinity"]


NODE = {"name": "node"}


@pytest.mark.parametrize(
    ("spec", "where", "hint"),
    [
        ({"restartPolicy": "Always"}, "spec.restartPolicy", "--max-restarts"),
        ({"hostname": "a"}, "spec.hostname", "omit it"),
        ({"subdomain": None}, "spec.subdomain", "omit it"),
        ({"terminationGracePeriodSeconds": 1}, "spec.terminationGracePeriodSeconds", "--grace"),
        ({"hostNetwork": True}, "spec.hostNetwork", "host_network: true"),
        ({"containers": [{**NODE, "image": "other"}]}, "spec.containers.node.image", "--image"),
        ({"containers": [{**NODE, "command": ["a"]}]}, "spec.containers.node.command", "--command"),
        ({"containers": [{**NODE, "args": ["a"]}]}, "spec.containers.node.args", "--command"),
        ({"containers": [{**NODE, "$patch": "delete"}]}, "spec.containers.node", "beside it"),
        ({"containers": [{"$patch": "replace"}, {"name": "x"}]}, "spec.containers.node", "beside it"),
        (
            {"containers": [{**NODE, "env": [{"name": "PET_NNODES", "value": "9"}]}]},
            "env.PET_NNODES",
            "--env",
        ),
        (
            {"containers": [{**NODE, "volumeMounts": [{"mountPath": "/clusterctl", "name": "x"}]}]},
            "spec.containers.node.volumeMounts./clusterctl",
            "another path",
        ),
        (
            {"containers": [{**NODE, "resources": {"limits": {"nvidia.com/gpu": 8}}}]},
            "limits.nvidia.com/gpu",
            "--gpus",
        ),
        ({"volumes": [{"name": "agent", "configMap": {"name": "x"}}]}, "spec.volumes.agent", "another name"),
        ({"volumes": [{"name": "shm", "$patch": "delete"}]}, "spec.volumes.shm", "shared_memory"),
        ({"initContainers": [{"name": "files", "image": "x"}]}, "spec.initContainers.files", "another name"),
        ({"containers": [{"image": "x"}]}, "merge key", "needs its name"),
        ({"containers": "x"}, "spec.containers", "for example"),
        ({"containers": [{**NODE, "env": "x"}]}, "spec.containers.node.env", "[{name: ...}]"),
        ({"containers": [{**NODE, "resources": "x"}]}, "limits.nvidia.com/gpu", "--gpus"),
        ({"volumes": ["x"]}, "", ""),
        ({"initContainers": None}, "spec.initContainers.files", "another name"),
    ],
)
def test_fields_that_would_break_the_launcher_are_refused(spec, where, hint):
    mounts = (Mount("/home/ann/a", "/home/ann/a", synced=True),)
    with pytest.raises(UsageError) as error:
        pods(job({"pod": {"spec": spec}}, device="cuda", mounts=mounts))
    assert where in error.value.message
    assert hint in error.value.hint


def test_pods_spread_over_machines_unless_the_section_says_how():
    ((constraint,), _) = [pod["spec"]["topologySpreadConstraints"] for pod in pods(job(launch_id="ab"))]
    assert constraint["labelSelector"]["matchLabels"] == {"clusterctl/launch": "ab"}
    assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    assert "topologySpreadConstraints" not in pods(job(nodes=1))[0]["spec"]
    own = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    for given, expected in (([own], [own]), ([], None)):
        made = pods(job({"pod": {"spec": {"topologySpreadConstraints": given}}}))
        assert {str(pod["spec"].get("topologySpreadConstraints") or None) for pod in made} == {str(expected)}


def test_without_kubectl_only_a_job_with_fields_of_its_own_has_no_plan(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert pods(job())
    with pytest.raises(UsageError, match="kubectl is not installed"):
        pods(job({"pod": {"spec": {"schedulerName": "x"}}}))
