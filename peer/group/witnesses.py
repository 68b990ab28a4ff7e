"""Sign the states to which this holder steps. Offer each newcomer the newest state that most of its voters (holders,
chosen in `../replica/attestations.py`) have signed. Recent states are kept so that the other voters have time to sign.

While every member of the group holds the state, no state is hashed, signed or kept for newcomers.
"""

import logging
from dataclasses import dataclass

from shoal.peer.base.outbox import Outbox
from shoal.peer.base.tasks import Tasks
from shoal.peer.model.state import StageState
from shoal.peer.replica.attestations import Attestations, is_majority
from shoal.peer.replica.views import GroupView
from shoal.protocol.certificate import root_of, state_body
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import (
    DIGEST_CHARS_MAX,
    PINNED_BYTES_MAX,
    SIGNATURES_PER_OFFER_MAX,
    WITNESSED_VERSIONS_MAX,
)
from shoal.protocol.messages import Attestation, Done, StateOffer
from shoal.protocol.ports import Compute

logger = logging.getLogger(__name__)

Signatures = tuple[tuple[PeerID, bytes], ...]


@dataclass(frozen=True, slots=True)
class Witnessed:
    """A state that may be offered, with the digests of its layers and the holders' signatures."""

    state: StageState
    proofs: tuple[tuple[str, str], ...]
    signatures: Signatures = ()


class Witnesses:
    """One member's signed states, for as long as the member has its place in the group."""

    def __init__(self, core: GroupView, *, endpoint: Endpoint, compute: Compute, tasks: Tasks) -> None:
        self._core = core
        self._endpoint = endpoint
        self._compute = compute
        self._tasks = tasks
        self._outbox = Outbox(endpoint)
        self._attestations = Attestations()
        self._kept: dict[int, tuple[Witnessed, str]] = {}
        """Version -> (state, root: the digest of the whole state, which we sign)."""
        self._signing: set[int] = set()

    def install(self) -> None:
        self._endpoint.on(Attestation, self._on_attestation, stage=self._core.stage)

    async def close(self) -> None:
        await self._outbox.close()
        self._kept.clear()

    def look(self, state: StageState | None) -> None:
        """Sign `state` if some member lacks it, else drop all states and signatures. Call this after a step or plan."""
        core = self._core
        if core.ready and state is not None and set(core.group_peers) - set(core.full_members):
            self._tasks.spawn(self._sign(state), f"sign version {state.version}")
        else:
            self._kept.clear()
            self._attestations.clear()

    def mate_lost(self, mate: PeerID) -> None:
        self._outbox.forget(mate)

    async def offer(self, newcomer: PeerID, state: StageState, version: int) -> Witnessed | None:
        """Return the state that `newcomer` may fetch. Args: version: the version that it asks for; < 0: the newest that
        most of its voters have signed.

        Returns: None: the plan does not name `newcomer` in the group, or the requested version is not kept here. The
        signatures of a requested version are those known so far.
        Raises: Refused: too few holders have signed any kept state so far.
        """
        core = self._core
        if newcomer not in core.group_peers:
            return None
        if version >= 0:
            return self._signed(version, core.voters(newcomer)) if version in self._kept else None
        await self._sign(state)
        asked = core.voters(newcomer)
        for at in sorted(self._kept, reverse=True):
            signers = self._attestations.signers(at, self._kept[at][1])
            if is_majority(sum(peer in signers for peer in asked), asked):
                return self._signed(at, asked)
        self._tell(state.version)  # again: a holder may not have known us as a member the first time
        raise Refused(core.me, "waits until most holders have signed what it holds")

    def _signed(self, version: int, asked: tuple[PeerID, ...]) -> Witnessed:
        """Return the kept state of `version` with its signatures, those of `asked` first."""
        found, root = self._kept[version]
        signers = self._attestations.signers(version, root)
        ranked = sorted(signers.items(), key=lambda signed: (signed[0] not in asked, signed[0]))
        return Witnessed(found.state, found.proofs, tuple(ranked[:SIGNATURES_PER_OFFER_MAX]))

    async def _sign(self, state: StageState) -> None:
        if state.version in self._kept or state.version in self._signing:
            return
        self._signing.add(state.version)
        try:
            proofs = (await self._compute.run("step", state.proofs, flop=0.0)).value
        finally:
            self._signing.discard(state.version)
        core, endpoint, root = self._core, self._endpoint, root_of(proofs)
        body = state_body(era=endpoint.era, version=state.version, root=root)
        signature = endpoint.seals.sign_statement(endpoint.identity, "state", run=endpoint.run, body=body)
        self._kept[state.version] = Witnessed(state, proofs), root
        self._attestations.heard(core.me, state.version, root, signature)
        num_bytes = sum(layer.num_bytes for layer in state.layers.values())
        room = max(2, min(WITNESSED_VERSIONS_MAX, PINNED_BYTES_MAX // max(1, num_bytes)))
        for old in sorted(self._kept)[:-room]:
            del self._kept[old]
        self._tell(state.version)

    def _tell(self, version: int) -> None:
        core = self._core
        if version not in self._kept:
            return
        root = self._kept[version][1]
        signature = self._attestations.signers(version, root)[core.me]
        for holder in core.holders:
            message = Attestation(stage=core.stage, version=version, root=root, signature=signature)
            self._outbox.post(holder, version, message)

    async def _on_attestation(self, source: PeerID, message: Attestation) -> Done:
        if not self._core.has_place(source):
            raise Refused(self._core.me, f"does not know the sender as a member of group {self._core.stage}")
        if len(message.root) > DIGEST_CHARS_MAX or not _holds(self._endpoint, source, message.signature, message):
            raise RemoteError(source, "has not signed what it says it holds")
        self._attestations.heard(source, message.version, message.root, message.signature)
        return Done()


def is_witnessed(endpoint: Endpoint, offer: StateOffer, keys: tuple[str, ...], asked: tuple[PeerID, ...]) -> bool:
    """True if the offered state has exactly the layers `keys`, and more than half of the voters `asked` signed it."""
    if tuple(key for key, _ in offer.digests) != keys:
        return False
    root, signers = root_of(offer.digests), set[PeerID]()
    for peer, signature in offer.signatures[:SIGNATURES_PER_OFFER_MAX]:
        said = Attestation(stage=0, version=offer.version, root=root, signature=signature)
        if peer in asked and peer not in signers and _holds(endpoint, peer, signature, said):
            signers.add(peer)
        if is_majority(len(signers), asked):
            return True
    return False


def _holds(endpoint: Endpoint, signer: PeerID, signature: bytes, said: Attestation) -> bool:
    body = state_body(era=endpoint.era, version=said.version, root=said.root)
    return endpoint.seals.statement_holds(signer, signature, "state", run=endpoint.run, body=body)
