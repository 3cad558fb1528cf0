"""The files of a working directory that travel with a job."""

import subprocess

import pytest

from cluster.errors import UsageError
from cluster.transport import workdir


def make(folder, **texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder):
    return set(workdir.scan(str(folder)))


def test_ignored_files_caches_and_run_directories_do_not_travel(tmp_path):
    for name in (
        *(
            "train.py",
            "pkg/model.py",
            "pkg/__pycache__/model.pyc",
            ".git/HEAD",
            "data/a.bin",
            "pkg/data/b.bin",
        ),
        *(
            "runs/.clusterctl-runs",
            "runs/job/last.pt",
            "notes.txt",
            "keep.log",
            "old.log",
            "pkg/keep.log",
            "pkg/x.tmp",
        ),
    ):
        make(tmp_path, **{name: "x"})
    make(
        tmp_path,
        **{
            ".gitignore": "/data\n*.log\n!keep.log\n",
            ".clusterignore": "notes.txt\n",
            "pkg/.gitignore": "*.tmp",
        },
    )
    (tmp_path / "link").symlink_to("train.py")
    assert names(tmp_path) == {
        *("train.py", "pkg/model.py", "pkg/data/b.bin", "keep.log", "pkg/keep.log", "link"),
        *(".gitignore", ".clusterignore", "pkg/.gitignore"),
    }


def test_a_rule_of_a_lower_folder_wins(tmp_path):
    make(tmp_path, **{".gitignore": "*.csv", "a/.gitignore": "!b.csv", "a/b.csv": "", "b.csv": ""})
    assert names(tmp_path) == {".gitignore", "a/.gitignore", "a/b.csv"}


def test_a_large_folder_is_an_error_that_names_its_largest_parts(tmp_path):
    make(tmp_path, **{"data/a": "x" * 900, "data/b": "x" * 900, "venv/c": "x" * 500, "train.py": "x"})
    assert sum(workdir.scan(str(tmp_path), limit=2301).values()) == 2301
    with pytest.raises(UsageError) as refused:
        workdir.scan(str(tmp_path), limit=2300)
    assert (
        "has 2.3 kB, more than 2.3 kB: data 1.8 kB, venv 500 bytes, train.py 1 byte" in refused.value.message
    )
    assert ".clusterignore" in refused.value.hint


def test_the_commit_says_whether_files_differ_from_it(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    assert workdir.commit(str(tmp_path)) == ""
    git("init", "--quiet")
    make(tmp_path, **{"train.py": "1"})
    git("add", "train.py")
    git("commit", "--quiet", "-m", "first")
    head = workdir.commit(str(tmp_path))
    assert len(head) == 40
    make(tmp_path, **{"train.py": "2"})
    assert workdir.commit(str(tmp_path)) == f"{head} (dirty)"


def test_a_folder_with_too_many_files_is_refused_before_all_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "LIMIT_FILES", 3)
    make(tmp_path, **{f"{n}.py": "" for n in range(3)})
    assert len(workdir.scan(str(tmp_path))) == 3
    make(tmp_path, **{"4.py": "", "z/.gitignore": "!"})  # the scan ends before the bad file
    with pytest.raises(UsageError, match="more than 3 files"):
        workdir.scan(str(tmp_path))


@pytest.mark.parametrize(("text", "message"), [("!", "Invalid"), (None, "cannot be read: Is a directory")])
def test_a_bad_ignore_file_is_an_error(tmp_path, text, message):
    file = tmp_path / ".clusterignore"
    file.mkdir() if text is None else file.write_text(text)
    with pytest.raises(UsageError, match=message):
        workdir.scan(str(tmp_path))


def test_files_that_usually_hold_secrets_are_found(tmp_path):
    secret = {
        *(".env", ".env.production", "a/.ENV", "id_rsa", "keys/ID_ED25519", "server.pem", "tls/private.key"),
        *(
            ".npmrc",
            ".pypirc",
            ".netrc",
            "home/.aws/credentials",
            "kubeconfig",
            ".kube/config",
            "a.kubeconfig",
        ),
        *(
            "gcloud/credentials.json",
            "application_default_credentials.json",
            ".docker/config.json",
            ".ssh/work",
        ),
    }
    harmless = {
        *(".env.example", "id_rsa.pub", ".ssh/known_hosts", "environment.yml", "keys.py", "monkey", "config"),
        *("pem.py", "credentials.py", "docker/config.json", "aws/credentials.md", "tokenizer.json"),
    }
    for name in secret | harmless:
        make(tmp_path, **{name: "x"})
    (tmp_path / "link.pem").symlink_to("/etc/hostname")
    assert set(workdir.secrets(str(tmp_path), names(tmp_path))) == secret


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ({".clusterignore": "!ca.pem"}, ["key.pem"]),
        ({".clusterignore": "!/ca.pem"}, ["b/ca.pem", "key.pem"]),
        ({".clusterignore": "!*.pem"}, []),
        ({".clusterignore": "*.pem"}, []),
        ({".clusterignore": "!*.pem\nb/"}, []),
        ({"b/.clusterignore": "!ca.pem"}, ["ca.pem", "key.pem"]),
        (
            {".gitignore": "*.pem\n!ca.pem"},
            ["ca.pem", "b/ca.pem"],
        ),  # git may have it, which decides nothing here
        ({".gitignore": "*.pem", ".clusterignore": "!/ca.pem"}, []),
    ],
)
def test_clusterignore_decides_about_a_file_with_a_secret(tmp_path, rules, found):
    make(tmp_path, **{"ca.pem": "x", "b/ca.pem": "x", "key.pem": "x", **rules})
    assert sorted(workdir.secrets(str(tmp_path), names(tmp_path))) == sorted(found)
