"""A peer as `shoal` starts it, which also counts the frames that it sends: `counted_peer.py WORDS…`.

Each second it writes what it has sent so far, by kind of message, into the file that `SHOAL_COUNTS` names with its
process number behind it: JSON, kind -> [frames, bytes with headers].
"""

import json
import os
import runpy
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from shoal.protocol import endpoint
from shoal.protocol.frames import wire_bytes
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload

VARIABLE = "SHOAL_COUNTS"
counts: dict[str, list[int]] = {}
_send = endpoint.Endpoint.send


async def _counted(self: endpoint.Endpoint, peer: PeerID, meta: msgspec.Struct, payload: Payload, **how: Any) -> None:
    nbytes = wire_bytes(len(msgspec.msgpack.encode(self._stamped(meta))), memoryview(payload).nbytes)
    seen = counts.setdefault(type(meta).__name__, [0, 0])
    seen[0] += 1
    seen[1] += nbytes
    await _send(self, peer, meta, payload, **how)


def _tell(path: Path) -> None:
    while True:
        time.sleep(1.0)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(counts))
        draft.replace(path)


if __name__ == "__main__":
    endpoint.Endpoint.send = _counted  # type: ignore[method-assign]
    told = Path(f"{os.environ[VARIABLE]}-{os.getpid()}.json")
    threading.Thread(target=_tell, args=(told,), daemon=True).start()
    runpy.run_module("shoal.deploy.cli", run_name="__main__")
