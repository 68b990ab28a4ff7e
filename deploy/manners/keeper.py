"""Applies the owner's limits to a running peer: observes the machine, pauses the peer, and resumes it."""

import asyncio
import datetime
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from shoal.deploy.control.control_socket import ControlServer
from shoal.deploy.manners.core import Manners, Seen
from shoal.deploy.manners.limits import AT_ONCE, Limits
from shoal.deploy.manners.watching import ProcessorUse, gpu_others_share, input_idle_s
from shoal.deploy.record import report
from shoal.peer.membership.pausing import Pausing

logger = logging.getLogger(__name__)

LOOK_S = 5.0
_OWNER = "owner"
_TERMINAL = "terminal"
_OWNERS_WORD = "you asked for it (`shoal resume` ends it)"
PAUSED: Final = "paused"
"""The name of a file in a peer's folder that exists while the owner's pause lasts."""


class Keeper:
    """Applies the limits to one peer, from `start` to `close`.

    Args:
        say: prints a sentence for a person.
        look: observes the machine; blocks.
        kept: the path of `PAUSED`, which keeps the owner's pause across a restart; None: a restart ends the pause.
        run_blocking: runs `look` outside the event loop.
        reread: returns the limits as they are set now. Raises: LocalError: the settings cannot be read.
        apply_upload: sets the limit on sending, in bytes/s.
    """

    def __init__(
        self,
        limits: Limits,
        pausing: Pausing,
        *,
        say: Callable[[str], None],
        look: Callable[[], Seen],
        kept: Path | None = None,
        run_blocking: Callable[[Callable[[], Seen]], Awaitable[Seen]] = asyncio.to_thread,
        reread: Callable[[], Limits] = Limits,
        apply_upload: Callable[[float], None] = lambda bytes_per_s: None,
    ) -> None:
        self._manners = Manners(limits=limits)
        self._pausing = pausing
        self._say = say
        self._look = look
        self._run_blocking = run_blocking
        self._reread, self._apply_upload = reread, apply_upload
        self._kept = kept
        self._is_started = False
        self._told: tuple[str, ...] = ()
        self._warned: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why the peer does not compute now; empty: it may."""
        return self._manners.reasons(now_s=asyncio.get_running_loop().time())

    def report(self) -> report.LimitsNow:
        """Return the present limits for displays."""
        return report.LimitsNow(
            paused=self._pausing.is_paused, why="; ".join(self.reasons), caps=self._manners.limits.in_words
        )

    def install(self, control: ControlServer) -> None:
        """Answer `shoal pause`, `shoal resume`, `shoal config set` and Ctrl-Z."""
        control.on("pause", lambda arguments: self.pause())
        control.on("resume", lambda arguments: self.resume())
        control.on("limits", lambda arguments: self.change())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, self._on_stop_key)
        loop.add_signal_handler(signal.SIGCONT, self._on_continue)

    def start(self) -> None:
        """Observe the machine if a limit needs that. If the owner paused the peer before a restart, it stays paused."""
        if self._kept is not None and self._kept.exists():
            self._manners.ask(_OWNER, _OWNERS_WORD)
            self._apply()
        self._is_started = True
        self._watch_if_needed()

    def _watch_if_needed(self) -> None:
        limits = self._manners.limits
        if self._is_started and self._task is None and (limits.hours or limits.only_when_idle):
            self._task = asyncio.create_task(self._watch(), name="manners")

    async def close(self) -> None:
        self._is_started = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def change(self) -> Mapping[str, Any]:
        """Reread the settings, and apply those that can change at once (`AT_ONCE`). Returns: all limits in force."""
        before, wanted = self._manners.limits, self._reread()
        limits = msgspec.structs.replace(before, **{name: getattr(wanted, name) for name in AT_ONCE})
        if limits != before:
            self._manners.limits = limits
            self._apply_upload(limits.rates.upload_bytes_per_s)
            self._say(f"limits from now on: {', '.join(limits.in_words) or 'none'}")
            self._watch_if_needed()
            self._apply()
        return {"limits": msgspec.to_builtins(limits)}

    async def _watch(self) -> None:
        while True:
            try:
                seen = await self._run_blocking(self._look)
            except Exception:  # an unusual machine may fail in any way
                logger.exception("cannot look at this machine")
            else:
                self._manners.look(seen, now_s=asyncio.get_running_loop().time())
                for sentence in self._manners.unknowable:
                    if sentence not in self._warned:
                        self._warned.add(sentence)
                        self._say(sentence)
                self._apply()
            await asyncio.sleep(LOOK_S)

    def _apply(self) -> None:
        reasons = self.reasons
        if reasons and not self._pausing.is_paused:
            self._pausing.pause()
        elif not reasons and self._pausing.is_paused:
            self._pausing.resume()
        if reasons != self._told:
            self._told = reasons
            self._say(f"paused: {'; '.join(reasons)}" if reasons else "computing again")

    async def pause(self) -> Mapping[str, Any]:
        """Pause at the owner's request. Returns: the new state."""
        self._manners.ask(_OWNER, _OWNERS_WORD)
        self._apply()
        self._keep(lambda kept: kept.touch(mode=0o600), "a restart will forget the pause: cannot write")
        return self._answer()

    async def resume(self) -> Mapping[str, Any]:
        """End the owner's pause and that by Ctrl-Z; for other reasons the peer stays paused. Returns: the new state."""
        self._manners.take_back(_OWNER, _TERMINAL)
        self._apply()
        self._keep(lambda kept: kept.unlink(missing_ok=True), "a restart will pause again: cannot remove")
        return self._answer()

    def _keep(self, change: Callable[[Path], None], trouble: str) -> None:
        if self._kept is not None:
            try:
                change(self._kept)
            except OSError as error:
                self._say(f"{trouble} {self._kept}: {error.strerror or error}")

    def _answer(self) -> Mapping[str, Any]:
        return {"paused": self._pausing.is_paused, "reasons": list(self.reasons)}

    def _on_stop_key(self) -> None:
        """Pause at Ctrl-Z, and resume at the next Ctrl-Z. The process itself never stops, so `fg` cannot resume it."""
        if _TERMINAL in self._manners.asked:
            self._on_continue()
        else:
            self._manners.ask(_TERMINAL, "Ctrl-Z (again goes on, Ctrl-C leaves)")
            self._apply()

    def _on_continue(self) -> None:
        self._manners.take_back(_TERMINAL)
        self._apply()


def looking_at(device: torch.device) -> Callable[[], Seen]:
    """Return a function that observes this machine, for a peer that computes on `device`."""
    processors = ProcessorUse()

    def look() -> Seen:
        now = datetime.datetime.now().astimezone()
        others = gpu_others_share(device.index or 0) if device.type == "cuda" else processors.others_share()
        return Seen(minute=60 * now.hour + now.minute, input_idle_s=input_idle_s(), others_share=others)

    return look
