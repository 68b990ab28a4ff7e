"""The rules of the house that a machine can check, so that no reviewer has to.

Each rule is a function over parsed files that returns complaints, so that the second half of this file can show
each of them a small offender: a rule that cannot fail checks nothing.
"""

import ast
import fnmatch
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
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

PURE = re.compile(r"(^|[.!?]\s+)Pure[.;:,]")
"""The marker: a module whose docstring has a sentence `Pure.` decides and never acts (STYLE section 2)."""
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
ACTS = NOT_IN_A_CORE & {
    "asyncio",
    "concurrent",
    "hivemind",
    "multiprocessing",
    "select",
    "socket",
    "subprocess",
    "threading",
    "torch",
    "uvloop",
}
"""What no module imports that a core needs, however far away: it waits, runs in another thread, or computes on tensors.
(Modules of `protocol/` that a core needs may know of files: the spec and keys are read from them.)"""
HEADLESS = re.compile(
    r"\s*(Of|By|In|As|From|To|Since|Until|With|Without|Towards|After|Before|At|Among|Beside|On|For|Because|So|Whose|Whom"
    r"|Through|Around|Into|Once|While|Again)\b"
)
"""A docstring that begins with one of these is a fragment: what it hangs on stands elsewhere, or nowhere."""
LINES_MAX = 80_964
CONSTANTS_MAX = 797
"""Lines of the product, and numbers that its modules name. Lower these with every commit that makes them fewer;
a commit that raises one needs a sentence in a `DECISIONS.md`."""
TWO_MEANINGS: set[str] = set()
"""Names that public classes of two modules share. None may be added; what is renamed leaves this list."""
ARGUMENTS_MAX = 12
"""Arguments of a constructor. What needs more owns several things, or a group of its arguments has a name."""
TOO_WIDE: set[str] = set()
"""Constructors that were too wide when the rule was made. None may be added; what is mended leaves this list."""
IN_CIRCLES: set[tuple[str, str]] = set()
"""Import cycles that were there when the rule was made. None may be added; what is mended leaves this list."""
PICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Module:
    """One file. `path` is relative to the repository."""

    path: PurePosixPath
    text: str
    tree: ast.Module

    @property
    def house(self) -> str:
        return self.path.parts[0]

    @property
    def name(self) -> str:
        """`peer.replica.core`; a package is its folder."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_marked_pure(self) -> bool:
        return PURE.search(ast.get_docstring(self.tree) or "") is not None


def parse(path: str, text: str) -> Module:
    return Module(path=PurePosixPath(path), text=text, tree=ast.parse(text))


@cache
def modules(*folders: str) -> list[Module]:
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [parse(file.relative_to(ROOT).as_posix(), file.read_text()) for file in sorted(files)]


@cache
def imports(module: Module, *, typing: bool = True) -> list[tuple[str, int]]:
    """(dotted name, line) of everything imported; `from a import b` gives `a.b`, since b may be a module.

    `typing`: include what is imported for type checkers alone.
    """
    found: list[tuple[str, int]] = []
    waiting: list[ast.AST] = [module.tree]
    for node in waiting:
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            found += ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)
        elif typing or not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            waiting += ast.iter_child_nodes(node)
    return found


Graph = Mapping[str, set[str]]
"""The name of a module of ours -> those that it imports."""


def graph_of(found: Iterable[Module], *, typing: bool) -> Graph:
    found = list(found)
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for module in found:
        for imported, _ in imports(module, typing=typing):
            name = imported.removeprefix("shoal.")
            while name and name not in names:
                name = name.rpartition(".")[0]
            if name and name != module.name:
                graph[module.name].add(name)
    return graph


def reached(graph: Graph, start: str) -> dict[str, str]:
    """Every module that `start` needs -> the one that imports it, on one of the ways there."""
    by: dict[str, str] = {}
    waiting = [start]
    for name in waiting:
        for imported in sorted(graph[name]):
            if imported not in by and imported != start:
                by[imported] = name
                waiting.append(imported)
    return by


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return ""


# --- the rules ---


def cores(found: Iterable[Module]) -> list[Module]:
    """The modules that must be pure: marked ones, each `core.py`, and whatever of its own house such a module needs.

    So a part behind a core is checked whatever its name is and whatever its docstring says.
    """
    found = list(found)
    of_name = {module.name: module for module in found}
    graph = graph_of(found, typing=False)
    names = {module.name for module in found if module.is_marked_pure or module.path.name == "core.py"}
    for name in tuple(names):
        house = of_name[name].house
        if house != "protocol":  # what reads keys and run files there is needed for their types
            names |= {needed for needed in reached(graph, name) if of_name[needed].house == house}
    return [of_name[name] for name in sorted(names)]


def impure(module: Module) -> Iterator[str]:
    for name, line in imports(module, typing=False):
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


def impure_cores(found: Iterable[Module]) -> Iterator[str]:
    for module in cores(found):
        yield from impure(module)


@cache
def acts(module: Module) -> bool:
    """Whether it imports what waits or computes, or has an `async def` that is more than a declaration (a port)."""
    if any(name.split(".")[0] in ACTS for name, _ in imports(module, typing=False)):
        return True
    functions = (node for node in ast.walk(module.tree) if isinstance(node, ast.AsyncFunctionDef))
    return any(isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor) for f in functions for node in ast.walk(f))


def cores_that_need_actors(found: Iterable[Module]) -> Iterator[str]:
    found = list(found)
    of_name = {module.name: module for module in found}
    graph = graph_of(found, typing=False)
    for core in cores(found):
        for needed, by in reached(graph, core.name).items():
            if acts(of_name[needed]):
                yield f"{core.path}: a core that needs {needed}, which acts (imported by {by})"


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Groups of modules of which each needs each other one, sorted."""
    needs = {name: set(reached(graph, name)) for name in graph}
    found = {tuple(sorted({name} | {other for other in needs[name] if name in needs[other]})) for name in graph}
    return sorted(circle for circle in found if len(circle) > 1)


