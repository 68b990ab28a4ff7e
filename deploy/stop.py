"""How a peer is told to leave: signals, and `shoal leave`."""

import asyncio
import signal
from collections.abc import Mapping
from typing import Any


class Stop:
    """Ctrl-C asks once for a drain; SIGTERM leaves without waiting for work in flight. A second signal is at once, and
    so is one that comes before we take part: the main task is cancelled.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.drains = True
        self.takes_part = False
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._ask, number)

    def _ask(self, number: signal.Signals) -> None:
        if self.asked.is_set() or not self.takes_part:
            self._main.cancel()
        self.drains = number == signal.SIGINT
        self.asked.set()

    async def leave(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The control socket's `leave`: like Ctrl-C, or like SIGTERM with `drains` false."""
        self._ask(signal.SIGINT if arguments.get("drains", True) else signal.SIGTERM)
        return {}
