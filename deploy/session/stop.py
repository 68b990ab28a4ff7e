"""Makes a peer leave on a signal or on `shoal leave`."""

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any, Final

from shoal.deploy.node.node import LEAVE_S

LEAVE_SOON_S: Final = 8.0
"""The time to leave after SIGTERM or SIGHUP: a container is killed after 10 s, and the goodbye takes time too."""


class Stop:
    """The stop request of one process.

    Ctrl-C drains: it ends the peer without losing work. SIGTERM (service stopped, machine going down) and SIGHUP
    (terminal closed, logout) drain with less time. A second Ctrl-C or SIGTERM, or one that comes before the peer takes
    part, cancels the main task at once.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.within_s = LEAVE_S
        self.takes_part = False
        self._by: signal.Signals | None = None
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
                loop.add_signal_handler(number, self._ask, number)

    def _ask(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            _forget_terminal()
            if self._by is not None:
                return  # a logout sends SIGHUP and SIGTERM
        if self._by == signal.SIGHUP and number == signal.SIGTERM:
            return
        if self.asked.is_set() or not self.takes_part:
            self._main.cancel()
        self._by = number
        self.within_s = LEAVE_S if number == signal.SIGINT else LEAVE_SOON_S
        self.asked.set()

    async def leave(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer `leave` on the control socket: stop as on Ctrl-C or, if argument `drains` is false, as on SIGTERM."""
        self._ask(signal.SIGINT if arguments.get("drains", True) else signal.SIGTERM)
        return {}


def _forget_terminal() -> None:
    """Redirect a closed terminal's streams to /dev/null: a failing write would end this peer with its state unsaved."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
