"""Keep out of memory what hivemind imports and we never use.

`import hivemind` brings in `scipy.optimize` for the load balancing of its averager, which we do not run: 44 MB and
0.2 s in every peer. Here it becomes a module that loads when somebody first uses it, and nobody does. (The standard
library's `LazyLoader` does not do: a second `import` statement reads `__spec__`, and that already loads it.)
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    """Stands in `sys.modules` until an attribute is asked for that an unloaded module has not."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system, looking around
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def import_lazily(name: str) -> None:
    """Make `import name` cheap until the module is used. Nothing if it is loaded already or not installed."""
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    sys.modules[name] = module = _Deferred(name)
    module.__spec__ = spec
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), child, module)