def import_circles(found: Iterable[Module]) -> Iterator[str]:
    for circle in circles(graph_of(found, typing=True)):
        if circle not in IN_CIRCLES:
            yield f"these modules import each other: {', '.join(circle)}"


def folder_circles(found: Iterable[Module]) -> Iterator[str]:
    """Folders that import each other, a folder and its parent too."""
    found = list(found)
    folder = {module.name: module.path.parent.as_posix() for module in found}
    graph: dict[str, set[str]] = {name: set() for name in folder.values()}
    for name, needed in graph_of(found, typing=True).items():
        graph[folder[name]] |= {folder[other] for other in needed} - {folder[name]}
    for circle in circles(graph):
        yield f"these folders import each other: {', '.join(circle)}"


def public_classes(found: Iterable[Module]) -> Mapping[str, list[str]]:
    """Name -> the modules that define a class of it."""
    where: dict[str, list[str]] = {}
    for module in found:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(module.path.as_posix())
    return where


def two_meanings(found: Iterable[Module]) -> Iterator[str]:
    for name, paths in public_classes(found).items():
        if len(paths) > 1 and name not in TWO_MEANINGS:
            yield f"{name} means {len(paths)} things: {', '.join(paths)}"


def numbers_of(module: Module) -> Iterator[str]:
    """The names of a module that stand for a number."""
    for node in module.tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if (
            isinstance(target, ast.Name)
            and value is not None
            and all(
                isinstance(part, ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
                or (isinstance(part, ast.Constant) and type(part.value) in (int, float))
                for part in ast.walk(value)
            )
        ):
            yield target.id


def is_dataclass(node: ast.ClassDef) -> bool:
    decorators = (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list)
    return any(dotted(decorator).split(".")[-1] == "dataclass" for decorator in decorators)


def arguments(node: ast.ClassDef) -> int:
    """How many arguments its constructor takes.

    A msgspec struct is counted as none: its fields are those of a message or a file, and a decoder fills them in.
    """
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            taken = part.args
            return len(taken.posonlyargs) + len(taken.args) - 1 + len(taken.kwonlyargs)
    if not is_dataclass(node) and "NamedTuple" not in map(dotted, node.bases):
        return 0
    fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    return sum("ClassVar" not in field and "init=False" not in field for field in fields)


def wide_constructors(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and module.house in HOUSES and arguments(node) > ARGUMENTS_MAX:
            yield f"{module.name}.{node.name}"


def too_wide(module: Module) -> Iterator[str]:
    for name in wide_constructors(module):
        if name not in TOO_WIDE:
            yield f"{module.path}: the constructor of {name} takes more than {ARGUMENTS_MAX} arguments"


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


def headless_docstring(module: Module) -> Iterator[str]:
    """A string that stands by itself is a docstring: of a module, a class, a function, a field or a constant."""
    if module.house not in HOUSES:
        return
    strings = (node.value for node in ast.walk(module.tree) if isinstance(node, ast.Expr))
    for node in strings:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := HEADLESS.match(node.value)):
            yield f"{module.path}:{node.lineno}: a docstring without a subject or a verb begins with {found[1]!r}"


Rule = Callable[[Module], Iterator[str]]
RULES: list[Rule] = [wrong_direction, hivemind_outside_live, unpickles, too_wide, headless_docstring]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule: Rule) -> None:
    complaints = [complaint for module in modules(*HOUSES, "tests") for complaint in rule(module)]
    assert not complaints, "\n".join(complaints)


