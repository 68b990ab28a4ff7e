"""Real networks and disks: the one package that imports hivemind, and only the parts of it that we use.

`hivemind`, `hivemind.dht` and `hivemind.utils` import everything that they have (averager, mixture of experts,
optimizer, tensor transport), and with it scipy and torch. A command that only asks a run something needs none of that,
and torch alone takes two seconds to import. Once this package is imported, importing one of the three makes an empty
package without running its `__init__.py`, so an import of a submodule loads only what that submodule needs. Packages
that are already loaded stay as they are.
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
"""Package -> name that other modules of hivemind import from it -> submodule that has the name."""


class _WithoutContents(MetaPathFinder, Loader):
    """Find the three packages and give them the names of `_PART_OF` instead of running their files."""

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
