"""The section `kubernetes:` of cluster.yaml: where the pods of a job run, and what they ask for. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from cluster.errors import UsageError
from cluster.spec.schema import Keys, Text, typed

#: Labels and annotations that clusterctl sets itself.
OUR_KEYS = ("clusterctl/", "app.kubernetes.io/managed-by", "kueue.x-k8s.io/")

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = rf"((?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/)?{_QUALIFIED}"
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_UNITS = {
    "n": "1e-9",
    "u": "1e-6",
    "m": "1e-3",
    "": "1",
    "k": "1e3",
    "M": "1e6",
    "G": "1e9",
    "T": "1e12",
    "P": "1e15",
    "E": "1e18",
}
_UNITS |= {f"{letter}i": str(1024**power) for power, letter in enumerate("KMGTPE", 1)}


def _matching(pattern: str, expected: str, hint: str = "") -> Any:
    """Return the annotation of a text that matches a pattern; the error says what was expected."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise UsageError(f"{text!r}: expected {expected}", hint)
        return text

    return AfterValidator(check)


def _quantity(text: str) -> str:
    amount(text)
    return text


def _not_ours(key: str) -> str:
    if key.startswith(OUR_KEYS):
        hint = "for Kueue, set kueue_queue" if key.startswith("kueue") else "choose another key"
        raise UsageError(f"{key!r}: clusterctl sets it", hint)
    return key


def _refuse_unless_one(one: Mapping[str, Any]) -> None:
    """Raise UsageError unless exactly one of the keys has a value."""
    given = [key for key, value in one.items() if value]
    if len(given) != 1:
        which = f"both {' and '.join(given)}" if given else "none"
        raise UsageError(f"expected one of {', '.join(one)}, but it has {which}", "for example: claim: data")


_NAME_RULE = "lower-case letters, digits and '-', a letter or digit first and last"
#: A name of one part, such as that of a namespace.
Label = Annotated[str, _matching(rf"({_LABEL})?", f"a name of at most 63 {_NAME_RULE}")]
#: The name of most objects.
ObjectName = Annotated[str, _matching(_SUBDOMAIN, f"a name: {_NAME_RULE}; parts joined by '.'")]
#: The key of a label or annotation.
Key = Annotated[str, _matching(_KEY, "a key such as pool, or example.com/pool")]
UserKey = Annotated[Key, AfterValidator(_not_ours)]
LabelValue = Annotated[
    Text,
    _matching(
        rf"({_QUALIFIED})?", "at most 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"
    ),
]
#: A number with an optional unit: 500m, 2, 16Gi.
Quantity = Annotated[
    str,
    BeforeValidator(
        lambda value: str(value) if isinstance(value, int | float) else value,
        json_schema_input_type=str | int | float,
    ),
    AfterValidator(_quantity),
]
ResourceName = Annotated[str, _matching(_KEY, "a resource such as cpu, memory or nvidia.com/gpu")]
#: A resource that a device plugin provides, such as nvidia.com/gpu.
DeviceName = Annotated[
    str,
    _matching(
        rf"(?=.*/){_KEY}",
        "the name of a resource with its domain, such as nvidia.com/gpu",
        "kubectl describe nodes lists the resources of each machine under Allocatable",
    ),
]
AbsolutePath = Annotated[str, _matching(r"/[^\0:]*", "an absolute path, for example /data")]
SubPath = Annotated[str, _matching(r"(?!/)(?!(.*/)?\.\.(/|$)).+", "a relative path without '..'")]


def amount(quantity: str) -> Decimal:
    """Return the number that a quantity of Kubernetes stands for, such as 0.5 for 500m. Raises UsageError."""
    why = f"{quantity!r}: expected a number and a unit of Kubernetes (m, k, M, G, T, Ki, Mi, Gi, Ti)"
    match = re.fullmatch(rf"{_NUMBER}([eE][+-]?\d+|[a-zA-Z]*)", quantity)
    if not match:
        raise UsageError(why, "for example: 500m, 2 or 16Gi")
    number = match[1]
    unit = match[2]
    if re.fullmatch(r"[eE][+-]?\d+", unit):
        return Decimal(quantity)
    if unit in _UNITS:
        return Decimal(number) * Decimal(_UNITS[unit])
    meant = unit.lower().removesuffix("b")
    known = next((known for known in _UNITS if known and known.lower() == meant), "Gi")
    raise UsageError(why, f"for example: {number}{known}")


