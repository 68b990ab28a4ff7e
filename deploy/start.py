"""Starts and ends the process of a command. The console script is `main`: its imports take most of a second, and Ctrl-C
ends it without a traceback even then."""

import io
import os
import signal
import sys
from collections.abc import Callable


def main() -> None:
    try:
        _speak_utf8()
        from shoal.deploy.cli import app

        run(app)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _speak_utf8() -> None:
    """Use UTF-8 for names and files whatever the locale is: restart Python in UTF-8 mode if necessary."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for our children
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path that is not UTF-8 can still be named


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
