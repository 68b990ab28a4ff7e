"""Does the working tree still do what a commit did? Plays both on this machine and compares; run by `make oracle`.

    oracle.py [BASE] [--only SECTION[/CASE] ...] [--cases 2] [--jobs 2]

`record.py` says what is played. The commit is played in a worktree of its own, by its own recorder if it has one: so a
change of what is played travels alone. Where a section differs, the first case that does is played again event by
event. The exit status is 1 if anything differs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import Record, compare, difference

TREE = Path(__file__).resolve().parents[2]
FOLDER = Path("tests") / "oracle"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="HEAD")
    parser.add_argument("--only", nargs="+", metavar="SECTION[/CASE]", default=[])
    parser.add_argument("--cases", type=int, help="the first so many of each section")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="of both commits together")
    asked = parser.parse_args()
    arguments = ["--jobs", str(max(1, asked.jobs // 2))]
    arguments += ["--only", *asked.only] if asked.only else []
    arguments += ["--cases", str(asked.cases)] if asked.cases else []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        _git("worktree", "add", "--quiet", "--detach", str(base), asked.base)
        try:
            if not (base / FOLDER).exists():
                shutil.copytree(TREE / FOLDER, base / FOLDER)
            return _tell(base, arguments)
        finally:
            _git("worktree", "remove", "--force", str(base))


def _tell(base: Path, arguments: list[str]) -> int:
    sections = compare(*_play(base, *arguments))
    for section in sections:
        sys.stdout.write(f"{section}\n")
        if section.differing and " has it" not in section.where:
            where = _in_full(base, section.name, section.differing[0])
            sys.stdout.write(f"  event by event: {where}\n" if where != section.where else "")
    return int(any(section.differing for section in sections))


def _in_full(base: Path, section: str, case: str) -> str:
    records = _play(base, "--full", "--only", f"{section}/{case}")
    return difference(*(record.cases[section][case] for record in records)) or "equal, so it does not play twice alike"


def _play(base: Path, *arguments: str) -> tuple[Record, Record]:
    """Play the commit and the working tree side by side."""
    playing = []
    for tree, out in ((base, base.parent / "before"), (TREE, base.parent / "after")):
        # The namespace of `.typing` comes before the editable install, which is that of one tree only.
        environment = os.environ | {"PYTHONPATH": str(tree / ".typing"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(tree / FOLDER / "record.py"), str(out), *arguments]
        playing.append((subprocess.Popen(command, cwd=tree, env=environment), out))
    if any(code != 0 for code in [process.wait() for process, _ in playing]):
        raise SystemExit("a recorder broke down: see above")
    before, after = (Record(out.read_bytes().splitlines()) for _, out in playing)
    return before, after


def _git(*words: str) -> None:
    if subprocess.run(["git", "-C", str(TREE), *words]).returncode != 0:
        raise SystemExit("git could not: see above")


if __name__ == "__main__":
    sys.exit(main())
