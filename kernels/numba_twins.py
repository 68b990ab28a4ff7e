"""Loads the numba twins (compiled equivalents) of a folder's kernels in the background."""

import logging
import threading
from importlib import import_module
from types import ModuleType

logger = logging.getLogger(__name__)


class NumbaTwin:
    """Loads one module of numba kernels in a thread: importing numba takes a second, and compiling several seconds.

    Args: module: the module's name. Its function `prove` compiles all of its kernels and raises `RuntimeError` if a
        result differs from the reference's.
    """

    def __init__(self, module: str) -> None:
        self._name = module
        self.module: ModuleType | None = None
        """The loaded module; None: it is not loaded yet, or is unusable on this machine."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to load the module, unless loading has begun already."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name=f"load {self._name}", daemon=True)
                self._thread.start()

    def wait(self) -> ModuleType | None:
        """Load the module if necessary, wait for it, and return it; None: it is unusable on this machine."""
        self.start()
        assert self._thread is not None
        self._thread.join()
        return self.module

    def _load(self) -> None:
        try:
            module = import_module(self._name)
            module.prove()
        except Exception as error:  # a compiler may raise anything, and the reference does the same work, more slowly
            logger.warning("%s stays unused, which is slower: %s", self._name, f"{error}".strip().split("\n")[0])
            return
        self.module = module
