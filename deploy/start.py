"""The console script. Its first import takes most of a second; Ctrl-C ends it without a traceback even then."""

import signal
import sys


def main() -> None:
    try:
        from shoal.deploy.cli import app
        from shoal.deploy.ending import run

        run(app)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
