import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.spec.image import DEFAULT_IMAGE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def setup():
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_description_on_a_package_index_has_no_link_that_leads_nowhere(setup):
    prose = re.sub(r"^```.*?^```", "", setup.described(README, ""), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", prose)
    assert "```" in setup.described(README, "")


def test_with_a_repository_all_links_of_the_description_lead_into_it(setup):
    home = "https://example.com/ann/clusterctl"
    text = setup.described(README, home)
    paths = re.findall(rf"\]\({home}/(?:blob|raw)/HEAD/([^)#]+)", text)
    assert len(paths) == len(re.findall(r"\]\((?!https?://|#)", README)) > 5
    assert all((ROOT / path).exists() for path in paths)
    assert not re.search(r"!\[[^]]*\]\([^)]*/blob/", text)


@pytest.mark.parametrize(
    ("given", "absent", "present"),
    [
        ("see [the guide](docs/a.md#b).", "see the guide.", "see [the guide](U/blob/HEAD/docs/a.md#b)."),
        ("![A run](docs/a.svg)", "", "![A run](U/raw/HEAD/docs/a.svg)"),
        (
            "[out](https://a.b/c) [here](#top)",
            "[out](https://a.b/c) [here](#top)",
            "[out](https://a.b/c) [here](#top)",
        ),
        (
            "`[a](b)` and\n```sh\n[c](d)\n```\n",
            "`[a](b)` and\n```sh\n[c](d)\n```\n",
            "`[a](b)` and\n```sh\n[c](d)\n```\n",
        ),
    ],
)
def test_links(setup, given, absent, present):
    assert (setup.described(given, ""), setup.described(given, "U")) == (absent, present)


def test_the_readme_has_the_addresses_of_pyproject():
    check = [sys.executable, ROOT / "packaging/readme.py", "--check"]
    assert subprocess.run(check).returncode == 0, "type: make readme"


def test_one_edit_of_the_addresses_reaches_readme_package_and_site(tmp_path):
    for name in ("README.md", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "packaging").mkdir()
    shutil.copy(ROOT / "packaging/readme.py", tmp_path / "packaging")
    file = tmp_path / "pyproject.toml"
    file.write_text(
        re.sub(
            r'^(repository|documentation|package) = ""',
            r'\1 = "https://e.org/\1"',
            file.read_text(),
            flags=re.M,
        )
    )
    subprocess.run([sys.executable, tmp_path / "packaging/readme.py"], check=True)
    text = (tmp_path / "README.md").read_text()
    assert "git clone https://e.org/repository clusterctl" in text
    assert "[Documentation](https://e.org/documentation)" in text
    spec = importlib.util.spec_from_file_location("edited", tmp_path / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.addresses()["repository"] == "https://e.org/repository"


def test_every_file_names_the_version_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(\d+\.\d+)\.\d+"', text, re.MULTILINE)
    assert version
    assert f"trainer:{version[1]}" == DEFAULT_IMAGE
    images = re.findall(r"image: (\S+)", (ROOT / "docker-compose.yml").read_text())
    assert set(images) == {DEFAULT_IMAGE}
    assert re.search(rf"^## {re.escape(version[1])}\.", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_forms_and_citation_are_valid():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "license"}
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    named = [form for form in forms if "body" in form]
    assert len(named) >= 2
    for form in named:
        assert {"name", "description"} <= form.keys()
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert fields
        assert all(field["attributes"]["label"] and field["id"] for field in fields)
