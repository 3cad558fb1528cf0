"""Options of `docker run` and `podman run` that a job adds (`--run-option`), and their keys in a compose file. Pure."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from cluster.errors import UsageError

_ONE_SHOT = "clusterctl removes a job's containers when it ends"
_OMIT = "omit it"
_NETWORK = "containers use the node's own network: omit it"
_ENV = "use --env of clusterctl"
#: The options that the launcher sets, or that would break it, and what to use instead.
_REFUSED = {
    "name": "use --name of clusterctl",
    **dict.fromkeys(
        ("network", "net", "network-alias", "link", "ip", "ip6", "mac-address", "pod", "pod-id-file"),
        _NETWORK,
    ),
    **dict.fromkeys(("publish", "p", "publish-all", "P", "expose"), _NETWORK),
    **dict.fromkeys(
        ("hostname", "h", "add-host"), "containers use the node's own network: set names in its /etc/hosts"
    ),
    **dict.fromkeys(("rm", "rmi", "replace", "restart"), f"{_ONE_SHOT}; for restarts use --max-restarts"),
    **dict.fromkeys(("init-ctr", "requires"), "clusterctl starts a node's container by itself: omit it"),
    "timeout": "use --stall-timeout, or --time on Slurm",
    **dict.fromkeys(
        ("detach", "d", "interactive", "i", "tty", "t", "attach", "a"),
        "use launch --detach, or clusterctl shell",
    ),
    "entrypoint": "use --command",
    **dict.fromkeys(("user", "u", "userns"), "containers run as you: omit it"),
    **dict.fromkeys(("env", "e", "env-host", "env-merge", "unsetenv", "unsetenv-all"), _ENV),
    "env-file": "use --env-file of clusterctl",
    **dict.fromkeys(("volume", "v", "mount", "volumes-from"), "use --mount of clusterctl"),
    **dict.fromkeys(("workdir", "w"), "use --workdir of clusterctl"),
    "gpus": "use --gpus of clusterctl, and gpus in cluster.yaml",
    **dict.fromkeys(
        ("label", "l", "label-file", "cidfile"), "clusterctl finds its containers by its own labels: omit it"
    ),
    **dict.fromkeys(("ipc", "shm-size"), "containers use the node's /dev/shm (--ipc host): enlarge that"),
    **dict.fromkeys(
        ("pid", "init", "sig-proxy", "stop-signal", "stop-timeout"),
        "signals must reach the agent: use --grace",
    ),
    **dict.fromkeys(("pull", "platform"), "use clusterctl image push"),
    "log-driver": "logs are in the run directory: omit it",
    "help": _OMIT,
}
#: Options without a value. All others of `docker run` take one.
_FLAGS = ("privileged", "read-only", "oom-kill-disable", "no-healthcheck", "disable-content-trust")
#: The key of a service in a compose file that is an option, and whether it is a list.
_KEYS = {
    **{
        name: (name.replace("-", "_"), False)
        for name in ("cpus", "pids-limit", "oom-score-adj", "runtime", "cgroup-parent")
    },
    **{
        name: (name.replace("-", "_"), False)
        for name in ("privileged", "read-only", "oom-kill-disable", "cpu-shares")
    },
    **{
        name: (name.replace("-", "_"), True)
        for name in ("cap-add", "cap-drop", "security-opt", "group-add", "dns", "tmpfs")
    },
    "memory": ("mem_limit", False),
    "m": ("mem_limit", False),
    "memory-swap": ("memswap_limit", False),
    "memory-reservation": ("mem_reservation", False),
    "cpuset-cpus": ("cpuset", False),
    "c": ("cpu_shares", False),
    "device": ("devices", True),
    "device-cgroup-rule": ("device_cgroup_rules", True),
    "sysctl": ("sysctls", True),
    "ulimit": ("ulimits", False),
}


def parse(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, value) pairs of options such as `--memory 32g`, `--memory=32g` or `--privileged` (value "").

    Raises UsageError for text that is not one option, and for an option that the launcher sets.
    """
    options = []
    for text in texts:
        where = f"--run-option {text!r}"
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(
                f"{where}: {str(error).lower()}", "for example: --run-option '--memory 32g'"
            ) from None
        if words and re.match(r"-[A-Za-z][^=]", words[0]):  # -it, -v/data:/data
            hint = _REFUSED.get(words[0][1], f"separate what follows -{words[0][1]}, or use the long name")
            raise UsageError(f"{where}: several options, or a value without a space before it", hint)
        match = re.fullmatch(r"--?([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?", words[0], re.DOTALL) if words else None
        if match is None:
            raise UsageError(
                f"{where}: not an option of docker run", "for example: --run-option '--memory 32g'"
            )
        name = match[1]
        value = match[2]
        if name in _REFUSED:
            raise UsageError(f"{where}: clusterctl does not pass it to the container engine", _REFUSED[name])
        more = words[1:]
        if value is None and name not in _FLAGS and len(more) == 1:
            value = more[0]
            more = []
        if more:
            raise UsageError(f"{where}: more than one option or value", "repeat --run-option for each")
        if name in _FLAGS and value not in (None, "true", "false"):
            raise UsageError(f"{where}: --{name} takes no value", f"--run-option=--{name}")
        if name not in _FLAGS and not value:
            dashes = "-" if len(name) == 1 else "--"
            hint = f"for example: --run-option '{dashes}{name} VALUE'; for an option without a value: --{name}=true"
            raise UsageError(f"{where}: {dashes}{name} needs a value", hint)
        options.append((name, value or ""))
    return options


def words(texts: Sequence[str]) -> list[str]:
    """Return the words of the options for the engine's command line. Raises UsageError."""
    return [f"{'-' if len(name) == 1 else '--'}{name}{_joined(name, value)}" for name, value in parse(texts)]


def _joined(name: str, value: str) -> str:
    return f"={value}" if value and len(name) > 1 else value


def service_keys(texts: Sequence[str]) -> dict[str, Any]:
    """Return the options as keys of a service in a compose file. Raises UsageError for one that has no key."""
    keys: dict[str, Any] = {}
    for name, value in parse(texts):
        if name not in _KEYS:
            known = ", ".join(f"--{option}" for option in _KEYS if len(option) > 1)
            raise UsageError(
                f"--run-option --{name}: docker compose has no equivalent that is supported",
                f"one of: {known}",
            )
        key, is_list = _KEYS[name]
        escaped = value.replace("$", "$$")
        if name == "ulimit":
            limit, _, numbers = value.partition("=")
            soft, _, hard = numbers.partition(":")
            if not re.fullmatch(r"-?\d+", soft) or not re.fullmatch(r"-?\d*", hard):
                raise UsageError(
                    f"--run-option --ulimit {value}: not NAME=SOFT[:HARD]",
                    "for example: --ulimit nofile=65536",
                )
            keys.setdefault(key, {})[limit] = {"soft": int(soft), "hard": int(hard or soft)}
        elif is_list:
            keys.setdefault(key, []).append(escaped)
        else:
            keys[key] = value != "false" if name in _FLAGS else escaped
    return keys
