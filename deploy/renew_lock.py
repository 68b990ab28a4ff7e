"""Rewrites the files of `lock/` from `pyproject.toml` and `constraints.txt`: `renew_lock.py [WHEEL …]`.

Run it after each change of one of these two files. uv asks PyPI for the hash of every file of every package. Versions
come from the constraints, those of CUDA's libraries from torch. Each WHEEL is a local file that PyPI lacks and the lock
allows: torch's CPU build. Its hash is kept until torch's version changes; compare a new hash with PyTorch's page.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

_UV = "uv==0.13.9"
_DEPLOY = Path(__file__).resolve().parent
LOCK = _DEPLOY / "lock"
_CUDA = re.compile(r"^(nvidia|cuda)-|^triton$")
_NAME = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)")

Locked = dict[str, tuple[str, frozenset[str]]]
"""Package name in lower case with dashes -> (version, SHA-256 of each of the package's files)."""


def read(text: str) -> Locked:
    """Parse a lock file."""
    locked: Locked = {}
    for entry in text.replace("\\\n", " ").splitlines():
        if found := _NAME.match(entry):
            hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
            locked[found[1].lower().replace("_", "-")] = (found[2], hashes)
    return locked


def written(locked: Locked) -> str:
    lines = []
    for name, (version, hashes) in sorted(locked.items()):
        lines.append(f"{name}=={version} \\\n" + " \\\n".join(f"    --hash=sha256:{sha}" for sha in sorted(hashes)))
    return "\n".join(lines) + "\n"


def locked_by(uv: Path, source: str | Path, *extras: str) -> Locked:
    """Return the packages on PyPI that `source` requires on Linux (x86-64).

    Args: source: a `pyproject.toml` or a file of requirements; extras: optional groups of the `pyproject.toml`.
    """
    command = [str(uv), "pip", "compile", str(source), "--no-config", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--constraint", str(_DEPLOY / "constraints.txt"), *(f"--extra={name}" for name in extras)]
    return read(subprocess.run(command, check=True, capture_output=True, text=True, cwd=_DEPLOY.parent).stdout)


def main(wheels: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", _UV], check=True)
        uv = Path(folder, "bin", "uv")
        everything = locked_by(uv, _DEPLOY.parent / "pyproject.toml", "dev")
        run = locked_by(uv, _DEPLOY.parent / "pyproject.toml", "data")
        more = {name: locked_by(uv, _DEPLOY.parent / "pyproject.toml", "dev", name) for name in ("study", "fuzz")}
        for name, wanted in (("build", "setuptools"), ("rated", "vadersentiment==3.3.2")):
            source = Path(folder, f"{name}.in")
            source.write_text(f"{wanted}\n")
            package = wanted.partition("==")[0]
            (LOCK / f"{name}.txt").write_text(written({package: locked_by(uv, source)[package]}))
    version, hashes = everything.pop("torch")
    former = read((LOCK / "torch.txt").read_text()) if (LOCK / "torch.txt").exists() else {}
    if former.get("torch", ("", frozenset()))[0] == version:
        hashes |= former["torch"][1]
    hashes |= {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    (LOCK / "torch.txt").write_text(written({"torch": (version, hashes)}))
    cuda = {name: entry for name, entry in everything.items() if _CUDA.match(name)}
    (LOCK / "cuda.txt").write_text(written(cuda))
    run = {name: entry for name, entry in run.items() if name in everything and name not in cuda}
    (LOCK / "run.txt").write_text(written(run))
    # Triton comes with CUDA's torch. The tests need it without CUDA too: there it interprets its kernels on the CPU.
    setup = {
        name: entry for name, entry in everything.items() if name not in run and (name not in cuda or name == "triton")
    }
    (LOCK / "setup.txt").write_text(written(setup))
    for extra, locked in more.items():
        own = {n: entry for n, entry in locked.items() if n not in everything and n != "torch"}
        (LOCK / f"{extra}.txt").write_text(written(own))


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
