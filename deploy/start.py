"""The console script: Ctrl-C ends it without a traceback from its first import on, which takes the better part of a
second."""

import signal
import sys


def main() -> None:
    try:
        from shoal.deploy.cli import app

        app(prog_name="shoal")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
