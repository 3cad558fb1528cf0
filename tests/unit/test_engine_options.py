"""Options of `docker run` that a job adds: on the engine's command line, in a compose file, and refused."""

from dataclasses import replace

import pytest
import yaml

from cluster.backends import BACKENDS
from cluster.errors import UsageError
from cluster.runtimes import engine_options
from cluster.spec.model import Job, Machine

JOB = Job("job", ("train.py",), 2, 1, "/runs", image="trainer:0.1", gpus=(0, 1), device="cuda")
OPTIONS = ("--memory 3g", "--ulimit=nofile=65536", "--device", "--privileged", "-m 2g", "--cap-add '$SYS'")
GOOD = (
    *tuple(each for each in OPTIONS if each != "--device"),
    "--device /dev/fuse",
    "--device=/dev/kvm:/dev/kvm",
)


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_they_precede_the_image_on_the_engines_command_line(runtime):
    hosts = tuple(Machine(name, "10.0.0.1", (0,), name, "/runs", "/data", runtime) for name in ("a", "b"))
    made = BACKENDS["ssh"].plan(replace(JOB, hosts=hosts, run_options=GOOD), attempt=1, port=1)
    for step in made.steps:
        (text,) = step.files.values()
        wanted = "--memory=3g --ulimit=nofile=65536 --privileged -m2g '--cap-add=$SYS' --device=/dev/fuse"
        assert f"{wanted} --device=/dev/kvm:/dev/kvm trainer:0.1 " in text


def test_compose_has_them_as_keys_of_every_service():
    made = BACKENDS["compose"].plan(replace(JOB, run_options=GOOD), attempt=1, port=1)
    (text,) = made.steps[0].files.values()
    services = yaml.safe_load(text)["services"]
    assert len(services) == 2
    for service in services.values():
        assert service["mem_limit"] == "2g"
        assert service["ulimits"] == {
            "memlock": -1,
            "stack": 67108864,
            "nofile": {"soft": 65536, "hard": 65536},
        }
        assert service["privileged"] is True
        assert service["cap_add"] == ["$$SYS"]
        assert service["devices"] == ["/dev/fuse", "/dev/kvm:/dev/kvm"]


@pytest.mark.parametrize(
    "text", ["-v/data:/data", "-eA=1", "-it", "--pod x", "--env-host=true", "--timeout 5"]
)
def test_those_of_podman_and_those_written_together_are_refused_with_what_to_use(text):
    with pytest.raises(UsageError) as refused:
        engine_options.parse([text])
    assert (
        "clusterctl" in refused.value.hint
        or "omit it" in refused.value.hint
        or "use --" in refused.value.hint
    )


def test_the_hint_for_an_option_without_a_value_can_be_followed():
    with pytest.raises(UsageError) as refused:
        engine_options.words(["--no-hosts"])
    assert "--no-hosts=true" in refused.value.hint
    assert engine_options.words(["--no-hosts=true"]) == ["--no-hosts=true"]


@pytest.mark.parametrize(
    "name", ["name", "net", "rm", "detach", "d", "entrypoint", "user", "e", "v", "gpus", "l", "w"]
)
@pytest.mark.parametrize("form", ["{}", "{}=x", "{} x"])
def test_those_that_the_launcher_sets_are_refused(name, form):
    dashes = "-" if len(name) == 1 else "--"
    with pytest.raises(UsageError) as refused:
        engine_options.parse([form.format(dashes + name)])
    assert refused.value.hint


@pytest.mark.parametrize(
    "text", ["", "memory", "--memory", "--memory 3g 4g", "'", "--privileged x", "image", "-it", "--"]
)
def test_text_that_is_not_one_option_is_refused(text):
    with pytest.raises(UsageError):
        engine_options.words([text])