class Runs(Keys):
    """Where the pods keep checkpoints, logs and results. Without a volume, they disappear with the pods."""

    claim: ObjectName | None = Field(
        default=None,
        description="PersistentVolumeClaim that all pods can mount at once (access mode ReadWriteMany).",
    )
    host_path: AbsolutePath | None = Field(
        default=None,
        description="Folder of the machines. It must be the same one on all of them, on a shared file system.",
    )
    sub_path: SubPath | None = Field(
        default=None, description="Folder in that volume, instead of the whole volume."
    )

    @model_validator(mode="after")
    def _check(self) -> Runs:
        if self.model_fields_set:
            _refuse_unless_one({"claim": self.claim, "host_path": self.host_path})
        return self

    @property
    def is_persistent(self) -> bool:
        """Whether the files outlive their pod."""
        return bool(self.claim or self.host_path)


class Volume(Keys):
    """A volume that every pod mounts."""

    path: AbsolutePath = Field(description="Path in the containers.")
    claim: ObjectName | None = Field(
        default=None, description="PersistentVolumeClaim to mount, for example with data."
    )
    host_path: AbsolutePath | None = Field(default=None, description="Folder of the machine to mount.")
    empty_dir: Quantity | None = Field(
        default=None,
        description="Size limit, such as 50Gi, of an empty folder on the machine's disk. It lives as long as the pod.",
    )
    sub_path: SubPath | None = Field(
        default=None, description="Folder in that volume, instead of the whole volume."
    )
    read_only: bool = Field(default=False, description="Mount it read-only.")

    @model_validator(mode="after")
    def _check(self) -> Volume:
        _refuse_unless_one({"claim": self.claim, "host_path": self.host_path, "empty_dir": self.empty_dir})
        return self


class Toleration(Keys):
    """A taint of machines on which the pods may run all the same."""

    key: Key | None = Field(default=None, description="Key of the taint; without it, every taint.")
    operator: Literal["Equal", "Exists"] | None = Field(
        default=None,
        description="Equal compares the value, Exists does not. Default: Equal if there is a value.",
    )
    value: LabelValue | None = Field(default=None, description="Value of the taint; without it, any value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; without it, all effects."
    )
    seconds: int | None = Field(
        default=None, ge=0, description="With NoExecute: how long the pods stay after the taint was added."
    )

    @model_validator(mode="after")
    def _check(self) -> Toleration:
        if self.operator == "Exists" and self.value:
            raise UsageError(
                f"value {self.value!r}: operator Exists takes none", "omit value, or set operator: Equal"
            )
        if self.key is None and (self.value or self.operator == "Equal"):
            raise UsageError("operator Equal needs a key", "for example: {key: pool, value: training}")
        if self.seconds is not None and self.effect != "NoExecute":
            raise UsageError(f"seconds {self.seconds}: only with effect NoExecute", "set effect: NoExecute")
        return self


class SecurityContext(Keys):
    """Under which user, and with which rights, the containers run. Default: as the container image says."""

    run_as_user: int | None = Field(default=None, ge=0, description="UID of the processes.")
    run_as_group: int | None = Field(default=None, ge=0, description="GID of the processes.")
    fs_group: int | None = Field(
        default=None,
        ge=0,
        description="GID that owns the mounted volumes, so that the processes may write to them.",
    )
    supplemental_groups: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="More groups of the processes."
    )
    run_as_non_root: bool | None = Field(default=None, description="Refuse to start a container as root.")
    privileged: bool | None = Field(
        default=None, description="Give the containers all rights of the machine's root."
    )
    allow_privilege_escalation: bool | None = Field(
        default=None, description="Whether a process may get more rights than its parent, as with sudo."
    )
    add_capabilities: tuple[str, ...] = Field(
        default=(), description="Capabilities to add, such as SYS_PTRACE."
    )
    drop_capabilities: tuple[str, ...] = Field(
        default=(), description="Capabilities to drop: ALL, or single ones."
    )
    seccomp_profile: Literal["RuntimeDefault", "Unconfined"] | None = Field(
        default=None,
        description="Which system calls are allowed. Pod Security `restricted` needs RuntimeDefault.",
    )


class PodMetadata(Keys):
    """Labels and annotations of the pods alone."""

    labels: dict[UserKey, LabelValue] = Field(default={}, description="Labels of the pods.")
    annotations: dict[UserKey, Text] = Field(default={}, description="Annotations of the pods.")


