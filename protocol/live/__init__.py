"""Implements the ports on real networks and disks. Only this package imports hivemind, and only the parts it needs.

`hivemind`, `hivemind.dht` and `hivemind.utils` import all their submodules (averager, mixture of experts, optimizer,
tensor transport), and with these scipy and torch. A command that only asks a run something needs none of them, and
torch alone takes two seconds to import. So after this package is imported, importing one of these packages makes an
empty package and does not run its `__init__.py`: importing a submodule then loads only what that submodule needs.
Packages that were loaded earlier stay as they are.
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
"""Package -> (name that other hivemind modules import from the package -> the submodule that defines this name)."""


class _WithoutContents(MetaPathFinder, Loader):
    """Imports three hivemind packages without running their files, and adds the names in `_PART_OF`."""

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


sys.meta_path.insert(0, _WithoutContents())  # before any import of hivemind here
