"""The rules of the house that a machine can check, so that no reviewer has to.

Each rule is a function over parsed files that returns complaints, so that the second half of this file can show
each of them a small offender: a rule that cannot fail checks nothing.
"""

import ast
import fnmatch
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
HOUSES = ("kernels", "protocol", "coordinator", "peer", "deploy")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "protocol": {"protocol", "kernels"},
    "coordinator": {"coordinator", "protocol"},
    "peer": {"peer", "protocol", "kernels"},
    "deploy": {*HOUSES},
}
ALLOWED_AT_TOP = {*HOUSES, "tests", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"}

CORE_NAMES = {
    "core.py",
    "window.py",
    "control.py",
    "commits.py",
    "election.py",
    "chain.py",
    "roster.py",
    "governor.py",
    "proposal.py",
    "proposer.py",
    "succession.py",
    "voter.py",
    "watch.py",
    "follower.py",
    "tenure.py",
    "suspects.py",
    "patience.py",
    "planning.py",
    "reports.py",
    "greedy.py",
    "cost.py",
    "ledger.py",
    "schedule.py",
    "routing.py",
    "partition.py",
    "depth.py",
    "plan.py",
    "messages.py",
}
"""Files that decide and never act (STYLE section 2), whatever folder they are in."""
NOT_IN_A_CORE = {
    "asyncio",
    "concurrent",
    "datetime",
    "hivemind",
    "multiprocessing",
    "os",
    "pathlib",
    "secrets",
    "select",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "torch",
    "uuid",
    "uvloop",
}
PICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file. `path` is relative to the repository."""

    path: PurePosixPath
    text: str
    tree: ast.Module

    @property
    def house(self) -> str:
        return self.path.parts[0]


def parse(path: str, text: str) -> Module:
    return Module(path=PurePosixPath(path), text=text, tree=ast.parse(text))


def modules(*folders: str) -> list[Module]:
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [parse(file.relative_to(ROOT).as_posix(), file.read_text()) for file in sorted(files)]


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported; `from a import b` gives `a.b`, since b may be a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return ""


# --- the rules ---


def impure_core(module: Module) -> Iterator[str]:
    is_command = module.path.parts[:2] == ("deploy", "commands")  # named after what is typed, such as `plan`
    if module.path.name not in CORE_NAMES or module.house == "tests" or is_command:
        return
    for name, line in imports(module):
        if name.split(".")[0] in NOT_IN_A_CORE:
            yield f"{module.path}:{line}: a core imports {name}"
        if name.startswith("random.") and name != "random.Random":
            yield f"{module.path}:{line}: a core imports {name}: pass a random.Random in"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncWith | ast.AsyncFor):
            yield f"{module.path}:{node.lineno}: a core is synchronous"
        if isinstance(node, ast.Attribute) and dotted(node).startswith("random.") and dotted(node) != "random.Random":
            yield f"{module.path}:{node.lineno}: a core uses the process-wide {dotted(node)}"
        if isinstance(node, ast.Call) and dotted(node.func) in ("open", "print", "input"):
            yield f"{module.path}:{node.lineno}: a core calls {dotted(node.func)}"


def wrong_direction(module: Module) -> Iterator[str]:
    allowed = MAY_IMPORT.get(module.house)
    for name, line in imports(module):
        parts = name.split(".")
        if name.startswith("."):
            yield f"{module.path}:{line}: a relative import; write shoal.…"
        elif parts[0] in HOUSES:
            yield f"{module.path}:{line}: imports {name} in its short form, which makes a second copy; write shoal.…"
        elif allowed is not None and parts[0] == "shoal" and not set(parts[1:2]) <= allowed:
            yield f"{module.path}:{line}: {module.house} imports {name}"


def hivemind_outside_live(module: Module) -> Iterator[str]:
    if module.house in HOUSES and module.path.parts[:2] != ("protocol", "live"):
        for name, line in imports(module):
            if name.split(".")[0] == "hivemind":
                yield f"{module.path}:{line}: only protocol/live imports hivemind"


def unpickles(module: Module) -> Iterator[str]:
    for name, line in imports(module):
        if name.split(".")[0] in PICKLE or name in ("torch.load", "torch.save"):
            yield f"{module.path}:{line}: imports {name}: nothing is ever unpickled"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("torch.load", "torch.save", "np.load", "numpy.load"):
            yield f"{module.path}:{node.lineno}: calls {dotted(node.func)}, which unpickles: use safetensors"


Rule = Callable[[Module], Iterator[str]]
RULES: list[Rule] = [impure_core, wrong_direction, hivemind_outside_live, unpickles]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule: Rule) -> None:
    complaints = [complaint for module in modules(*HOUSES, "tests") for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


OFFENDERS = [
    (impure_core, "peer/core.py", "import time"),
    (impure_core, "peer/core.py", "from asyncio import Queue"),
    (impure_core, "peer/core.py", "async def f(): ..."),
    (impure_core, "coordinator/chain.py", "import random\nx = random.random()"),
    (impure_core, "coordinator/chain.py", "from random import choice"),
    (impure_core, "coordinator/chain.py", "open('x')"),
    (wrong_direction, "peer/driver.py", "from shoal.coordinator import core"),
    (wrong_direction, "peer/driver.py", "from shoal import coordinator"),
    (wrong_direction, "coordinator/driver.py", "import shoal.peer.probe"),
    (wrong_direction, "protocol/plan.py", "from shoal.deploy.node import Node"),
    (wrong_direction, "kernels/x.py", "from shoal.protocol import limits"),
    (wrong_direction, "tests/test_x.py", "from protocol.limits import PEERS_MAX"),
    (wrong_direction, "peer/x.py", "from .model import Decoder"),
    (hivemind_outside_live, "peer/driver.py", "from hivemind.p2p import P2P"),
    (unpickles, "peer/snapshot.py", "import pickle"),
    (unpickles, "peer/snapshot.py", "import torch\ntorch.load('x')"),
]


@pytest.mark.parametrize(("rule", "path", "text"), OFFENDERS)
def test_an_offender_is_seen(rule: Rule, path: str, text: str) -> None:
    assert list(rule(parse(path, text)))


INNOCENTS = [
    (impure_core, "peer/core.py", "import random\ndef f(rng: random.Random) -> float: return rng.random()"),
    (impure_core, "peer/driver.py", "import asyncio, time"),
    (impure_core, "deploy/commands/plan.py", "from pathlib import Path"),
    (wrong_direction, "peer/x.py", "from shoal.kernels.optimizer import reference"),
    (hivemind_outside_live, "protocol/live/x.py", "import hivemind"),
]


@pytest.mark.parametrize(("rule", "path", "text"), INNOCENTS)
def test_an_innocent_is_left_alone(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(parse(path, text)))


# --- the packages and the top level ---


def packages() -> list[Path]:
    return [file.parent for house in HOUSES for file in sorted((ROOT / house).rglob("__init__.py"))]


def test_shipped_packages_are_the_folders() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"shoal." + ".".join(folder.relative_to(ROOT).parts) for folder in packages()}
    assert set(config["packages"]) == found
    assert config["package-dir"] == {f"shoal.{house}": house for house in HOUSES}


def test_code_is_in_a_package() -> None:
    stray = {file.parent for house in HOUSES for file in (ROOT / house).rglob("*.py")} - set(packages())
    assert not stray, "folders with Python files but no __init__.py are missing from the wheel"


def test_every_package_is_typed_and_has_a_readme() -> None:
    for folder in packages():
        assert (folder / "py.typed").is_file(), f"{folder.relative_to(ROOT)} has no py.typed"
        assert (folder / "README.md").is_file(), f"{folder.relative_to(ROOT)} has no README.md"


def test_type_checkers_find_every_house() -> None:
    assert {link.name for link in (ROOT / ".typing" / "shoal").iterdir()} == set(HOUSES)
    for house in HOUSES:
        assert (ROOT / ".typing" / "shoal" / house).resolve() == (ROOT / house).resolve()


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), "two test_core.py would collide"


def test_top_level_holds_only_what_it_may() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    names = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".")}
    names -= {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in ignored)}
    assert names <= ALLOWED_AT_TOP, sorted(names - ALLOWED_AT_TOP)
    assert names >= ALLOWED_AT_TOP, sorted(ALLOWED_AT_TOP - names)


def test_every_dependency_is_pinned_once() -> None:
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
    assert all("==" in pin and "+" not in pin for pin in pins)
    assert len(set(names)) == len(names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"]}.union(*project["optional-dependencies"].values())
    assert wanted <= set(names), sorted(wanted - set(names))
