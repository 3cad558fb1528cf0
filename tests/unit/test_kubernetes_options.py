"""The section `kubernetes:` of cluster.yaml."""

from decimal import Decimal

import pytest

from cluster.backends.kubernetes import manifests
from cluster.backends.kubernetes.options import Options, amount
from cluster.errors import UsageError
from cluster.spec.schema import Keys, Source, json_schema, validate


class File(Keys):
    kubernetes: Options


def read(text):
    return validate(File, Source(f"kubernetes: {text}", "cluster.yaml"), "").kubernetes


def test_a_section_is_the_same_after_it_has_been_stored_as_json():
    """As the settings of a job, which the backend validates once more."""
    text = """{
        context: "arn:aws:eks:eu-1:1:cluster/a", namespace: team-a, runs: {claim: shared.runs, sub_path: ann/runs},
        volumes: [{path: /data, host_path: /mnt/data, read_only: yes}, {path: /tmp, empty_dir: 5Gi}],
        gpu_resource: nvidia.com/mig-1g.10gb, requests: {cpu: 1.5, memory: 64Gi}, limits: {cpu: 2}, shared_memory: 8Gi,
        devices: {rdma/hca: 1}, host_network: true, node_selector: {example.com/pool: "1"}, priority_class: high,
        tolerations: [{key: pool, value: a, effect: NoExecute, seconds: 60}, {operator: Exists}], runtime_class: nvidia,
        service_account: trainer, image_pull_secrets: [registry],
        image_pull_policy: Always, security_context: {run_as_user: 0}, labels: {team: },
        annotations: {"example.com/note": "any: text"}, kueue_queue: gpus, half_started_s: 90,
        pod: {metadata: {labels: {a: 1}}, spec: {priority: 5, "schedulerName": "7", x: [yes, 2026-01-01, "no", ~]}}}"""
    section = read(text)
    stored = section.model_dump(mode="json", exclude_unset=True)
    assert set(stored) == set(Options.model_fields)
    assert Options.model_validate(stored) == section
    assert (stored["requests"], stored["labels"]) == ({"cpu": "1.5", "memory": "64Gi"}, {"team": ""})
    assert stored["pod"] == {
        "metadata": {"labels": {"a": "1"}},
        "spec": {"priority": 5, "schedulerName": "7", "x": [True, "2026-01-01", "no", None]},
    }
    assert (
        section.security_context.run_as_user,
        section.runs.is_persistent,
        Options().runs.is_persistent,
    ) == (
        0,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("{names: a}", "names", "unknown key"),
        ("{volumes: [{path: /data, claims: a}]}", "volumes.0.claims", "unknown key"),
        ("{namespace: Team_A}", "namespace", "'Team_A': expected a name"),
        ("{namespace: -a}", "namespace", "expected a name"),
        (f"{{namespace: {'a' * 64}}}", "namespace", "expected a name"),
        ("{image_pull_secrets: [my_login]}", "image_pull_secrets.0", "expected a name"),
        ("{image_pull_secrets: my-login}", "image_pull_secrets", "must be a list"),
        ("{requests: {memory: 32GB}}", "requests.memory", "for example: 32G"),
        ("{requests: {memory: 32 gi}}", "requests.memory", "expected a number and a unit"),
        ("{limits: {cpu: -1}}", "limits.cpu", "expected a number and a unit"),
        ("{limits: {cpu: 1, nvidia.com/gpu: 1}}", "", "--gpus"),
        ("{requests: {cpu: 10}, limits: {cpu: 3500m}}", "", "cpu 10 is more than its limit 3500m"),
        ("{gpu_resource: gpu}", "gpu_resource", "such as nvidia.com/gpu"),
        ("{devices: {rdma/hca: 0}}", "devices.rdma/hca", "greater than 0"),
        ("{devices: {nvidia.com/gpu: 1}}", "", "--gpus"),
        ("{devices: {rdma/hca: 1}, limits: {rdma/hca: 1}}", "", "list it once"),
        ("{runs: {claim: a, host_path: /a}}", "runs", "it has both claim and host_path"),
        ("{runs: {sub_path: a}}", "runs", "it has none"),
        ("{runs: {claim: a, sub_path: a/../../b}}", "runs.sub_path", "without '..'"),
        ("{volumes: [{path: /data}]}", "volumes.0", "it has none"),
        ("{volumes: [{path: data, claim: a}]}", "volumes.0.path", "an absolute path"),
        ("{volumes: [{path: /runs/, claim: a}]}", "", "/runs is used by clusterctl itself"),
        ("{volumes: [{path: /a, claim: a}, {path: /a/, claim: b}]}", "", "two of them have the path /a"),
        ("{labels: {clusterctl/job: a}}", "labels.clusterctl/job", "clusterctl sets it"),
        ("{labels: {kueue.x-k8s.io/queue-name: a}}", "labels.kueue.x-k8s.io/queue-name", "set kueue_queue"),
        ("{labels: {team: a b}}", "labels.team", "at most 63 letters"),
        ("{node_selector: {a/b/c: x}}", "node_selector.a/b/c", "expected a key"),
        ("{tolerations: [{value: a}]}", "tolerations.0", "needs a key"),
        ("{tolerations: [{key: a, operator: Exists, value: b}]}", "tolerations.0", "Exists takes none"),
        ("{tolerations: [{key: a, seconds: 5}]}", "tolerations.0", "only with effect NoExecute"),
        ("{half_started_s: -1}", "half_started_s", "greater than or equal to 0"),
        ("{host_network: maybe}", "host_network", "valid boolean"),
    ],
)
def test_a_bad_value_is_an_error_with_its_key(text, key, words):
    with pytest.raises(UsageError) as error:
        read(text)
    assert error.value.message.startswith(f"cluster.yaml:1: {'.'.join(filter(None, ['kubernetes', key]))}: ")
    assert words in f"{error.value.message} {error.value.hint}"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        (".5", "0.5"),
        ("1.5Gi", "1610612736"),
        ("1e3", "1000"),
        ("1E", "1e18"),
        ("5k", "5000"),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text, number):
    assert amount(text) == Decimal(number)


