"""Keep out of memory what hivemind imports and we never use.

`import hivemind.p2p` first runs `hivemind/__init__.py`, which imports all of hivemind: its averager, its mixture of
experts, its optimizer, and scipy for them. Here the package stands in `sys.modules` without that file having run, so
that an import of one of its parts loads this part and what that needs itself.
"""

import importlib.util
import sys


def import_without_contents(name: str) -> None:
    """Make `name` a package that has submodules and nothing else. Nothing if it is loaded already or not installed."""
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    sys.modules[name] = importlib.util.module_from_spec(spec)


import_without_contents("hivemind")  # before anything here imports a part of it
