"""Tells a peer to leave, by signals and by `shoal leave`."""

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any, Final

from shoal.deploy.node import LEAVE_S

LEAVE_SOON_S: Final = 8.0
"""How long a peer has after SIGTERM or SIGHUP: a container is killed after 10 s, and the good-bye takes time too."""


class Stop:
    """Ctrl-C asks once for an end without loss. So do SIGTERM (a service is stopped, the machine goes down) and SIGHUP
    (the terminal is closed, the user logs out), with less time. Ctrl-C or SIGTERM again is at once, and so is one that
    comes before we take part: the main task is cancelled.
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
            if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
                loop.add_signal_handler(number, self._ask, number)

    def _ask(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            _forget_terminal()
            if self._by is not None:
                return  # a logout sends both
        if self._by == signal.SIGHUP and number == signal.SIGTERM:
            return
        if self.asked.is_set() or not self.takes_part:
            self._main.cancel()
        self._by = number
        self.within_s = LEAVE_S if number == signal.SIGINT else LEAVE_SOON_S
        self.asked.set()

    async def leave(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The control socket's `leave`: like Ctrl-C, or like SIGTERM with `drains` false."""
        self._ask(signal.SIGINT if arguments.get("drains", True) else signal.SIGTERM)
        return {}


def _forget_terminal() -> None:
    """What is written to a terminal that is gone fails, and would end us before our state is saved."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
