"""Starts the network daemon p2pd as a child process, watches it, restarts it when it dies, and removes its leftovers.

The daemon has all connections: when it dies, all streams close and all handlers are forgotten. So handlers are
registered in a *setup*, a function that runs at the first start and after every restart. A setup may only call the
daemon, not wait for another peer: `p2p()` returns after all setups, so a setup that waits for a peer might wait for
itself.
"""

import asyncio
import contextvars
import fcntl
import functools
import itertools
import logging
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import hivemind.hivemind_cli as hivemind_cli
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon import P2PD_FILENAME
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from shoal.protocol.ending import end_tasks
from shoal.protocol.errors import TransportError
from shoal.protocol.identity import Identity
from shoal.protocol.live import hivemind_guard, leftovers
from shoal.protocol.live.connection_limit import ConnectionLimit
from shoal.protocol.live.daemon_binary import check_daemon
from shoal.protocol.live.listen import from_this_machine, keep_ports, refuse_ports_in_use

logger = logging.getLogger(__name__)

Setup = Callable[[P2P], Awaitable[None]]

_PULSE_S = 15.0
"""Seconds between checks whether the daemon answers and which visible addresses it has; a check takes a millisecond."""
_PULSE_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 15.0
_SETUP_TIMEOUT_S = 10.0
"""Time limit of setups, after which the daemon is replaced. The daemon answers a setup in milliseconds."""
_WITH_US = ("--pdeathsig", "KILL")
_RELAY_LIMITS = {"relayDataLimit": 128 * 1024, "relayTimeLimit": "2m"}
"""Limits of each relayed connection, the defaults of libp2p. p2pd's defaults would relay 4 GiB for anybody, outside a
volunteer's limits."""
_RESTART_WAITS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)

_started: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("_started")


@functools.cache
def _wrapper() -> tuple[str, ...]:
    """Return the words before the daemon's command: each program execs the next, so the process id is the daemon's.

    setsid gives the daemon its own session: Ctrl-C signals the whole foreground process group, but we need the daemon
    until we have left the run. setpriv lets the kernel kill the daemon when this process dies. Otherwise the daemon
    notices our death after 1.6 s; in one of some two hundred cases it took over 10 s.
    """
    setsid, setpriv = shutil.which("setsid"), shutil.which("setpriv")
    words = [setsid] if setsid else []
    if setpriv:  # the setpriv of busybox lacks the option
        knows = subprocess.run([setpriv, *_WITH_US, "true"], capture_output=True, check=False)
        words += [setpriv, *_WITH_US] if knows.returncode == 0 else []
    return tuple(words)


def daemon_path() -> Path:
    """Return the path of the daemon's program in hivemind's package."""
    return Path(hivemind_cli.__file__).with_name(P2PD_FILENAME)


class _DetachedP2P(P2P):  # type: ignore[misc]  # hivemind is untyped
    def __init__(self) -> None:
        super().__init__()
        _started.get().append(self)  # if `create` fails, it drops the instance, which has the names of its sockets

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        # libp2p's own DHT tells every peer's addresses to any peer; we know our peers' addresses without it. With
        # autoRelay p2pd insists on a DHT: as a client it may ask others and answers no requests.
        kwargs.pop("dhtServer", None)
        if kwargs.get("autoRelay"):
            kwargs["dhtClient"] = 1
        # Relays serve only for hole punching between two daemons. Our own traffic uses carriers (`carrier.py`).
        kwargs |= _RELAY_LIMITS
        return [*_wrapper(), *P2P._make_process_args(*args, **kwargs)]


