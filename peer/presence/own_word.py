"""Makes this peer's messages about itself: the presence update for its neighbours, the advert for the coordinator."""

from dataclasses import dataclass

from shoal.peer.base.plans import Plans
from shoal.peer.compute.probe import DeviceProbe
from shoal.peer.links.probing import LinkProbing
from shoal.peer.presence.life import Life
from shoal.peer.presence.parts import Parts
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.messages import Advert, PresenceUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Facts about a peer that its user states; they are not measured."""

    name: str = ""
    machine: str = ""
    """Name of the machine: equal for peers that share a network card (`Advert.machine`)."""
    memory_bytes: int | None = None
    """Bytes of memory to claim; None: the free memory. Simulations set it, because the free memory of the machine that
    simulates differs from run to run."""


class OwnWord:
    """Makes one peer's messages about itself. Args: has_text: the peer has the training text, which stage 0 needs."""

    def __init__(
        self,
        endpoint: Endpoint,
        plans: Plans,
        life: Life,
        parts: Parts,
        links: LinkProbing,
        claims: Claims,
        *,
        has_text: bool,
    ) -> None:
        self._endpoint, self._plans, self._life, self._parts, self._links = endpoint, plans, life, parts, links
        self._claims, self._has_text = claims, has_text
        self.device: DeviceProbe | None = None
        """The measured device; None before it is measured."""
        self.claimed_bytes: int | None = None
        """Bytes of memory to claim after a job ran out of memory; None: the measured bytes."""

    def presence(self) -> PresenceUpdate:
        """Return our present presence update, except for its number."""
        plan, stage = self._plans.newest, self._parts.stage
        return PresenceUpdate(
            incarnation=self._life.incarnation,
            plan_sequence=plan.sequence if plan is not None else 0,
            stage=stage.group_id if stage else -1,
            version=stage.version if stage else 0,
            ready=stage.is_ready if stage else False,
            is_open=stage.is_open if stage else False,
            learner=stage.is_learner if stage else False,
            draining=self._life.is_leaving or (stage is not None and stage.is_draining),
            experts=self._parts.places,
        )

    def advert(self) -> Advert:
        assert self.device is not None, "not started"
        return Advert(
            name=self._claims.name,
            device=self.device.device,
            flop_per_s=self.device.flop_per_s,
            memory_bytes=self.device.memory_bytes if self.claimed_bytes is None else self.claimed_bytes,
            upload_bytes_per_s=self._links.bytes_per_s,
            download_bytes_per_s=self._links.bytes_per_s,
            addresses=self._endpoint.transport.addresses(),
            has_data=self._has_text,
            machine=self._claims.machine,
            card_bytes_per_s=self._links.card_bytes_per_s,
        )