HouseRule = Callable[[Iterable[Module]], Iterator[str]]
HOUSE_RULES: list[HouseRule] = [impure_cores, cores_that_need_actors, import_circles, folder_circles, two_meanings]


@pytest.mark.parametrize("rule", HOUSE_RULES, ids=lambda rule: rule.__name__)
def test_all_files_together_keep(rule: HouseRule) -> None:
    complaints = list(rule(modules(*HOUSES)))
    assert not complaints, "\n".join(complaints)


def test_what_is_mended_leaves_the_lists() -> None:
    found = modules(*HOUSES)
    wide = {name for module in found for name in wide_constructors(module)}
    assert wide >= TOO_WIDE, f"no longer too wide: take {sorted(TOO_WIDE - wide)} off the list"
    mended = IN_CIRCLES - set(circles(graph_of(found, typing=True)))
    assert not mended, f"no longer in a circle: take {sorted(mended)} off the list"
    renamed = TWO_MEANINGS - {name for name, paths in public_classes(found).items() if len(paths) > 1}
    assert not renamed, f"of one meaning now: take {sorted(renamed)} off the list"


def test_the_product_only_shrinks() -> None:
    found = modules(*HOUSES)
    lines = sum(module.text.count("\n") for module in found)
    constants = sum(1 for module in found for _ in numbers_of(module))
    assert (lines <= LINES_MAX, constants <= CONSTANTS_MAX) == (True, True), f"{lines} lines, {constants} constants"


OFFENDERS = [
    (wrong_direction, "peer/driver.py", "from shoal.coordinator import core"),
    (wrong_direction, "peer/driver.py", "from shoal import coordinator"),
    (wrong_direction, "coordinator/driver.py", "import shoal.peer.compute.probe"),
    (wrong_direction, "protocol/plan.py", "from shoal.deploy.node.node import Node"),
    (wrong_direction, "kernels/x.py", "from shoal.protocol import limits"),
    (wrong_direction, "tests/test_x.py", "from protocol.limits import PEERS_MAX"),
    (wrong_direction, "peer/x.py", "from .model import Decoder"),
    (hivemind_outside_live, "peer/driver.py", "from hivemind.p2p import P2P"),
    (unpickles, "peer/disk/snapshot.py", "import pickle"),
    (unpickles, "peer/disk/snapshot.py", "import torch\ntorch.load('x')"),
    (too_wide, "peer/x.py", f"class A:\n def __init__(self, {', '.join('abcdefg')}, *, {', '.join('hijklm')}): ..."),
    (too_wide, "peer/x.py", "@dataclass(slots=True)\nclass A:\n" + "".join(f" {c}: int\n" for c in "abcdefghijklm")),
    (too_wide, "peer/x.py", "class A(NamedTuple):\n" + "".join(f" {c}: int\n" for c in "abcdefghijklm")),
    (headless_docstring, "protocol/x.py", '"""By its last word, and there."""'),
    (headless_docstring, "protocol/x.py", 'class A:\n b: int\n """Of the sender."""'),
]


@pytest.mark.parametrize(("rule", "path", "text"), OFFENDERS)
def test_an_offender_is_seen(rule: Rule, path: str, text: str) -> None:
    assert list(rule(parse(path, text)))


