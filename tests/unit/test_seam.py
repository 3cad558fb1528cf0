"""A new backend, runtime or strategy is one file and one line: no code outside of its table asks for its name."""

import ast
import re
from pathlib import Path

import pytest

from cluster.backends import BACKENDS
from cluster.runtimes import RUNTIMES
from trainer.config.strategies import STRATEGIES

CLUSTER = Path(__file__).parents[2] / "cluster"
#: The names in each table, by the package that may compare them.
SEAMS = {"runtimes": frozenset(RUNTIMES), "backends": frozenset(BACKENDS)}
#: Comparisons with a word that means something else, by file and word.
OTHER_MEANINGS = {
    ("transport/files.py", "none"): "the state of a mirror that does not exist",
    ("transport/known_hosts.py", "none"): "ssh's word for no file of known hosts",
    ("transport/failures.py", "none"): "ssh's word for no file of known hosts",
    ("doctor/here.py", "ssh"): "the program ssh",
    ("transport/discovery.py", "ssh"): "a line of discovery.sh: the variable SSH_CONNECTION",
}


def words_in(node):
    """Yield the texts in an expression."""
    return (
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def compared_in_python(text):
    """Yield each word that a Python program compares, uses as a key, or lists as a case or a key."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            yield from words_in(node)
        elif isinstance(node, ast.MatchValue):
            yield from words_in(node.value)
        elif isinstance(node, ast.Dict):
            yield from (word for key in node.keys if key for word in words_in(key))
        elif isinstance(node, ast.Subscript):  # also Literal["a", "b"]
            yield from words_in(node.slice)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "pop")
        ):
            yield from (word for argument in node.args[:1] for word in words_in(argument))


def compared_in_shell(text):
    """Yield each word that a shell script compares in a test, or lists as the pattern of a case."""
    for line in text.splitlines():
        code = re.sub(r"(^|\s)#.*", "", line)
        for match in re.finditer(r"(\S+)\s+(?:=|==|!=|=~)\s+(\S+)", code):
            yield from re.findall(r"[\w-]+", " ".join(match.groups()))
        for match in re.finditer(r"(?:^|;;|\bin\b)\s*\(?((?:[^()\s;|]+\s*\|\s*)*[^()\s;|]+)\)", code):
            yield from re.findall(r"[\w-]+", match[1])


def comparisons(package):
    """Return the file and word of each comparison with a name of this package's table, outside of the package."""
    found = []
    for suffix, read in ((".py", compared_in_python), (".sh", compared_in_shell)):
        for path in sorted(CLUSTER.rglob(f"*{suffix}")):
            name = path.relative_to(CLUSTER).as_posix()
            if not name.startswith(f"{package}/"):
                found += [(name, word) for word in read(path.read_text()) if word in SEAMS[package]]
    return found


@pytest.mark.parametrize("package", SEAMS)
def test_only_the_package_of_a_table_compares_its_names(package):
    assert [each for each in comparisons(package) if each not in OTHER_MEANINGS] == []


def test_each_other_meaning_still_occurs():
    assert {each for package in SEAMS for each in comparisons(package)} >= OTHER_MEANINGS.keys()


def texts_in_python(text):
    """Yield each text of a Python program that is no docstring."""
    tree = ast.parse(text)
    sentences = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in sentences:
            yield node.value


def test_only_their_table_names_the_strategies():
    trainer = CLUSTER.parent / "trainer"
    table = trainer / "config" / "strategies.py"
    texts = [
        (path.name, text)
        for path in trainer.rglob("*.py")
        if path != table
        for text in texts_in_python(path.read_text())
    ]
    assert [each for each in texts if each[1] in STRATEGIES] == []


@pytest.mark.parametrize(
    "text",
    [
        'kind == "ddp"',
        'UNTIMED = ("dp", "ddp")',
        'kind.replace("fsdp", "ddp")',
        'words += ["--parallel", "ddp"]',
        'f(x="ddp")',
    ],
)
def test_a_use_of_a_strategy_is_found(text):
    assert "ddp" in set(texts_in_python(text))


def test_a_docstring_is_no_use_of_a_strategy():
    assert set(texts_in_python('def step():\n    "ddp"\n    return "dp"')) == {"dp"}


@pytest.mark.parametrize(
    "text",
    [
        'if node.runtime == "podman": pass',
        'if "podman" != kind: pass',
        'if kind in ("docker", "podman"): pass',
        'match kind:\n    case "docker" | "podman": pass',
        'page = {"podman": "https://podman.io"}[kind]',
        'Engine = Literal["docker", "podman"]',
        'kind = RUNTIMES["podman"]',
        'fields.get("podman", "")',
    ],
)
def test_a_comparison_in_python_is_found(text):
    assert "podman" in set(compared_in_python(text))


@pytest.mark.parametrize(
    "text",
    [
        '[ "$engine" = podman ] || exit',
        "[[ $engine != 'podman' ]]",
        "case $engine in\n    docker | podman) ;;\nesac",
        "case $runtime:$name in podman:*) ;; esac",
        "case $runtime in x) ;; podman) ;; esac",
        '[ podman == "$engine" ]',
    ],
)
def test_a_comparison_in_a_shell_script_is_found(text):
    assert "podman" in set(compared_in_shell(text))


@pytest.mark.parametrize(
    "text", ["engine=podman", "found=$(command -v podman)", "podman ps | head", "# if = podman )"]
)
def test_a_use_without_a_comparison_is_none(text):
    assert "podman" not in set(compared_in_shell(text))
