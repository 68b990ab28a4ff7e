"""How the process of a command ends."""

import os
import sys
from collections.abc import Callable


def run(app: Callable[..., object]) -> None:
    """Run the command. Work in the background ends with it, and the process is not taken apart under that work: LLVM,
    which compiles the search's kernels there the first time, crashes where its memory goes before it is done.
    """
    try:
        app(prog_name="shoal")
    except SystemExit as end:
        background = sys.modules.get("shoal.deploy.session.background")  # most commands have no use for it
        if background is not None and background.is_working():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
