"""Lets a command talk to a peer on this machine through a unix socket in the peer's state folder.

Each line is one JSON object, and there may be several: `{"verb": "leave", "arguments": {}}` is answered by `{"value":
{…}}` or `{"error": "a sentence"}`. Only this user can open the socket, so nothing is signed. Still, the length and the
types of a line are checked.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.protocol.errors import LocalError, ShoalError

logger = logging.getLogger(__name__)

SOCKET_NAME = "control.sock"
LINE_BYTES_MAX = 1024 * 1024
"""The longest line, in either direction: enough for the status of a run of three thousand peers."""
_CALLERS_MAX = 16
_PATH_BYTES_MAX = 107
"""The longest path in `sockaddr_un` on Linux without its terminating zero."""

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Takes a request's arguments, and returns the answer's value. A `ShoalError` that it raises is sent as the error."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    verb: str
    arguments: dict[str, Any] = {}


class ControlAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a verb: `value`, or in `error` a sentence for a person."""

    value: dict[str, Any] = {}
    error: str = ""


class ControlServer:
    """The peer's side of the socket. Call `on` before or after `start`; `close` removes the socket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handlers: dict[str, Handler] = {}
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Task[Any]] = set()

    @property
    def path(self) -> Path:
        return self._folder / SOCKET_NAME

    def on(self, verb: str, handler: Handler) -> None:
        """Answer `verb` with the result of `handler`. Raises: ValueError: the verb has a handler already."""
        if verb in self._handlers:
            raise ValueError(f"the verb {verb!r} has a handler already")
        self._handlers[verb] = handler

    async def start(self) -> None:
        """Open the socket. Raises: LocalError: the socket cannot be made."""
        try:
            self.path.unlink(missing_ok=True)  # we hold the folder's lock, so a killed process left the socket
            with _reachable(self._folder) as name:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    listener.bind(name)
                    os.chmod(self.path, 0o600)
                except BaseException:
                    listener.close()
                    raise
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=LINE_BYTES_MAX)
        except OSError as error:
            raise LocalError(f"cannot make the control socket {self.path}: {error.strerror or error}") from error

    async def try_start(self) -> None:
        """Open the socket; if the file system cannot hold sockets, log that and go on without one."""
        try:
            await self.start()
        except LocalError as error:
            logger.warning("%s: `shoal leave` and the like will not reach this peer", error)

    async def close(self) -> None:
        """Close and remove the socket. Safe to call twice."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        callers = tuple(self._callers)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._callers.add(task)
        try:
            if len(self._callers) <= _CALLERS_MAX:
                await self._answer_lines(reader, writer)
        except (OSError, EOFError):
            pass  # the caller has gone
        except asyncio.CancelledError:
            pass  # asyncio would log a cancelled handler as an error
        finally:
            self._callers.discard(task)
            writer.close()

    async def _answer_lines(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than any request
                return
            if not line:
                return
            writer.write(msgspec.json.encode(await self._answer(line)) + b"\n")
            await writer.drain()

    async def _answer(self, line: bytes) -> ControlAnswer:
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return ControlAnswer(error=f"the request cannot be read ({error})")
        handler = self._handlers.get(request.verb)
        if handler is None:
            return ControlAnswer(error=f"the peer that runs here does not know {request.verb!r}: is its shoal older?")
        try:
            return ControlAnswer(value=dict(await handler(request.arguments)))
        except ShoalError as error:
            return ControlAnswer(error=str(error))
        except Exception:
            logger.exception("the request %r failed", request.verb)
            return ControlAnswer(error=f"the peer could not {request.verb!r}: its log says why")


def ask(folder: Path, verb: str, *, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
    """Send a verb to the peer that runs in `folder`, and return the answer. Blocks, so do not call it in an event loop.

    Raises: LocalError: no peer runs in `folder`, or the peer did not answer in time, or answered with an error.
    """
    request = msgspec.json.encode(Request(verb, arguments)) + b"\n"
    try:
        with _reachable(folder) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(name)
            link.sendall(request)
            with link.makefile("rb") as lines:
                line = lines.readline(LINE_BYTES_MAX)
    except TimeoutError as error:
        raise LocalError(f"the peer in {folder} did not answer in {timeout_s:g} s: is its process stopped?") from error
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise LocalError(f"no peer runs in {folder}") from error
    except OSError as error:
        raise LocalError(f"cannot reach the peer in {folder}: {error.strerror or error}") from error
    try:
        answer = msgspec.json.decode(line, type=ControlAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"the peer in {folder} ended before it answered") from error
    if answer.error:
        raise LocalError(answer.error)
    return answer.value


@contextlib.contextmanager
def _reachable(folder: Path) -> Iterator[str]:
    """Yield the path of the socket in `folder`, or a short path through a file descriptor if the kernel needs one."""
    path = str(folder / SOCKET_NAME)
    if len(os.fsencode(path)) <= _PATH_BYTES_MAX:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
