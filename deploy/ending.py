"""Ends the process of a command."""

import os
import sys
from collections.abc import Callable


def run(app: Callable[..., object]) -> None:
    """Run the command. If background work is still running, exit without Python's teardown: LLVM, which may be
    compiling the search's kernels there, crashes when its memory is freed under it."""
    try:
        app(prog_name="shoal")
    except SystemExit as end:
        background = sys.modules.get("shoal.deploy.session.background")  # most commands never import it
        if background is not None and background.is_working():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
