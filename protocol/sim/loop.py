"""An asyncio event loop in virtual time: when nothing is ready, the clock jumps to the next timer.

Theory of operation. Ordinary asyncio code (sleep, queues, `asyncio.timeout`, task groups) behaves as on a real loop,
except that waiting takes no real time. Three properties make two runs of one program equal, event for event:

- timers due at the same instant fire in the order in which they were set (asyncio's own heap leaves the order open);
- tasks hash by creation order, so that sets of tasks (`TaskGroup`, `asyncio.wait`) iterate in the same order;
- threads, executors, sockets and signals are refused with an error, because their timing differs from run to run.

If nothing is ready, no timer is set and the main coroutine is not done, the loop raises `Deadlock`, which lists the
waiting tasks. Work can belong to an owner (`owned_context`), for example a peer. The callbacks, timers and wake-ups of
a frozen owner do not run until the owner is thawed: so a world pauses peers, and kills them without their cleanup.
"""

import asyncio
import contextvars
import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable
from pathlib import PurePath
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.disk import PowerCut

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_OWNER: contextvars.ContextVar[Hashable] = contextvars.ContextVar("owner", default=None)
_NO_OWNER = contextvars.Context()
_CANCEL_ROUNDS_MAX = 16
_TASKS_NAMED_MAX = 12
_PURGE_TIMERS_MIN = 128


class Deadlock(LocalError):
    """No callback is ready and no timer is set, but the main coroutine is not done."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop on one thread, without input and output. Its clock begins at `start_s` virtual seconds."""

    # Attributes of Python 3.11's `BaseEventLoop` that its stubs omit.
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, *, start_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers_cancelled = 0
        self._timer_order = itertools.count()
        self._task_order = itertools.count()
        self._tasks: dict[int, _OrderedTask[Any]] = {}
        self._frozen: dict[Hashable, list[asyncio.Handle]] = {}

    def time(self) -> float:
        return self._now_s

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if math.isnan(when):
            raise ValueError("a timer cannot be set for NaN seconds")
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._timer_order), timer))
        return timer

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        order = next(self._task_order)
        task = _OrderedTask(order, coro, loop=self, name=name or f"task-{order}", context=context)
        self._tasks[order] = task
        task.add_done_callback(self._forget, context=_NO_OWNER)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        del self._tasks[hash(task)]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), PowerCut):  # a simulated death is no failure
            super().call_exception_handler(context)

    def tasks(self) -> list["asyncio.Task[Any]"]:
        """Return the unfinished tasks, oldest first."""
        return list(self._tasks.values())

    @property
    def has_callbacks(self) -> bool:
        """True if a callback is ready."""
        return bool(self._ready)

    # Freezing -----------------------------------------------------------------------------------------------------

    def freeze(self, owner: Hashable) -> None:
        """Run no work of `owner` until `thaw`. Its callbacks, timers and wake-ups are kept in order."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: Hashable) -> None:
        self._ready.extend(self._frozen.pop(owner, ()))

    def thaw_all(self) -> None:
        for owner in list(self._frozen):
            self.thaw(owner)

    def drop_timers(self) -> None:
        self._timers.clear()
        self._num_timers_cancelled = 0

    # The heart ----------------------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._drop_cancelled_timers()
            if not self._timers or self._timers[0][0] == math.inf:
                raise Deadlock(self._who_waits())
            self._now_s = max(self._now_s, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now_s:
            ready.append(self._pop_timer())
        # As in asyncio, callbacks that these callbacks make ready run in the next round, after the timers due by then.
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._frozen and (owner := _owner_of(handle)) in self._frozen:
                self._frozen[owner].append(handle)
                continue
            handle._run()

    def _pop_timer(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._timers)[2]
        timer._scheduled = False  # type: ignore[attr-defined]
        return timer

    def _drop_cancelled_timers(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            self._pop_timer()
            self._num_timers_cancelled -= 1

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if not handle._scheduled:  # type: ignore[attr-defined]
            return  # the timer has fired; `asyncio.sleep` cancels its timer all the same
        self._num_timers_cancelled += 1
        if self._num_timers_cancelled > max(_PURGE_TIMERS_MIN, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_timers_cancelled = 0

    def _who_waits(self) -> str:
        waiting = self.tasks()
        named = ", ".join(f"{task.get_name()} ({_where(task)})" for task in waiting[:_TASKS_NAMED_MAX])
        more = f" and {len(waiting) - _TASKS_NAMED_MAX} more" if len(waiting) > _TASKS_NAMED_MAX else ""
        return (
            f"nothing can happen any more at {self._now_s:.6g} s of virtual time; waiting: {named or 'no task'}{more}"
        )

    # What would let the real world in -----------------------------------------------------------------------------

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self._thread_id is not None and self._thread_id != threading.get_ident():
            _refuse("a call from another thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> NoReturn:
        _refuse("a thread pool")

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> NoReturn:
        _refuse("a socket or pipe")

    def add_writer(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> NoReturn:
        _refuse("a socket or pipe")

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> NoReturn:
        _refuse("a signal handler")

    def close(self) -> None:
        self._timers.clear()
        self._frozen.clear()
        super().close()


class _Handle(asyncio.Handle):
    """A handle without asyncio's debug mode, made in half the time: this loop makes a million a minute."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualTimeLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualTimeLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True


