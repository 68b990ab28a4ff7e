"""The console script `shoal`. Ctrl-C ends it without a traceback, even during imports, which take most of a second."""

import io
import os
import signal
import sys


def main() -> None:
    try:
        _speak_utf8()
        from shoal.deploy.cli import app, run

        run(app)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _speak_utf8() -> None:
    """Use UTF-8 for file names and text, whatever the locale: restart Python in UTF-8 mode if necessary."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for our children
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path that is not UTF-8 can still be named
