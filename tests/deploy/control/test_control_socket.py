"""The socket between a command and the peer that runs here."""

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from shoal.deploy.control.control_socket import LINE_BYTES_MAX, SOCKET_NAME, ControlServer, ask
from shoal.protocol.errors import LocalError


async def echo(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"heard": arguments}


def served(folder: Path, use: Callable[[ControlServer], Awaitable[None]]) -> None:
    async def main() -> None:
        server = ControlServer(folder)
        server.on("echo", echo)
        await server.start()
        try:
            await use(server)
        finally:
            await server.close()

    uvloop.run(main())  # as every peer does


def test_a_verb_is_answered_by_its_handler(tmp_path: Path) -> None:
    async def use(server: ControlServer) -> None:
        assert await asyncio.to_thread(ask, tmp_path, "echo", word="hello") == {"heard": {"word": "hello"}}
        assert server.path.stat().st_mode & 0o777 == 0o600

    served(tmp_path, use)
    assert not (tmp_path / SOCKET_NAME).exists()


def test_a_verb_registered_late_is_answered_too(tmp_path: Path) -> None:
    async def use(server: ControlServer) -> None:
        with pytest.raises(LocalError, match="does not know 'pause'"):
            await asyncio.to_thread(ask, tmp_path, "pause")
        server.on("pause", echo)
        assert await asyncio.to_thread(ask, tmp_path, "pause") == {"heard": {}}
        with pytest.raises(ValueError, match="already"):
            server.on("pause", echo)

    served(tmp_path, use)


def test_why_a_handler_refuses_is_the_callers_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def refuses(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        raise LocalError("it is not the hour for that")

    async def breaks(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        raise KeyError("secret")

    async def use(server: ControlServer) -> None:
        server.on("refuse", refuses)
        server.on("break", breaks)
        with pytest.raises(LocalError, match=r"^it is not the hour for that$"):
            await asyncio.to_thread(ask, tmp_path, "refuse")
        with caplog.at_level(logging.CRITICAL), pytest.raises(LocalError, match="its log says why"):
            await asyncio.to_thread(ask, tmp_path, "break")
        assert await asyncio.to_thread(ask, tmp_path, "echo") == {"heard": {}}

    served(tmp_path, use)


def test_a_folder_too_deep_for_a_socket_name_is_reached(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30) / ("deeper" * 20)
    folder.mkdir(parents=True)

    async def use(server: ControlServer) -> None:
        assert await asyncio.to_thread(ask, folder, "echo", n=1) == {"heard": {"n": 1}}

    served(folder, use)
    assert not (folder / SOCKET_NAME).exists()


def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET_NAME))
    with pytest.raises(LocalError, match="no peer runs in"):
        ask(tmp_path, "echo")

    async def use(server: ControlServer) -> None:
        assert await asyncio.to_thread(ask, tmp_path, "echo") == {"heard": {}}

    served(tmp_path, use)


def test_nobody_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no peer runs in"):
        ask(tmp_path, "echo")
    with pytest.raises(LocalError, match="no peer runs in"):
        ask(tmp_path / "nowhere", "echo")


@pytest.mark.parametrize("line", [b"not json\n", b'{"verb": 3}\n', b'{"verb": "echo", "more": 1}\n', b"\xff\n"])
def test_a_line_that_is_no_request_is_answered_with_a_sentence(tmp_path: Path, line: bytes) -> None:
    async def use(server: ControlServer) -> None:
        reader, writer = await asyncio.open_unix_connection(str(server.path))
        writer.write(line + b'{"verb": "echo"}\n')
        assert b"cannot be read" in await reader.readline()
        assert await reader.readline() == b'{"value":{"heard":{}}}\n'
        writer.close()

    served(tmp_path, use)


def test_lines_that_are_nearly_requests_are_answered_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(0)
    good = b'{"verb": "echo", "arguments": {"word": "hello", "deep": [[[1]]]}}'
    lines = [b'{"verb": "echo", "arguments": {"x": ' + b"[" * 300_000, b'{"verb": "\\ud800"}', b"\0" * 1000, good]
    for _ in range(300):
        line = bytearray(good)
        for _ in range(rng.choice((1, 1, 5))):
            at = rng.randrange(len(line))
            line[at : at + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.choice((0, 1, 1, 9))).replace(b"\n", b" ")
        lines.append(bytes(line))

    async def use(server: ControlServer) -> None:
        reader, writer = await asyncio.open_unix_connection(str(server.path), limit=LINE_BYTES_MAX)
        for line in lines:
            writer.write(line + b"\n")
            answer = msgspec.json.decode(await asyncio.wait_for(reader.readline(), 5))
            assert answer.keys() <= {"value", "error"}, line
        writer.close()

    served(tmp_path, use)
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_line_without_an_end_ends_the_connection(tmp_path: Path) -> None:
    async def use(server: ControlServer) -> None:
        reader, writer = await asyncio.open_unix_connection(str(server.path))
        writer.write(b"x" * (LINE_BYTES_MAX * 2 + 1))
        with contextlib.suppress(ConnectionResetError):  # it had not read all of it
            assert await reader.read() == b""
        assert await asyncio.to_thread(ask, tmp_path, "echo") == {"heard": {}}
        writer.close()

    served(tmp_path, use)


def test_a_caller_that_waits_does_not_keep_the_peer(tmp_path: Path) -> None:
    async def use(server: ControlServer) -> None:
        started = asyncio.Event()

        async def forever(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            started.set()
            await asyncio.Event().wait()
            return {}

        server.on("wait", forever)
        asking = asyncio.create_task(asyncio.to_thread(ask, tmp_path, "wait"))
        await started.wait()
        await server.close()
        with pytest.raises(LocalError, match="ended before it answered"):
            await asking

    served(tmp_path, use)


def test_a_file_system_without_sockets_keeps_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SOCKET_NAME).mkdir()

    async def main() -> None:
        server = ControlServer(tmp_path)
        with pytest.raises(LocalError, match="cannot make the control socket"):
            await server.start()
        await server.try_start()
        await server.close()

    asyncio.run(main())
    assert "will not reach this peer" in caplog.text
