import asyncio
from typing import Any

from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import p2pd_pb2

from shoal.protocol.live.hivemind_guard import write_message


class Stream:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def drain(self) -> None:
        pass


def test_a_message_is_one_write_that_hivemind_reads_back() -> None:
    async def main() -> None:
        for size in (0, 5, 127, 128, 20_000):
            stream: Any = Stream()
            sent = p2pd_pb2.CallUnaryResponse(response=bytes(size))
            await write_message(stream, sent)
            assert len(stream.written) == 1
            reader = asyncio.StreamReader()
            reader.feed_data(stream.written[0])
            reader.feed_eof()
            got = p2pd_pb2.CallUnaryResponse()
            await read_pbmsg_safe(reader, got)
            assert got == sent
            assert reader.at_eof()

    asyncio.run(main())