def test_each_key_is_described_for_editors():
    schema = json_schema(Options)
    for model in (schema, *schema["$defs"].values()):
        for name, field in model["properties"].items():
            assert (
                field.get("description") or schema["$defs"][field["$ref"].rpartition("/")[2]]["description"]
            ), name
    assert {"type": "number"} in schema["properties"]["requests"]["additionalProperties"]["anyOf"]


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("{pod: {spek: {x: 1}}}", "kubernetes.pod.spek: unknown key", "spec"),
        ("{pod: {metadata: {name: a}}}", "kubernetes.pod.metadata.name: unknown key", "labels, annotations"),
        ("{pod: {metadata: {labels: {clusterctl/rank: 7}}}}", "clusterctl sets it", "choose another key"),
        ("{runs: {clam: a}}", "kubernetes.runs.clam: unknown key", "claim"),
    ],
)
def test_a_hint_lists_the_keys_of_that_level(text, words, hint):
    with pytest.raises(UsageError) as error:
        read(text)
    assert words in error.value.message
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("pod.spek.x", "did you mean spec?"),
        ("pod.zork", "use one of: metadata, spec"),
        ("pod.metadata.name", "use one of: labels, annotations"),
        ("runs.zork", "use one of: claim, host_path, sub_path"),
    ],
)
def test_a_setting_with_an_unknown_nested_key_names_those_of_its_level(key, hint):
    for value in ("1", ""):
        with pytest.raises(UsageError, match="unknown key") as error:
            manifests.settings({}, {key: value})
        assert error.value.hint == hint


def test_an_empty_setting_unsets_a_key_of_the_section():
    listed = {
        "namespace": "a",
        "priority_class": "high",
        "limits": {"cpu": "1", "memory": "2Gi"},
        "pod": {"spec": {"priority": 5, "schedulerName": "x"}},
    }
    assert manifests.settings(listed, {"priority_class": "", "namespace": "null"}) == {
        "limits": listed["limits"],
        "pod": listed["pod"],
    }
    assert manifests.settings(listed, {"limits.cpu": ""})["limits"] == {"memory": "2Gi"}
    assert manifests.settings(listed, {"limits": "", "pod": ""}) == {
        "namespace": "a",
        "priority_class": "high",
    }
    assert manifests.settings(listed, {"pod.spec.priority": "~"})["pod"] == {"spec": {"schedulerName": "x"}}
    assert manifests.settings(listed, {"pod.spec.priority": "'6'"})["pod"]["spec"]["priority"] == "6"
    assert manifests.settings(listed, {"pod.spec.nodeSelector.a\\.b/c": "d"})["pod"]["spec"][
        "nodeSelector"
    ] == {"a.b/c": "d"}
    assert listed["limits"] == {"cpu": "1", "memory": "2Gi"}
    for key in ("pod", "pod.spec", "runs"):
        with pytest.raises(UsageError, match=f"--set {key}: must be keys and values"):
            manifests.settings({}, {key: "x"})
    with pytest.raises(UsageError, match="spec has no keys"):
        manifests.settings({"pod": {"spec": "x"}}, {"pod.spec.a": "1"})
    contradiction = "--set limits.memory: requests: memory 4Gi is more than its limit 2Gi"
    with pytest.raises(UsageError, match=contradiction):
        manifests.settings({"requests": {"memory": "4Gi"}}, {"limits.memory": "2Gi"})
