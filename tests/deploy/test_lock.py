import re
import tomllib
from pathlib import Path

import pytest

from shoal.deploy.renew_lock import LOCK, read, written

ROOT = Path(__file__).parents[2]
FILES = ("build", "run", "setup", "torch", "cuda", "study", "rated", "fuzz")


def locked(name: str) -> dict[str, tuple[str, frozenset[str]]]:
    return read((LOCK / f"{name}.txt").read_text())


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-") for line in requirements}


@pytest.mark.parametrize("name", FILES)
def test_every_locked_package_has_a_version_and_hashes(name: str) -> None:
    text = (LOCK / f"{name}.txt").read_text()
    found = read(text)
    assert found
    assert all(hashes for _, hashes in found.values())
    assert written(found) == text, "renew_lock.py would write it another way"


def test_the_lock_has_what_the_constraints_say_and_nothing_else() -> None:
    lines = [line for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines() if "==" in line]
    versions = {name: line.rpartition("==")[2] for line in lines for name in names([line])}
    found = {
        name: version
        for file in ("run", "setup", "torch", "study", "fuzz")
        for name, (version, _) in locked(file).items()
    }
    found.pop("pip", None)
    assert found == versions
    assert locked("build")["setuptools"] == locked("run")["setuptools"]


def test_whatever_the_project_asks_for_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert names([*project["dependencies"], *extras["data"]]) <= {*locked("run"), *locked("torch")}
    assert names(extras["dev"]) <= {*locked("run"), *locked("setup")}
    assert names(extras["study"]) <= {*locked("run"), *locked("setup"), *locked("study")}


INSTALLING = ("Makefile", "deploy/lock/install.sh", "deploy/docker/Dockerfile.cpu", "deploy/docker/Dockerfile.cuda")
INSTALLING += ("deploy/cloud-init/user-data.yaml",)


@pytest.mark.parametrize("path", INSTALLING)
def test_nothing_is_taken_from_an_index_without_its_hash(path: str) -> None:
    text = (ROOT / path).read_text().replace("\\\n", " ")
    lines = [part.strip() for line in text.splitlines() for part in line.split("&&")]
    installs = [line for line in lines if re.search(r"pip (install|download)", line) and not line.startswith("#")]
    assert installs
    for line in installs:
        fetches_torch = "pip download" in line and line.endswith('-c "$lock/../constraints.txt" torch')
        ours = re.search(r"--no-deps --no-build-isolation (-e )?(\.|/opt/shoal)\W*$", line)
        assert "--require-hashes" in line or fetches_torch or ours, line
    if "deploy/lock/" not in path:
        assert "deploy/lock/install.sh" in text


def test_both_builds_of_torch_may_be_installed() -> None:
    (hashes,) = (hashes for _, hashes in locked("torch").values())
    cpu_build = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    assert cpu_build in hashes
    assert len(hashes) > 1
    assert all(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in locked("cuda"))
    assert locked("cuda")["triton"] == locked("setup")["triton"]
