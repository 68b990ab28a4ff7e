"""Benchmarks and soaks are run by hand, so nobody would notice that one has lost what it imports."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = [*sorted((HERE / "bench").glob("*.py")), *sorted((HERE / "soak").glob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_everything_that_it_imports_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclasses look
    spec.loader.exec_module(module)
    assert callable(module.main)
