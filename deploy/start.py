"""The console script. Its first import takes most of a second; Ctrl-C ends it without a traceback even then."""

import signal
import sys


def main() -> None:
    try:
        from shoal.deploy.cli import app

        app(prog_name="shoal")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