class Pod(Keys):
    """Any other field of a pod, as in its manifest. It is merged into the pods of a job as `kubectl patch` does it."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    spec: Annotated[dict[str, Any], BeforeValidator(typed)] = Field(
        default={},
        description="Fields of a PodSpec. Lists such as containers, volumes and env merge by name, so the container "
        "node, which runs the ranks, gets further fields: containers: [{name: node, ...}].",
    )


class Options(Keys):
    """Where and how the pods of a job run on a Kubernetes cluster."""

    context: str = Field(default="", description="Context of the kubeconfig. Default: its current context.")
    namespace: Label = Field(
        default="", description="Namespace of the pods. Default: that of the context, or else default."
    )
    runs: Runs = Field(default_factory=Runs)
    volumes: tuple[Volume, ...] = Field(default=(), description="More volumes, for example with data.")
    gpu_resource: DeviceName = Field(
        default="nvidia.com/gpu",
        description="Resource that `--gpus` counts: nvidia.com/gpu, amd.com/gpu, or a MIG slice such as "
        "nvidia.com/mig-1g.10gb.",
    )
    requests: dict[ResourceName, Quantity] = Field(
        default={},
        description="What the machine must have free for each pod, for example {cpu: 16, memory: 64Gi}.",
    )
    limits: dict[ResourceName, Quantity] = Field(
        default={}, description="What a pod may use at most. A pod that uses more memory is killed."
    )
    shared_memory: Quantity | None = Field(
        default=None,
        description="Limit of /dev/shm, through which dataloader workers pass batches; it counts as memory of the pod. "
        "Default: as much as the memory limit and the machine allow.",
    )
    devices: dict[DeviceName, PositiveInt] = Field(
        default={},
        description="Other devices for each pod, such as {rdma/hca: 1} for InfiniBand. The pods get the capability "
        "IPC_LOCK with them, which RDMA needs.",
    )
    host_network: bool = Field(
        default=False,
        description="Use the machine's network instead of one for pods. It may be faster, and ports are shared with "
        "everything else on the machine.",
    )
    node_selector: dict[Key, LabelValue] = Field(
        default={}, description="Labels that the machines must have, for example {pool: training}."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        description="Taints to tolerate, besides the taint of the GPUs' resource, which is always tolerated.",
    )
    priority_class: ObjectName | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class: ObjectName | None = Field(
        default=None, description="RuntimeClass of the pods, for example nvidia on k3s."
    )
    service_account: ObjectName | None = Field(
        default=None, description="ServiceAccount of the pods. They get no token for the API either way."
    )
    image_pull_secrets: tuple[ObjectName, ...] = Field(
        default=(),
        description="Secrets with the logins of registries, as kubectl create secret docker-registry makes.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None,
        description="When the machines pull the container image. By default `Always` for an image without a tag or "
        "with the tag latest, so that a job gets what was pushed last, and otherwise `IfNotPresent`.",
    )
    security_context: SecurityContext = Field(default_factory=SecurityContext)
    pod: Pod = Field(
        default_factory=Pod,
        description="Any other field of the pods, merged into their manifests, for example {spec: {affinity: ...}}.",
    )
    labels: dict[UserKey, LabelValue] = Field(default={}, description="Labels of all objects of a job.")
    annotations: dict[UserKey, Text] = Field(default={}, description="Annotations of all objects of a job.")
    kueue_queue: ObjectName | None = Field(
        default=None, description="LocalQueue of Kueue that admits the pods of a job together."
    )
    half_started_s: float = Field(
        default=60.0,
        ge=0,
        description="Without Kueue: seconds after which a job of which only some pods have found a machine gives them "
        "up and tries again.",
    )

    @model_validator(mode="after")
    def _check(self) -> Options:
        for where, values in (("requests", self.requests), ("limits", self.limits)):
            if self.gpu_resource in values:
                raise UsageError(f"{where}: {self.gpu_resource} cannot be set here", "set GPUs with --gpus")
            for name in values:
                if name in self.devices:
                    raise UsageError(f"{where}: {name} is also in devices", "list it once, in devices")
        if self.gpu_resource in self.devices:
            raise UsageError(f"devices: {self.gpu_resource} cannot be set here", "set GPUs with --gpus")
        for name, value in self.requests.items():
            if name in self.limits and amount(value) > amount(self.limits[name]):
                why = f"requests: {name} {value} is more than its limit {self.limits[name]}"
                raise UsageError(why, f"raise it: limits: {{{name}: {value}}}")
        paths = [volume.path.rstrip("/") for volume in self.volumes]
        for path in paths:
            if path in ("", "/runs", "/dev/shm", "/clusterctl", "/inputs"):
                why = f"volumes: {path or '/'} is used by clusterctl itself"
                raise UsageError(why, "choose another path")
            if paths.count(path) > 1:
                why = f"volumes: two of them have the path {path}"
                raise UsageError(why, "choose another path for one of them")
        return self
