"""The commands, files and links in README.md, CONTRIBUTING.md and docs/ exist; plans that need no machine are made."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import cluster.cli.main
import trainer.cli
from cluster.backends import BACKENDS
from cluster.spec import inventory, job_file, schema
from cluster.web import metrics
from trainer.config import Hyp

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROGRAMS = {
    "clusterctl": typer.main.get_command(cluster.cli.main.app),
    "trainer": typer.main.get_command(trainer.cli.app),
}
#: Options that do their work while they are parsed.
EAGER = ("--help", "--help-all", "-h", "--version", "--install-completion", "--show-completion")
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "bash", "shell", "console")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page, as (language, text)."""
    return BLOCK.findall(page.read_text())


def commands(text: str) -> list[list[str]]:
    """The words of each command, without variables before it, the folder of its program, and redirections."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
        lexer.whitespace_split = True
        found.append([])
        for word in lexer:
            if word in (">", "<"):
                next(lexer)  # the file
            elif word and set(word) <= set(";&|()"):
                found.append([])
            elif found[-1] or not re.fullmatch(r"[A-Z_]+=.*|\$", word):
                found[-1].append(word.removeprefix(".venv/bin/") if not found[-1] else word)
    return [command for command in found if command]


def parse(program: str, words: list[str]) -> None:
    """Parse with the program's own parser, which exits or raises for what it does not know. Nothing is run."""
    command = PROGRAMS[program]
    name = program
    if {*words} & {*EAGER}:
        return
    while hasattr(command, "commands"):
        context = command.make_context(name, list(words))
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, list(words))
    takes_trainer_arguments = name in ("launch", "plan") and not any(word.endswith(".yaml") for word in words)
    if program == "clusterctl" and takes_trainer_arguments and "--" in words:
        rest = words[words.index("--") + 1 :]
        parse("trainer", rest if rest[0] in PROGRAMS["trainer"].commands else ["train", *rest])


def test_the_readme_names_the_commands_that_run_and_test_and_ci_calls_the_latter():
    shown = [
        " ".join(words)
        for language, text in blocks(ROOT / "README.md")
        if language in SHELL
        for words in commands(text)
    ]
    assert {"make run", "make test"} <= set(shown)
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()