class Daemon:
    """One p2pd process and its restarts.

    Args:
        state_dir: the folder with the key file, with the lock that keeps two peers from sharing one identity, and with
            the names of the files that must be removed if this process is killed.
        listen: multiaddrs over TCP. With port 0 the system chooses the port; without `announce` a restart keeps it.
        relays: multiaddrs of peers that may relay for us if we are behind a NAT.
    """

    def __init__(
        self,
        identity: Identity,
        state_dir: Path,
        *,
        listen: Sequence[str],
        announce: Sequence[str],
        relays: Sequence[str],
        use_relay: bool,
    ) -> None:
        self._identity = identity
        self._state_dir = state_dir
        self._asked = tuple(listen)
        self.listening = tuple(listen)
        """Addresses on which the daemon listens, with the port that the system chose for port 0, if it is known."""
        self._announce = tuple(announce)
        self._relays = tuple(relays)
        self._use_relay = use_relay
        self._setups: list[Setup] = []
        self._p2p: Any = None
        self._up = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._held = ExitStack()
        """Holds the lock of the state folder, and this peer's name on the machine (`_take_name`)."""
        self._connection_limit = ConnectionLimit(())
        self.visible: tuple[Any, ...] = ()
        """Multiaddrs at which other peers may reach us, without `/p2p/…`."""
        self.restarts = 0
        self.on_restart: list[Callable[[], Awaitable[None]]] = []
        """Functions that are called after each restart, one after the other, once the daemon is up again."""
        self._reunion: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the daemon. Raises: TransportError."""
        hivemind_guard.install()
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            await self._take_name()
            await leftovers.clear(self._state_dir)
            self._identity_path().unlink(missing_ok=True)
            self._identity.save(self._identity_path())
            await self._launch()
        except BaseException:
            self._release()
            raise
        self._up.set()
        self._watcher = asyncio.create_task(self._watch(), name="p2pd watcher")

    @property
    def process_id(self) -> int:
        return int(self._p2p._child.pid)

    @property
    def is_open(self) -> bool:
        return self._p2p is not None

    def keep_out(self, address: bytes) -> None:
        """Shut an address out: the kernel drops its new connections for a while (`connection_limit.py`)."""
        self._connection_limit.shut_out_now(address, asyncio.get_running_loop().time())

    @property
    def local_addresses(self) -> tuple[str, ...]:
        """Return multiaddrs, without `/p2p/…`, for processes on this machine; those in `visible` may not work here."""
        return from_this_machine(self.listening)

    async def p2p(self) -> Any:
        """Return hivemind's P2P of the running daemon; wait during a restart. Raises: TransportError: it is closed."""
        await self._up.wait()
        if self._p2p is None:
            raise TransportError("the network daemon of this peer is closed")
        return self._p2p

    async def add_setup(self, setup: Setup) -> None:
        """Run `setup` on the daemon now and after every restart. Raises: TransportError: the daemon is closed."""
        p2p = await self.p2p()
        self._setups.append(setup)
        try:
            await _set_up(p2p, [setup])
        except TransportError as error:
            if p2p is self._p2p:
                logger.error("%s", error)
                self._up.clear()
                _kill(p2p)  # `_watch` starts another, and runs all setups on it
            await self.p2p()

    def remove_setup(self, setup: Setup) -> None:
        with suppress(ValueError):
            self._setups.remove(setup)

    async def close(self) -> None:
        """Stop the daemon; leave no process, task or socket file. Safe to call twice."""
        await end_tasks(self._watcher, self._reunion)
        self._watcher = None
        await self._connection_limit.close()
        if self._p2p is not None:
            p2p, self._p2p = self._p2p, None
            self._up.set()  # release waiters for a restart that will not come
            await _stop(p2p)
        self._release()

    def _identity_path(self) -> Path:
        return self._state_dir / "p2pd.key"

    def _take_lock(self) -> None:
        lock = self._held.enter_context((self._state_dir / "lock").open("wb"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._held.close()
            raise TransportError(
                f"another peer runs with the state folder {self._state_dir}: give each its own"
            ) from None

    async def _take_name(self) -> None:
        """Take the name that belongs to this peer's key on this machine. So no process that uses a copy of the state
        folder (with another lock file) can run beside us.

        The name is an abstract Unix socket: all users share such names, and Linux frees them when their process ends.
        Raises: TransportError: the name is taken.
        """
        if sys.platform != "linux":
            return
        name = f"\0shoal/{self._identity.peer_id}"
        held = self._held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # The kernel closes a killed process's files a moment after its end; until then its name is taken.
        deadline_s = time.monotonic() + 2.0
        while True:
            try:
                held.bind(name)
                held.listen()
                return
            except OSError:
                if time.monotonic() >= deadline_s:
                    raise TransportError(
                        f"this peer runs on this machine already, {_holder(name)}, and {self._state_dir} is a copy of "
                        "its state folder: stop that one first, or give this one another --state-dir"
                    ) from None
            await asyncio.sleep(0.1)

    def _release(self) -> None:
        leftovers.forget(self._state_dir)
        self._identity_path().unlink(missing_ok=True)
        self._held.close()

    async def _launch(self) -> None:
        await self._connection_limit.close()
        refuse_ports_in_use(self.listening)
        await asyncio.to_thread(check_daemon, daemon_path())
        started: list[Any] = []
        _started.set(started)
        creating = asyncio.ensure_future(self._create())
        try:
            p2p = await asyncio.shield(creating)
        except BaseException as error:  # also cancellation, by a `close` in the middle of a restart
            for failed in started:
                _kill(failed)
            await asyncio.gather(creating, return_exceptions=True)  # a half-started daemon cannot be stopped
            for failed in started:
                await _stop(failed)
            if isinstance(error, P2PDaemonError | OSError | EOFError | ValueError):
                raise TransportError(f"the network daemon did not start: {_last_words(error)}") from error
            raise
        hivemind_guard.mend_control(p2p._client.control)
        leftovers.remember(self._state_dir, p2p._child.pid, _socket_paths(p2p))
        self._p2p = p2p
        self.visible = tuple(p2p._visible_maddrs)
        if not self._announce:  # with announced addresses `visible` has only these, which do not show our port
            self.listening = keep_ports(self.listening, [str(address) for address in self.visible])
        self._connection_limit = ConnectionLimit(self.listening)
        self._connection_limit.open()
        try:
            await _set_up(p2p, self._setups)
        except BaseException:
            _kill(p2p)
            await _stop(p2p)
            raise

    async def _create(self) -> Any:
        nat = self._use_relay and not all("/127.0.0.1/" in at or "/ip6/::1/" in at for at in self.listening)
        creating = _DetachedP2P.create(
            host_maddrs=self.listening,
            announce_maddrs=self._announce or None,
            identity_path=str(self._identity_path()),
            check_if_identity_free=False,  # that check starts a second daemon, and can only read RSA keys
            tls=True,
            use_relay=self._use_relay,
            use_auto_relay=nat and bool(self._relays),
            trusted_relays=self._relays if nat else None,  # p2pd panics if it has relays and may not use them
            auto_nat=nat,
            nat_port_map=nat,
            startup_timeout=2 * _START_TIMEOUT_S,  # so that our timeout is first: hivemind's waits for the daemon's end
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await creating
        except TimeoutError as error:
            raise P2PDaemonError(f"it did not answer for {_START_TIMEOUT_S:g} s") from error

    async def _watch(self) -> None:
        while True:
            reason = await self._death()
            self._up.clear()
            process_id, began_s = self.process_id, time.monotonic()
            _kill(self._p2p)
            await _stop(self._p2p)
            await self._relaunch()
            self.restarts += 1
            logger.error(
                "the network daemon (process %d) %s; restarted as process %d on %s after %.1f s",
                process_id,
                reason,
                self.process_id,
                ", ".join(self.listening),
                time.monotonic() - began_s,
            )
            if self._reunion is not None:
                self._reunion.cancel()
            self._reunion = asyncio.create_task(self._tell_restarted(), name="after a daemon restart")

    async def _tell_restarted(self) -> None:
        for callback in tuple(self.on_restart):
            try:
                await callback()
            except Exception as error:
                logger.error("a part of this peer did not come back after the daemon's restart: %r", error)

    async def _death(self) -> str:
        """Wait until the daemon ends, does not answer, or closes its control connection; return which, in words."""
        exited = asyncio.ensure_future(self._p2p._child.wait())
        silent = self._p2p._client.control._read_task
        try:
            while True:
                await asyncio.wait({exited, silent}, timeout=_PULSE_S, return_when=asyncio.FIRST_COMPLETED)
                if silent.done():  # usually the daemon has died, and its exit status comes a moment later
                    await asyncio.wait({exited}, timeout=1.0)
                if exited.done():
                    return f"ended with status {exited.result()}"
                if silent.done():
                    return "closed its control connection"
                if not await self.refresh():
                    return f"did not answer for {_PULSE_TIMEOUT_S:g} s"
        finally:
            exited.cancel()

    async def refresh(self) -> bool:
        """Ask the daemon for its visible addresses; return False after ten seconds of silence. Only before `close`."""
        try:
            async with asyncio.timeout(_PULSE_TIMEOUT_S):
                _, visible = await self._p2p._client.identify()
        except TimeoutError:
            return False
        except Exception as error:  # the daemon has died or cannot answer: the next check shows which
            logger.debug("the daemon's answer could not be read: %r", error)
            return True
        self.visible = tuple(visible) or self.visible
        return True

    async def _relaunch(self) -> None:
        for attempt in itertools.count():
            await asyncio.sleep(_RESTART_WAITS_S[min(attempt, len(_RESTART_WAITS_S) - 1)])
            try:
                await self._launch()
                break
            except Exception as error:  # try again after any error: a peer without a daemon is useless
                logger.error("%s; trying again", _last_words(error))
                if attempt >= len(_RESTART_WAITS_S):
                    self.listening = self._asked  # another process may have taken the port that the system had chosen
        self._up.set()


async def _set_up(p2p: Any, setups: Sequence[Setup]) -> None:
    """Run the setups on a daemon. Raises: TransportError."""
    try:
        async with asyncio.timeout(_SETUP_TIMEOUT_S):
            for setup in tuple(setups):
                await setup(p2p)
    except TimeoutError as error:
        raise TransportError(f"the network daemon did not answer for {_SETUP_TIMEOUT_S:g} s") from error
    except (P2PDaemonError, OSError, EOFError) as error:
        raise TransportError(f"the network daemon failed: {_last_words(error)}") from error


def _holder(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        with suppress(OSError):
            probe.connect(name)
        process_id, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"as process {process_id}" if process_id else "in a process that is not shown here"


def _fail_pending_calls(control: Any) -> None:
    """Let unanswered calls raise P2PDaemonError. When the daemon dies, hivemind itself would let them wait for ever."""
    for future in tuple(control._pending_calls.values()):
        if not future.done():
            future.set_exception(P2PDaemonError("our own network daemon died"))


def _socket_paths(p2p: Any) -> list[Path]:
    addresses = (p2p._daemon_listen_maddr, p2p._client_listen_maddr)
    return [Path(address.value_for_protocol("unix")) for address in addresses]


def _last_words(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[-1][-300:].strip("[]") if text else repr(error)


def _kill(p2p: Any) -> None:
    """Kill the daemon by SIGKILL: a suspended daemon reacts to no other signal."""
    if p2p._child is not None and p2p._child.returncode is None:
        with suppress(ProcessLookupError):
            p2p._child.kill()


async def _stop(p2p: Any) -> None:
    """Stop the daemon and hivemind's tasks, and remove its sockets: hivemind itself neither waits for its tasks nor
    removes a dead daemon's socket."""
    control = getattr(p2p._client, "control", None)
    tasks = [p2p._listen_task, p2p._reader_task]
    if control is not None:
        _fail_pending_calls(control)
        tasks += [control._read_task, control._write_task, *control._handler_tasks.values()]
    p2p._terminate()
    await end_tasks(*tasks)
    if p2p._child is not None:
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await p2p._child.wait()
        except TimeoutError:
            p2p._child.kill()
            await p2p._child.wait()
    for path in _socket_paths(p2p):
        path.unlink(missing_ok=True)
