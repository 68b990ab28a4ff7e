"""Make a liar of this process: import it before `shoal join`. While the file named by `LIES_WHILE` is there (always, if
none is named), the member

- votes against every plan that it is offered, and orders all other members out;
- claims to hold a version that nobody has reached;
- halts the run every second.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.coordinator.core import CoordinationCore
from shoal.coordinator.driver import Coordination
from shoal.peer.driver import PeerDriver
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.exclusion import propose_exclusion
from shoal.protocol.identity import PeerID, public_key_of
from shoal.protocol.layers import all_layer_keys
from shoal.protocol.messages import Halt, Halted, Heartbeat, Holding, PlanVote
from shoal.protocol.statement import sign_statement

FORGED = 4800

_honest_vote, _honest_start, _honest_heartbeat = CoordinationCore._vote, Coordination.start, PeerDriver.heartbeat


def _lies_now() -> bool:
    named = os.environ.get("LIES_WHILE", "")
    return not named or Path(named).exists()


def _vote(self: CoordinationCore, event: Any, offer: Any, plan: Any, now_s: float) -> Sequence[Any]:
    no = PlanVote(accepted=False, reason="no", term=self.chain.granted_term, unfit=True)
    commands = _honest_vote(self, event, offer, plan, now_s)
    if not _lies_now():
        return commands
    return [
        msgspec.structs.replace(command, message=no)
        if isinstance(getattr(command, "message", None), PlanVote)
        else command
        for command in commands
    ]


def _heartbeat(self: PeerDriver) -> Heartbeat:
    said = _honest_heartbeat(self)
    if not _lies_now():
        return said
    forged = Holding(era=said.era, version=FORGED, layers=all_layer_keys(self.services.spec.model))
    return msgspec.structs.replace(said, holdings=(forged, *said.holdings))


async def _lie(self: Coordination) -> None:
    while True:
        await asyncio.sleep(1.0)
        live, endpoint = self.plan, self._endpoint
        if not _lies_now() or live is None or endpoint.peer_id not in live.plan.electors:
            continue
        others = [peer for peer in live.plan.members if peer != endpoint.peer_id]
        order = propose_exclusion({public_key_of(PeerID(peer)): b"" for peer in others}, base=live.digest)
        signature = sign_statement(endpoint.identity, "exclusion", run=endpoint.run, body=order.body)
        at = live.plan.electors.index(endpoint.peer_id)
        self.exclude(msgspec.structs.replace(order, votes=((at, signature),)))
        sys.stdout.write('{"event":"Lied"}\n')
        sys.stdout.flush()
        for peer in others:
            with contextlib.suppress(Refused, RemoteError, Unreachable):
                await endpoint.ask(peer, Halt(at_once=True), Halted)


async def _start(self: Coordination) -> None:
    await _honest_start(self)
    self._lies = asyncio.create_task(_lie(self))  # type: ignore[attr-defined]


CoordinationCore._vote = _vote  # type: ignore[method-assign, assignment]
Coordination.start = _start  # type: ignore[method-assign]
PeerDriver.heartbeat = _heartbeat  # type: ignore[method-assign]