@pages
def test_every_command_is_one_that_the_parsers_know(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for language, text in blocks(page):
        if language not in SHELL:
            continue
        for words in commands(text):
            program = words[0]
            if words[:3] == ["python", "-m", "trainer"] or (program == "torchrun" and "trainer" in words):
                program = "trainer"
                words = words[words.index("trainer") :]
            try:
                if program in PROGRAMS:
                    parse(program, [word for word in words[1:] if word != "..."])
            except Exception as error:
                raise AssertionError(f"{shlex.join(words)}: {error}") from error
            if program == "make":
                assert {word for word in words[1:] if "=" not in word} <= targets, words
            for word in words[:2]:
                if re.match(r"(testbed|packaging|benchmarks|examples|tests)/", word):
                    assert ROOT.joinpath(word).exists(), word


@pages
def test_every_command_within_a_sentence_exists_and_has_the_options(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for inline in re.findall(r"`((?:clusterctl|trainer) [^`]+)`", text):
        program, *words = inline.partition(" -- ")[0].split()
        command = PROGRAMS[program]
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            assert words[0] in command.commands, inline
            command = command.commands[words.pop(0)]
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known | {"--help", "--help-all"}, inline


@pages
def test_its_cluster_yaml_is_valid_and_its_plans_are_made(page, tmp_path, monkeypatch):
    """A block that begins with `# cluster.yaml` is the file of the plans after it; `--backend` plans need none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("train.py", "grid.txt", "data/coco/coco.yaml", "testbed/.state/ssh_config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("--seed 1\n")
    complete = False
    for language, text in blocks(page):
        if language == "yaml" and text.startswith("# cluster.yaml"):
            made = schema.read(text, "cluster.yaml", BACKENDS, str(tmp_path))
            Path("cluster.yaml").write_text(text)
            complete = inventory.is_complete(made)
        if language == "yaml" and text.startswith("# job.yaml"):
            job_file.read(text, "job.yaml", BACKENDS)
        for words in commands(text) if language in SHELL else []:
            if (
                words[:2] == ["clusterctl", "plan"]
                and "..." not in words
                and (complete or "--backend" in words)
            ):
                result = CliRunner().invoke(cluster.cli.main.app, words[1:])
                assert result.exit_code == 0, (words, result.output, result.exception)


def test_each_line_of_a_job_file_in_a_table_is_valid():
    text = (ROOT / "docs/how-to/any-program.md").read_text().partition("to a job file\n")[2]
    rows = re.findall(r"^\|[^|]+\|([^|]+)\|$", text.partition("\n## ")[0], re.MULTILINE)
    lines = [line for row in rows for line in re.findall(r"`(\w+: [^`]+)`", row)]
    assert len(lines) > 10
    for line in lines:
        job_file.read(line, "job.yaml", BACKENDS)


@pages
def test_its_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = [
                re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles
            ]
            assert heading in slugs, target


def test_python_blocks_compile():
    for page in PAGES:
        for language, text in blocks(page):
            if language == "python":
                compile(text, str(page), "exec")


@pytest.fixture(scope="module")
def made():
    """The hook that makes the reference pages."""
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "packaging/docs_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_names_every_command_and_option(made):
    pages = made.reference()
    for name, words in {
        "clusterctl image": "## clusterctl image push",
        "trainer bench": "## trainer bench scaling",
        "clusterctl launch": "`-n, --nodes",
        "trainer train": "`--sync-bn`",
    }.items():
        assert words in pages[name]
        assert (
            f"[`{name.partition(' ')[2]}`]({Path(made.file_of(name)).relative_to('reference/cli')})"
            in made.commands()
        )


def test_the_tables_of_keys_have_every_key_with_its_meaning(made):
    marks = made.KEYS.findall((ROOT / "docs/reference/configuration.md").read_text())
    assert sorted(marks) == sorted(made.TABLES)
    text = {mark: made.TABLES[mark]() for mark in marks}
    rows = {
        mark: re.findall(r"^\| `(\w+)` \|(?:.*\|)? (.*) \|$", table, re.MULTILINE)
        for mark, table in text.items()
    }
    assert {"address", "image", "slurm", "claim"} <= {key for key, _ in rows["cluster.yaml"]}
    assert [key for key, _ in rows["job.yaml"]] == [*job_file.file_type(BACKENDS).model_fields]
    assert {each.name for each in dataclasses.fields(Hyp)} == {key for key, _ in rows["hyperparameter-files"]}
    assert not [(mark, key) for mark, found in rows.items() for key, meaning in found if len(meaning) < 10]
    assert "### kubernetes.runs" in text["cluster.yaml"]


def test_the_table_of_metrics_names_those_that_are_exported():
    text = (ROOT / "docs/how-to/metrics.md").read_text().partition("\n## Metrics\n")[2]
    rows = re.findall(r"^\| (`clusterctl_\w+`.*?) \|", text, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"clusterctl_(\w+)", row)]
    source = (ROOT / "cluster/web/metrics.py").read_text()
    exported = {
        *re.findall(r"self\.add\(\s*\"(job_\w+)\"", source),
        *(name for name, *_ in metrics._RANK.values()),
        "job_state",
    }
    exported |= {f"job_{name}" for name, _ in metrics._PROGRESS.values()}
    assert sorted(named) == sorted(exported)
    assert set(re.findall(r"clusterctl_(\w+)[\[{]", text)) <= exported


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"(?:: |- )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page.relative_to(ROOT / "docs")) for page in PAGES[2:]} == listed
