"""What of a Docker image its files do not say, as the scripts that Apptainer reads; run by a real shell."""

import subprocess

import pytest

from cluster.images import apptainer

HOSTILE = 'a\'; echo foo; $(id) `id` "b" $HOME \\ end'


def run(text, *arguments):
    done = subprocess.run(["sh", "-c", text, "run", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("config", "arguments", "printed"),
    [
        ({"Entrypoint": ["printf", "%s|"], "Cmd": ["a b", HOSTILE]}, (), f"a b|{HOSTILE}|"),
        ({"Entrypoint": ["printf", "%s|"], "Cmd": ["a b"]}, ("c d", HOSTILE), f"c d|{HOSTILE}|"),
        ({"Entrypoint": None, "Cmd": ["printf", "%s|", "x"]}, (), "x|"),
        ({"Entrypoint": None, "Cmd": ["false"]}, ("printf", "%s|", "y"), "y|"),
        ({"Entrypoint": ["printf", "%s|", "z"], "Cmd": None}, (), "z|"),
    ],
)
def test_it_runs_what_a_container_would(config, arguments, printed):
    assert run(apptainer.runscript(config), *arguments) == printed


def test_the_images_variables_are_values_and_no_shell_text():
    text = apptainer.variables([f"NOTE={HOSTILE}", "EMPTY=", "PAIR=a=b"])
    assert run(text + 'printf \'%s|\' "$NOTE" "$EMPTY" "$PAIR"') == f"{HOSTILE}||a=b|"
