"""Lets a command speak to a peer that runs on this machine, through a unix socket in the peer's state folder.

One JSON object a line each way, for as many lines as the caller likes: `{"verb": "leave", "arguments": {}}` is
answered by `{"value": {…}}` or `{"error": "a sentence"}`. What a verb does is registered by whoever can do it. Only
this user can open the socket, so nothing here is signed; still every line is bounded, and decoded once.
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
"""A status of a thousand peers is 300 KB."""
_CALLERS_MAX = 16
_PATH_BYTES_MAX = 107
"""The longest path of `sockaddr_un` on Linux, its closing zero left out."""
_ASK_TIMEOUT_S = 10.0

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Arguments of the request -> value of the answer. A `ShoalError` becomes the caller's error sentence."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    verb: str
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`error` is a sentence for a person; without one, `value` is the answer."""

    value: dict[str, Any] = {}
    error: str = ""


_REQUESTS = msgspec.json.Decoder(Request)
_ANSWERS = msgspec.json.Decoder(Answer)
_ENCODER = msgspec.json.Encoder()


class ControlServer:
    """The running peer's side of the socket. `on` may come before or after `start`; `close` leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handlers: dict[str, Handler] = {}
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Task[Any]] = set()

    @property
    def path(self) -> Path:
        return self._folder / SOCKET_NAME

    def on(self, verb: str, handler: Handler) -> None:
        """Answer `verb` with what `handler` returns. Raises: ValueError: it has a handler already."""
        if verb in self._handlers:
            raise ValueError(f"the verb {verb!r} has a handler already")
        self._handlers[verb] = handler

    async def start(self) -> None:
        """Raises: LocalError: the socket cannot be made."""
        try:
            self.path.unlink(missing_ok=True)  # of a process that was killed: the folder is ours alone
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
        """A file system without sockets keeps nobody from taking part."""
        try:
            await self.start()
        except LocalError as error:
            logger.warning("%s: `shoal leave` and the like will not reach this peer", error)

    async def close(self) -> None:
        """A second call does nothing."""
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
            writer.write(_ENCODER.encode(await self._answer(line)) + b"\n")
            await writer.drain()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = _REQUESTS.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Answer(error=f"the request cannot be read ({error})")
        handler = self._handlers.get(request.verb)
        if handler is None:
            return Answer(error=f"the peer that runs here cannot {request.verb!r}: is it of an older shoal?")
        try:
            return Answer(value=dict(await handler(request.arguments)))
        except ShoalError as error:
            return Answer(error=str(error))
        except Exception:
            logger.exception("the request %r failed", request.verb)
            return Answer(error=f"the peer could not {request.verb!r}: its log says why")


def ask(folder: Path, verb: str, *, timeout_s: float = _ASK_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
    """Ask the peer that runs in `folder`. Blocks: for commands, not for a loop.

    Raises: LocalError: none runs there, it did not answer in time, or its own sentence of why not.
    """
    request = _ENCODER.encode(Request(verb, arguments)) + b"\n"
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
        answer = _ANSWERS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"the peer in {folder} ended before it answered") from error
    if answer.error:
        raise LocalError(answer.error)
    return answer.value


@contextlib.contextmanager
def _reachable(folder: Path) -> Iterator[str]:
    """The socket's name, short enough for the kernel: a folder deep in a home passes through its descriptor."""
    path = str(folder / SOCKET_NAME)
    if len(os.fsencode(path)) <= _PATH_BYTES_MAX:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
