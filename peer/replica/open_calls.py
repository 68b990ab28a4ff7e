"""Remote calls that a core answers later. Each call has a number, which the core's command `Answer` names."""

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shoal.peer.replica.commands import Answer
from shoal.protocol.errors import Refused

A = TypeVar("A", bound=msgspec.Struct)


class OpenCalls:
    """The calls that wait for one core's answer."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[msgspec.Struct]] = {}

    async def answered(self, kind: type[A], begin: Callable[[int], None]) -> A:
        """Give a call a number, begin it, and wait for the core's answer. Args: begin: passes the call, with its
        number, to the core.
        Raises: whatever `begin` raises; Refused: the call will not be answered."""
        call = next(self._numbers)
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        try:
            begin(call)
            reply = await answer
        finally:
            del self._answers[call]
        assert isinstance(reply, kind), f"a call was answered with {reply}"
        return reply

    def answer(self, command: Answer) -> None:
        """Pass the core's answer to its caller, unless the caller has stopped waiting."""
        answer = self._answers.get(command.call)
        if answer is not None and not answer.done():
            answer.set_result(command.message)

    def refuse(self, refusal: Refused) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(refusal)