class _OrderedTask(asyncio.Task[T]):
    """A task that hashes by creation order, so that sets of tasks iterate in the same order in every process."""

    def __init__(self, order: int, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **arguments: Any) -> None:
        self._order = order  # first: asyncio puts the task into a set while constructing it
        super().__init__(coro, **arguments)

    def __hash__(self) -> int:
        return self._order


def run(main: Coroutine[Any, Any, T], *, start_s: float = 0.0) -> T:
    """Do what `asyncio.run` does, in virtual time: run `main`, cancel leftover tasks, close the loop.

    Raises: Deadlock: no progress is possible. LocalError: the program used a thread, socket, pipe or signal.
    """
    loop = VirtualTimeLoop(start_s=start_s)
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            _cancel_leftovers(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def owned_context(owner: Hashable) -> contextvars.Context:
    """Return a new context. Tasks and timers that are started in it, and those that they start, belong to `owner`."""
    context = contextvars.Context()
    context.run(_OWNER.set, owner)
    return context


def _cancel_leftovers(loop: VirtualTimeLoop) -> None:
    loop.thaw_all()
    # Several rounds, since a `finally` may start new work.
    for _ in range(_CANCEL_ROUNDS_MAX):
        loop.drop_timers()  # a peer's timer would start new work for ever
        leftovers = loop.tasks()
        if not leftovers and not loop.has_callbacks:
            return
        for task in leftovers:
            task.cancel()
        # Callbacks of a crashed peer run here, too: they start tasks, which the next round cancels.
        everything = asyncio.gather(*leftovers, return_exceptions=True) if leftovers else asyncio.sleep(0.0)
        loop.run_until_complete(everything)
        for task in leftovers:
            if not task.cancelled() and task.exception() is not None:
                loop.call_exception_handler(
                    {"message": "a task failed while it was cancelled", "exception": task.exception(), "task": task}
                )


def _owner_of(handle: asyncio.Handle) -> Hashable:
    context: contextvars.Context = handle._context  # type: ignore[attr-defined]
    return context.get(_OWNER)


def _where(task: "asyncio.Task[Any]") -> str:
    """Return the coroutines in which `task` waits, outermost first: `run (driver.py:40) > get (queues.py:158)`."""
    steps = []
    inner: Any = task.get_coro()
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        steps.append(f"{inner.__qualname__} {PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}")
        inner = inner.cr_await
    return " > ".join(steps) or "not started"


def _refuse(what: str) -> NoReturn:
    raise LocalError(f"{what} is not allowed in virtual time: it would come at another moment in every run")