INNOCENTS = [
    (wrong_direction, "peer/x.py", "from shoal.kernels.optimizer import reference"),
    (hivemind_outside_live, "protocol/live/x.py", "import hivemind"),
    (too_wide, "peer/x.py", "@dataclass\nclass A:\n" + "".join(f" {c}: int\n" for c in "abcdefghijkl")),
    (headless_docstring, "protocol/x.py", 'class A:\n b: int\n """The number of the sender\'s frame."""'),
    (too_wide, "protocol/x.py", "class A(Struct):\n" + "".join(f" {c}: int\n" for c in "abcdefghijklm")),
]


@pytest.mark.parametrize(("rule", "path", "text"), INNOCENTS)
def test_an_innocent_is_left_alone(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(parse(path, text)))


def house_of(files: Mapping[str, str]) -> list[Module]:
    return [parse(path, text) for path, text in files.items()]


MARKED = '"""What is decided. Pure."""\n'
CORE = {"peer/core.py": "from shoal.peer import book"}
"""A core with a part that bears no mark."""
HOUSE_OFFENDERS = [
    (impure_cores, {"peer/core.py": "import time"}),
    (impure_cores, {"peer/core.py": "async def f(): ..."}),
    (impure_cores, {"peer/replica/core.py": "from asyncio import Queue"}),
    (impure_cores, {"coordinator/chain.py": MARKED + "import random\nx = random.random()"}),
    (impure_cores, {"coordinator/chain.py": MARKED + "from random import choice"}),
    (impure_cores, {"coordinator/chain.py": '"""Links. Pure; the driver keeps them."""\nopen("x")'}),
    (impure_cores, CORE | {"peer/book.py": "import time"}),
    (impure_cores, {"peer/core.py": "def f():\n from shoal.peer.book import Book", "peer/book.py": "import os"}),
    (cores_that_need_actors, CORE | {"peer/book.py": "import torch"}),
    (
        cores_that_need_actors,
        {
            "peer/core.py": "from shoal.protocol.calls import ask",
            "protocol/calls.py": "async def ask(peer):\n return await peer()",
        },
    ),
    (import_circles, {"peer/a.py": "import shoal.peer.b", "peer/b.py": "from shoal.peer import a"}),
    (
        import_circles,
        {
            "peer/a.py": "from shoal.peer.b import B",
            "peer/b.py": "from shoal.peer.c import C",
            "peer/c.py": "if TYPE_CHECKING:\n from shoal.peer.a import A",
        },
    ),
    (import_circles, {"peer/a.py": "import shoal.peer.b", "peer/b.py": "def f():\n from shoal.peer.a import A"}),
    (
        folder_circles,
        {
            "peer/x/a.py": "from shoal.peer.b import B",
            "peer/b.py": "",
            "peer/c.py": "from shoal.peer.x.d import D",
            "peer/x/d.py": "",
        },
    ),
    (two_meanings, {"peer/a.py": "class Seat: ...", "deploy/b.py": "class Seat: ..."}),
]


@pytest.mark.parametrize(("rule", "files"), HOUSE_OFFENDERS)
def test_offenders_together_are_seen(rule: HouseRule, files: dict[str, str]) -> None:
    assert list(rule(house_of(files)))


HOUSE_INNOCENTS = [
    (impure_cores, {"peer/core.py": "import random\ndef f(rng: random.Random) -> float: return rng.random()"}),
    (impure_cores, {"peer/driver.py": '"""A pure function of its seed."""\nimport asyncio, time'}),
    (impure_cores, CORE | {"peer/book.py": "if TYPE_CHECKING:\n from pathlib import Path"}),
    (impure_cores, {"peer/core.py": "from shoal.protocol import keys", "protocol/keys.py": "import os"}),
    (cores_that_need_actors, CORE | {"peer/book.py": "class Port(Protocol):\n async def call(self) -> None: ..."}),
    (import_circles, {"peer/a.py": "import shoal.peer.b", "peer/b.py": "import shoal.peer.c", "peer/c.py": ""}),
]


@pytest.mark.parametrize(("rule", "files"), HOUSE_INNOCENTS)
def test_innocents_together_are_left_alone(rule: HouseRule, files: dict[str, str]) -> None:
    assert not list(rule(house_of(files)))


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
