"""Signs this peer's state for the run's certificates: a plan certifies a version of a layer group that most of the
group's members have signed.

A member signs its group's layers at every version of which snapshots are written. After a restart a peer also signs the
saved layers that its disk has of its groups: all other members may have restarted too, and lost their signatures.
"""

import logging

from shoal.peer.disk.archive import Archive
from shoal.peer.model.state import StageState
from shoal.peer.presence.reports import Reports
from shoal.protocol.certificate import Attested, root_of, state_body
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.layers import group_keys
from shoal.protocol.plan import Plan
from shoal.protocol.ports import Compute
from shoal.protocol.spec import ModelSpec

logger = logging.getLogger(__name__)

_KEPT = 2
"""Number of signed versions kept of each layer group: as many as plans certify."""
_Word = tuple[tuple[int, int], tuple[str, ...]]
"""A state that a member can sign: ((era, version), keys of its layers)."""


class Attesting:
    """The signatures that one peer gives to states."""

    def __init__(
        self,
        archive: Archive,
        *,
        endpoint: Endpoint,
        compute: Compute,
        model: ModelSpec,
        reports: Reports,
    ) -> None:
        self.archive = archive
        self._endpoint = endpoint
        self._compute = compute
        self._model = model
        self._reports = reports
        self._signed: dict[_Word, Attested | None] = {}
        """State, as ((era, version), layer keys) -> our signature of it; None: the signature is being made."""
        self._certified: frozenset[_Word] = frozenset()

    @property
    def told(self) -> tuple[Attested, ...]:
        """Our signatures of states that no plan certifies yet; heartbeats report them."""
        return tuple(word for at, word in self._signed.items() if word is not None and at not in self._certified)

    def follow(self, plan: Plan) -> None:
        """Stop reporting signatures of states that the plan certifies."""
        self._certified = frozenset((entry.age, entry.keys) for entry in plan.certified)

    async def sign(self, state: StageState, *, era: int) -> None:
        """Sign a state that we have reached by a step, or that is on our disk."""
        age, keys = (era, state.version), tuple(state.layers)
        if (age, keys) in self._signed or (age, keys) in self._certified:
            return
        self._signed[age, keys] = None
        proofs = await self._compute.run_on_host(state.proofs)
        endpoint = self._endpoint
        body = state_body(era=era, version=state.version, root=root_of(proofs))
        signature = endpoint.seals.sign_statement(endpoint.identity, "state", run=endpoint.run, body=body)
        self._signed[age, keys] = Attested(era, state.version, proofs, signature)
        ages = sorted(other for other, of in self._signed if of == keys)
        for old in ages[:-_KEPT]:
            del self._signed[old, keys]
        self._reports.hurry()

    async def sign_stored(self, plan: Plan) -> None:
        """Sign our groups' layers that an earlier process of this peer has saved, if no plan certifies them."""
        for group in plan.groups_of(self._endpoint.peer_id):
            keys = group_keys(self._model, plan, group)
            newest = max((age for age, of in self._certified if of == keys), default=(-1, 0))
            for era, version in self.archive.since(newest, keys)[-_KEPT:]:
                if ((era, version), keys) in self._signed:
                    continue
                layers = await self.archive.read(era, version, keys)
                if tuple(sorted(layers)) == tuple(sorted(keys)):
                    logger.info("signing version %d of %s, which was saved here", version, keys[0])
                    state = StageState(version=version, layers={key: layers[key] for key in keys})
                    await self.sign(state, era=era)
