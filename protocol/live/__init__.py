"""The one place that talks to real networks and disks keeps out of memory what hivemind imports and we never use.

Three packages of hivemind import in their own files all that they have: `hivemind` its averager, its mixture of
experts, its optimizer, and scipy for them; `hivemind.dht` and `hivemind.utils` what hands tensors from one process to
another, and torch for it. A command that only asks a run something needs none of them, and torch alone takes two
seconds to import. Once this folder is imported, an import of one of the three makes a package without running its file,
so that an import of one of its parts loads this part and what that needs itself. What was loaded before stays as it is.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PART_OF: dict[str, dict[str, str]] = {
    "hivemind": {},
    "hivemind.dht": {},
    "hivemind.utils": {
        "MSGPackSerializer": "serializer",
        "SerializerBase": "serializer",
        "get_dht_time": "timed_storage",
        "get_logger": "logging",
    },
}
"""The packages, each with the names that other modules of hivemind import from it, and the part that has the name."""


class _WithoutContents(MetaPathFinder, Loader):
    """Finds the three packages and, instead of running their files, gives them the names of `_PART_OF`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _PART_OF else None
        if spec is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # a plain module

    def exec_module(self, module: ModuleType) -> None:
        package, part_of = module.__name__, _PART_OF[module.__name__]

        def find(name: str) -> object:
            if name not in part_of:
                raise AttributeError(f"{package} has no {name} here: {__name__} keeps its contents out of memory")
            return getattr(importlib.import_module(f"{package}.{part_of[name]}"), name)

        module.__getattr__ = find  # type: ignore[method-assign]


sys.meta_path.insert(0, _WithoutContents())  # before anything here imports a part of hivemind
