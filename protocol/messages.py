"""Control messages: closed, typed, at most 256 KiB; decoded once, at the edge. Pure.

Five conversations: a peer with the coordinator (heartbeat, plans, status), a peer with the directory (records), a
replica with its stage group (progress, rounds, digests, claims), a newcomer with a holder (state), and whoever asks the
model something with the stages (inference).
Relative durations only: peers share no clock.

This file is long because the closed union of everything that may cross the wire is one thing to read.
"""

import msgspec

from shoal.protocol.certificate import Attested
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.names import is_name
from shoal.protocol.wire_format import Formats, WireFormat


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    pass


class EraMessage(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """A message that concerns one era's training: `Endpoint` stamps the sender's era and revision, and refuses
    another's.

    An era ends when a layer has no holder left and the run goes back to a snapshot; versions grow within an era.
    """

    era: int = 0
    revision: int = 0
    """The revision of the spec that the sender trains by: another one has other learning rates, and another end."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A structure inside messages."""


# --- what a peer says of itself, on the directory and in heartbeats ---


class Advert(_Part, frozen=True):
    """Describes a peer by its own claims; the coordinator trusts what neighbours measured more than these."""

    name: str
    device: str
    """`cpu`, or the card's name."""
    flop_per_s: float
    """The speed that the probe measured on this model's own layer shape, fp32."""
    memory_bytes: int
    upload_bytes_per_s: float
    download_bytes_per_s: float
    addresses: tuple[str, ...]
    has_data: bool
    """The peer's text has the run's digest, so the peer may serve stage 0."""
    willing_to_coordinate: bool = True
    protocol_version: int = PROTOCOL_VERSION
    machine: str = ""
    """The same for peers of one machine, which share its network card. Empty: not known."""
    card_bytes_per_s: float = 0.0
    """The most that has gone out over several links at once; 0: not known."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"name has a control character or a line break: {self.name!r}")


class LinkReport(_Part, frozen=True, array_like=True):
    """Reports what the sender measured of its link with `peer`; 0: not known."""

    peer: PeerID
    round_trip_s: float
    bytes_per_s: float
    """The rate towards `peer`."""
    received_bytes_per_s: float = 0.0
    """The highest rate seen from `peer`: it can send at least so much."""
    num_probes: int = 0
    """How many probes `bytes_per_s` is the best of; 0: it is what frames have shown."""
    num_failed: int = 0
    """How many calls and frames to `peer` have failed in a row, with no answer of `peer` since; 0: none."""
    has_fallen: bool = False
    """Whether the last two probes agree that the rate is far less than the best one before them."""


class CommitReport(_Part, frozen=True, kw_only=True):
    """The ledger of one commit, from the group's leader."""

    era: int = 0

    stage: int
    step: int
    members: int
    microbatches: int
    """Microbatches that were contributed, each counted once."""
    duplicates: int
    given_up: int
    tokens: int
    staleness_steps_mean: float
    loss: float | None
    """The mean loss over the step's microbatches; only the last stage knows it."""
    digest: str
    """The digest of the new state; equal on all members."""
    dissenting: int = 0
    """Members whose state was another; they fetch the group's."""
    gradient_norm: float | None = None
    """2-norm of the reduced gradient of the group's layers, before clipping; None: the sender did not step itself."""
    age_s: float = 0.0
    """The age of the commit when the report was sent: the report may have waited for a coordinator."""


class ValidationReport(_Part, frozen=True, kw_only=True):
    era: int = 0
    step: int
    """The version that was validated."""
    loss: float
    microbatches: int


class Holding(_Part, frozen=True):
    """A whole snapshot on the sender's disk."""

    era: int
    version: int
    layers: tuple[str, ...]
    """Layer keys."""


class PaceMark(_Part, frozen=True, array_like=True):
    """One point of the run's progress (`coordinator.pace`): `age_s` ago the steps up to `step` were committed."""

    era: int
    step: int
    age_s: float
    num_steps: int
    """Steps since the mark before."""
    tokens: int
    """Tokens since the mark before."""


# --- peer and coordinator ---


class Heartbeat(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Goes every `heartbeat_s` from every peer to the coordinator that the peer knows."""

    advert: Advert
    plan_sequence: int
    plan_digest: str
    era: int = 0
    """The era of `version` and `synced`; lower than the plan's while the sender has not followed the plan yet."""
    stage: int | None
    version: int
    synced: bool
    """The sender holds its stage's state and takes traffic."""
    light: tuple[int, int] | None = None
    """The sender computes with its stage's weights while the state comes: (layers whose state it has, layers of the
    stage, embeddings and head counted). None: the sender is not light."""
    draining: bool
    commits: tuple[CommitReport, ...] = ()
    validations: tuple[ValidationReport, ...] = ()
    """Every heartbeat repeats the newest that the sender led, so that no coordinator misses the run's last one."""
    links: tuple[LinkReport, ...] = ()
    """Some of the sender's links: they take turns, `LINKS_PER_HEARTBEAT_MAX` at most."""
    holdings: tuple[Holding, ...] = ()
    attested: tuple[Attested, ...] = ()
    """What the sender has signed and the plan that it obeys does not certify yet."""
    carried: Holding | None = None
    """What the sender held when the last layout ended, and keeps in memory for whoever holds the layers now."""
    unfetched_bytes: int = 0
    """Bytes that the sender is still to fetch, while training goes on, for the layout that follows the plan
    `plan_sequence`: layers, and the steps by which those that it has are behind. 0 if it has no room to fetch any."""
    held: tuple[tuple[int, int], ...] = ()
    """(group, version) of the experts whose state the sender holds."""
    loads: tuple[int, ...] = ()
    """Tokens that the sender's microbatches have sent to each expert, over all layers of its stage, since it took its
    place there; empty if the experts are not placed."""
    silent: tuple[PeerID, ...] = ()
    """Members that the sender tries to reach and cannot: a hint, which makes the coordinator look sooner."""
    unsound: tuple[PeerID, ...] = ()
    """Members that have sent the sender gradients with NaN, infinity or numbers that no gradient has, or restart without
    end. One member's word proves nothing: people see it. A majority of the member's group takes its place."""
    forward_s: float = 0.0
    """Median seconds of a forward here; 0 before the first."""
    window: int = 0
    """Microbatches this stage-0 replica keeps in flight."""
    end: bytes = b""
    """The sender's `end` statement: all that it holds is at the run's last version. Empty: it is not."""
    ends: tuple[tuple[PeerID, bytes], ...] = ()
    """(member, its `end` statement) of enough members to prove that the run is done, for a coordinator that has not
    heard them all."""
    revision: int = 0
    """The revision of the spec that the sender trains by. A coordinator that goes by another one does not count the
    sender in."""
    paused_s: float | None = None
    """How long the sender's owner has had the device back; None: the sender is not paused."""
    unsaved_s: float = 0.0
    """Seconds since the sender's stage last wrote a snapshot of a version, or since the sender took its place there."""
    shortages: int = 0
    """How often the sender had no memory for what it was given: its advert claims less since then."""


class HeartbeatReply(_Message, frozen=True):
    """`plan` is the live plan's link (`SignedPlan.link`) if the asker's is another, else empty.

    Wherever a message names a live plan it carries the link, so that whoever gets it can check the votes.
    """

    coordinator: PeerID
    term: int
    is_coordinator: bool
    plan: bytes = b""
    ends: tuple[tuple[PeerID, bytes], ...] = ()
    """(member, its `end` statement) of a majority of every group's members: the run is done. Empty: it is not."""
    revision: int = 0
    """The revision of the spec that the sender trains by: `ends` belong to that revision."""
    pace: tuple[PaceMark, ...] = ()
    """Recent progress, oldest first: the next coordinator goes on from it."""
    save_at: int = 0
    """Every stage is to write a snapshot of this version when it comes to it; 0: none is due."""
    safe: tuple[int, int] = (0, 0)
    """(era, version) of the newest snapshot of which every layer is on two disks of the plan's members: older ones are
    needed no more. Version 0: there is none."""
    probe: tuple[PeerID, ...] = ()
    """The peers towards which the coordinator wants the asker to measure its link, `PROBES_PER_REPLY_MAX` at most."""
    beside: tuple[PeerID, ...] = ()
    """The peers that say to be behind the asker's network card, where it is asked to measure; `TOGETHER_MAX` at most.
    With them it finds out what the card carries."""
    in_doubt: bool = False
    """The run is far slower than what is known of devices and links explains."""


class TermRequest(_Message, frozen=True):
    """A member of the live plan asks the other members for `term`, before it proposes a plan in it."""

    term: int
    live: bytes
    """The sender's live plan; whoever obeys an older one adopts it first."""
    handed_over: bool
    """The coordinator itself gave the term away, so members that still hear it need not wait until they do not."""
    sounding: bool = False
    """The sender asks whether the receiver would grant the term, and the receiver promises nothing: a peer that only
    lost its way to the coordinator spends no term."""


class TermGrant(_Message, frozen=True):
    """Answers a TermRequest. If granted, the sender votes for no plan of a lower term any more, nor for another
    coordinator's of this one."""

    granted: bool
    reason: str = ""
    term: int = 0
    """The highest term that the sender has granted or obeyed."""
    live: bytes = b""
    """The sender's live plan, if newer than the request's."""
    accepted: bytes = b""
    """The plan that the sender has voted for after the live plan; it may be live by now, so the candidate must finish
    it first."""
    accepted_term: int = 0
    """The term in which the sender voted for that plan."""


class PlanOffer(_Message, frozen=True):
    """A coordinator asks a member of the predecessor to acknowledge `plan`; laggards find its predecessor enclosed."""

    term: int
    """The term in which the sender offers the plan: the plan's own, or a later one when the sender finishes a dead
    coordinator's plan."""
    plan: bytes
    predecessor: bytes
    """Empty if both do not fit in one message; laggards then learn it from their next heartbeat."""


class PlanVote(_Message, frozen=True):
    """Answers a PlanOffer. If accepted, `signature` (a `vote` statement on the offer's term and the plan's digest) is
    shown to everybody once the plan is live."""

    accepted: bool
    reason: str = ""
    term: int = 0
    """The highest term that the sender has granted or obeyed."""
    live: bytes = b""
    """The sender's live plan, if newer than the offer's predecessor."""
    signature: bytes = b""
    unfit: bool = False
    """The plan contradicts what the sender knows, as `reason` says for people."""


class PlanLive(_Message, frozen=True):
    """A majority of the predecessor's members acknowledged `plan`: obey it."""

    plan: bytes


class ChainRequest(_Message, frozen=True):
    """Asks for the live plans behind the one with digest `after`, which the sender obeys. Empty: it knows none."""

    after: str
    reign: int


class ChainLinks(_Message, frozen=True):
    """Carries links, oldest first, as many as fit. If the receiver lacks the plan that the asker named, they begin
    behind the one before its own live plan."""

    links: tuple[bytes, ...]


class Exclude(_Message, frozen=True):
    """An order (`exclusion.py`) that puts keys out of the run; or one vote for such an order, to be put to others'."""

    order: bytes


class Renew(_Message, frozen=True):
    """Asks the run's owner for a certificate that lasts longer."""


class Renewed(_Message, frozen=True):
    """Carries the certificate (`membership.py`)."""

    certificate: bytes


class HandOver(_Message, frozen=True, kw_only=True):
    """The coordinator's last act in a term: `roster` is whom it counts alive, for the successor's first plan."""

    plan: bytes
    roster: tuple[tuple[PeerID, Advert], ...]
    era: int = 0
    version: int = 0
    """Highest version that anybody has named in this era, as far as the sender knows."""
    step: int = 0
    """Steps that most members of every stage have confirmed."""
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    """The version that was validated."""
    pace: tuple[PaceMark, ...] = ()
    """Recent progress, as in `HeartbeatReply`."""
    staleness_steps_mean: float = 0.0
    elapsed_s: float = 0.0
    """Seconds since the run's first plan."""
    searched: bool = False
    """The sender has looked for a better layout than this plan's, and there was none worth its moves."""
    plans: "tuple[PlanNote, ...]" = ()
    """Recent plans, oldest first."""
    loads: tuple[tuple[float, ...], ...] = ()
    """Tokens of late, by stage and expert, where experts are placed; a stage of which nothing is known has none."""
    absent: "tuple[Absence, ...]" = ()
    """Members of the plan that have been silent for a while."""
    records: "tuple[PeerRecord, ...]" = ()
    """How often members and others of late have failed, where experts are placed."""
    calibration: "Calibrated | None" = None
    """What the sender has learned of how fast layouts are beside what was foreseen."""
    arrivals: "tuple[ArrivalStatistics, ...]" = ()
    """The heartbeat arrivals of irregular peers, which may be silent for longer than others."""
    unreachable: "tuple[UnreachablePair, ...]" = ()
    """The pairs of peers that cannot reach each other, by the word of both."""


class Calibrated(_Part, frozen=True, array_like=True):
    """How fast layouts have been, beside what was foreseen of them."""

    learned: tuple[tuple[int, float, int], ...]
    """(number of stages, log(seen / what the objective says with today's figures), the steps behind it), smoothed."""
    era: int
    steady_from: int
    """The live layout has been at work with all its members since this version of `era`; -1: it is not yet."""
    noted: float = 0.0
    """Seen over foreseen, when a search for a better layout last began; 0: it has not been compared yet."""
    factor_then: float = 1.0
    """The factor with which the live plan foresees."""
    off: tuple[float, ...] = ()
    """log(seen tokens/s / tokens/s that its first plan promised), of each of the last layouts before the live one."""


class ArrivalStatistics(_Part, frozen=True, array_like=True):
    """The gaps between a peer's heartbeats, in seconds, as the coordinator's timeout uses them: mean, mean deviation
    and the worst of late (`coordinator/adaptive_timeout.py`)."""

    peer: PeerID
    mean_s: float
    deviation_s: float
    worst_s: float


class UnreachablePair(_Part, frozen=True, array_like=True):
    """Two peers that cannot reach each other, though others reach both."""

    one: PeerID
    other: PeerID
    age_s: float
    """Seconds since one of them last said so."""


class Absence(_Part, frozen=True, array_like=True):
    """A peer that is not heard any more."""

    peer: PeerID
    advert: Advert
    seconds: float
    """Seconds since the peer was heard last."""


class Leave(_Message, frozen=True):
    """Says good-bye: nobody is to wait for the sender."""


class StandingRequest(_Message, frozen=True):
    """Asks where the receiver stands. `shoal recover` sends this, and a voter before it judges a plan; anybody may."""


class Standing(_Message, frozen=True, kw_only=True):
    live: bytes
    """The sender's live plan; empty if it knows none."""
    term: int
    """The highest term that the sender has granted or obeyed."""
    era: int
    stage: int | None
    version: int
    synced: bool
    holdings: tuple[Holding, ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    """(group of experts, version) of all whose state the sender holds."""
    leaves: bool = False
    """The sender drains, or is about to leave the run."""
    revision: int = 0
    """The revision of the spec that the sender trains by."""


class Reset(_Message, frozen=True, kw_only=True):
    """The owner lets the receiver make a plan without votes, as successor of `live`, for `roster` alone: the others of
    that plan are gone, and what is left of it is no majority."""

    mandate: bytes
    live: bytes
    """The highest plan that anybody in reach obeys."""
    version: int
    """The highest version, in that plan's era, that anybody in reach has."""
    roster: tuple[tuple[PeerID, Advert], ...]
    """The peers in reach."""


class StatusRequest(_Message, frozen=True):
    pass


class PeerStatus(_Part, frozen=True, omit_defaults=True):
    peer: PeerID
    name: str
    device: str
    stage: int | None
    version: int
    """The peer's version; -1: this coordinator has not heard the peer yet."""
    synced: bool
    draining: bool
    seen_s_ago: float
    forward_s: float
    window: int
    share: float = 0.0
    """The peer's share of its stage's traffic, by the plan; 0 for a spare."""
    flop_per_s: float = 0.0
    """The speed that the peer's probe measured."""
    paused_s: float | None = None
    """How long the peer's owner has had the device back; None: the peer is not paused."""
    shortages: int = 0
    """How often the peer had no memory for what a plan had given it."""
    light: tuple[int, int] | None = None
    """The peer trains with weights while its state comes: (layers whose state it has, layers of its stage)."""


class ExpertStatus(_Part, frozen=True, omit_defaults=True):
    """One expert of all layers of a stage whose experts are spread over its members."""

    stage: int
    expert: int
    load: float = 0.0
    """Share of the tokens that its stage has sent to experts of late, in [0, 1]; all 0 while nobody has told."""
    holders: tuple[int, ...] = ()
    """The holders that the plan names and that hold the expert's state, as positions in `SwarmStatus.peers`."""
    coming: tuple[int, ...] = ()
    """The holders that the plan names and that have not said yet that they hold the state."""


class PlanNote(_Part, frozen=True, array_like=True):
    """One link of the chain, for people."""

    term: int
    sequence: int
    seconds_ago: float
    """Seconds since the sender began to obey the plan."""
    coordinator: PeerID
    reason: str
    outcome: str = ""
    """How fast the layout was to be, how fast it was while the plan was live, and what bounded it, in a sentence."""


class PeerRecord(_Part, frozen=True, array_like=True):
    """One peer's past, as coordinators have seen it."""

    peer: PeerID
    failures: float
    """Times the peer was lost without a good-bye; those of long ago count in part."""
    seen_s: float
    """Seconds in which a failure of the peer would have been seen."""


class Comparison(_Part, frozen=True, omit_defaults=True):
    """How fast the live layout should be, and how fast it is."""

    foreseen_tokens_per_s: float
    """The figure of the plan when it was made."""
    sentence: str
    seen_tokens_per_s: float = 0.0
    """The median of late, standstills left out; 0: there are too few steps yet."""
    steps: int = 0
    """The steps behind `seen_tokens_per_s`."""
    today_tokens_per_s: float = 0.0
    """What is foreseen now, the figure of `sentence`: with the figures of today, and of synchronous steps while these
    last."""
    bound: str = ""
    """What keeps the layout from being faster (`protocol.plan.Bound`), with the figures of today."""
    stage: int = 0
    """The stage that `bound` is about."""


class SwarmStatus(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Describes the swarm for `shoal status`, the live view and the dashboard; it is made from the coordinator's
    heartbeats."""

    run: str
    name: str
    coordinator: PeerID
    term: int
    plan_sequence: int
    plan_reason: str
    step: int
    steps: int
    tokens_per_s: float
    """Tokens a second over the last minute, or over the last few steps if these are slow; standstills count
    (`coordinator.pace`)."""
    loss: float | None
    validation_loss: float | None
    validation_step: int | None = None
    """The version that was validated."""
    staleness_steps_mean: float
    stages: tuple[tuple[int, int], ...]
    """Layer ranges."""
    peers: tuple[PeerStatus, ...]
    era: int = 0
    """How often the run has begun again: from a snapshot, or with its layers divided into other stages."""
    rollbacks: int = 0
    """How often it has gone back, and lost steps."""
    elapsed_s: float
    plans: tuple[PlanNote, ...] = ()
    """The newest plans that the coordinator has obeyed, oldest first."""
    experts: tuple[ExpertStatus, ...] = ()
    """The experts, by stage and expert; none if every member holds whole layers."""
    left_s: float | None = None
    """Seconds until the last step, at the rate of `tokens_per_s`; None: the time is not known, or nothing moves."""
    stands_s: float = 0.0
    """How long no step has been committed, once that is longer than a step takes; 0: the run goes on."""
    waits_for: str = ""
    """Who or what keeps the run from going on, in words; empty: nothing that is known."""
    risks: tuple[str, ...] = ()
    """What would be lost with one peer, who cannot reach whom, and which plans members refused, in sentences."""
    comparison: Comparison | None = None
    """None: nobody could say how fast the layout should be."""
    formats: Formats | None = None
    """`Plan.formats`."""


class PastCommit(_Part, frozen=True, array_like=True):
    """A commit of a group in which the sender was."""

    seconds_ago: float
    report: CommitReport


class PastValidation(_Part, frozen=True, array_like=True):
    """A validation that the sender led."""

    seconds_ago: float
    report: ValidationReport


class HistoryRequest(_Message, frozen=True):
    """Asks a peer that keeps a record of the run what it has seen of the run; any member may ask."""

    commits_from: tuple[int, int]
    """(era, step) of the first commit wanted."""
    validations_from: tuple[int, int]
    """(era, version) of the first validation wanted."""


class History(_Message, frozen=True):
    """Carries the oldest that the sender remembers of what was asked for, in order: `HISTORY_PER_REPLY_MAX` of each at
    most."""

    commits: tuple[PastCommit, ...] = ()
    validations: tuple[PastValidation, ...] = ()


# --- inside a stage group ---


class ExpertPlace(_Part, frozen=True, array_like=True):
    """Describes the sender as a member of a group of experts' holders, with the fields of a Hello for that group."""

    group: int
    incarnation: int
    version: int
    ready: bool
    is_open: bool
    draining: bool = False


class Hello(EraMessage, frozen=True, kw_only=True):
    """Says where the sender stands: to its group and to both neighbouring stages, when that changes. The answer is a
    Hello."""

    incarnation: int
    """Grows with every start of the sender's process and every stage it begins in: what an earlier one held is gone."""
    count: int = 0
    """A count of the sender's Hellos: they may overtake each other."""

    plan_sequence: int
    stage: int
    """The sender's stage; -1: it has none."""
    version: int
    ready: bool
    """The sender holds its stage's state and takes part in rounds."""
    is_open: bool
    """The sender takes new traffic; a newcomer may be ready and not open yet."""
    light: bool = False
    """The sender takes part in rounds with its stage's weights alone, rounded to bf16: nobody may fetch state from it
    or leave its stage to it, it owns no part of a sum, and it has no vote on digests."""
    draining: bool = False
    """The sender is about to leave: it is ready and not open until all it owes is done, whether or not a plan still
    names it."""
    experts: tuple[ExpertPlace, ...] = ()
    """The sender's place in each group of experts' holders, by group."""


class Progress(EraMessage, frozen=True):
    """Says what the sender has accumulated for `step`; it goes to the whole group whenever that grows."""

    incarnation: int
    """The incarnation, as in the sender's Hello: this message may overtake that Hello, or come after the sender has
    begun anew."""
    count: int
    """A count of the sender's messages in this incarnation: they may overtake each other."""
    stage: int
    step: int
    indices: bytes
    """Bitmap: bit i set, microbatch i is accumulated here."""
    lead: PeerID
    """The member that the sender takes for the group's leader, empty if it takes nobody: a leader acts once all ready
    members name it."""
    claimed: bytes
    """Bitmap, stage 0 only: microbatches that the sender has been granted, accumulated or not."""
    loss_sum: float
    staleness_sum: int
    apart: tuple[tuple[int, float, int], ...] = ()
    """(index, loss, staleness) of those that ran again and are not in the sum yet: a round may leave them out."""


class RoundMember(_Part, frozen=True):
    peer: PeerID
    bandwidth: float
    indices: bytes
    """What the member brings: all that is in its sum, and as much as the leader says of what it keeps apart."""


class RoundStart(EraMessage, frozen=True):
    """The group's leader opens the reduction of `step`; the members are exactly these, in rank order."""

    stage: int
    step: int
    attempt: int
    """The attempt grows with the plan's sequence and with every retry, so that the latest leader's latest message
    holds."""
    members: tuple[RoundMember, ...]
    duplicates: int
    given_up: int
    loss_sum: float
    staleness_sum: int
    form: WireFormat = "fp32"
    """The format in which its pieces travel, one of the run's `WireSpec.sums`."""
    light: tuple[PeerID, ...] = ()
    """The members that hold weights alone: they contribute, get the reduced gradient, and own no part of the sum."""


class RoundEnded(EraMessage, frozen=True):
    """The sender has the reduced gradient of `step` by this attempt, and waits with it for the other end of a tied
    model (`peer/group/tied.py`). Who answers takes part in no other attempt."""

    stage: int
    step: int
    attempt: int


class Digest(EraMessage, frozen=True):
    """The sender has stepped to `version` and this is its state's digest."""

    stage: int
    version: int
    digest: str


class Attestation(EraMessage, frozen=True):
    """The sender holds this state of its group's layers at `version`, and has signed that for others to hand on: said
    to the other holders while somebody joins the group, who is to fetch only what most of them have signed."""

    stage: int
    version: int
    root: str
    """The root of the digests of all layers of the group (`peer/group/attestations.py`)."""
    signature: bytes


class Claim(EraMessage, frozen=True):
    """A stage-0 replica asks the group's leader for microbatches to make."""

    count: int


class Grant(EraMessage, frozen=True):
    """`items` are (step, index); index < 0 is validation microbatch -1 - index at version `step`."""

    items: tuple[tuple[int, int], ...]
    steps_ahead: int = -1
    """How far the leader wants everybody to run ahead, and with how much in flight (`replica/flow.py`); -1: the
    leader does not know yet."""
    gain: float = 1.0


class Repair(EraMessage, frozen=True):
    """A group's leader tells stage 0 that what these microbatches of `step` left at the leader's stage died with a
    replica. They are to run again; whoever holds their gradient already computes and adds nothing."""

    step: int
    indices: bytes


class Again(EraMessage, frozen=True):
    """Stage 0's leader tells a group member which (step, index) of what is to run again are that member's to make."""

    items: tuple[tuple[int, int], ...]


class HandBack(EraMessage, frozen=True):
    """The sender, of `stage`, pauses or lags and will not make these: (step, index, whether it may have run). The peer
    that sent them sends them elsewhere; those of stage 0 are made by its leader."""

    stage: int
    items: tuple[tuple[int, int, bool], ...]


class ExpertDone(EraMessage, frozen=True, kw_only=True):
    """A member of `stage` is through with a microbatch: what these experts' holder has added up of it is whole.

    Refused if the holder lacks some of it; then another one gets it all."""

    stage: int
    incarnation: int
    """The incarnation of the sender's membership, as in its ExpertTokens; so is `passage`."""
    passage: int
    step: int
    index: int
    experts: tuple[tuple[int, int], ...]
    """(expert, how many layers' backwards it has had). Who was sent no token has had none, and counts it all the
    same: every microbatch of a step is counted once by every expert."""
    again: bool
    """The microbatch may have come before, maybe to another holder: keep what it adds apart."""


class ValidationResult(EraMessage, frozen=True):
    """A stage-0 replica tells its leader the loss of one validation microbatch."""

    step: int
    index: int
    loss: float


# --- state for newcomers ---


class StateRequest(EraMessage, frozen=True):
    """Pin your current version (or `version`, if still there) and describe it."""

    layers: tuple[str, ...]
    version: int = -1
    stored_era: int = -1
    """If >= 0, the receiver describes its snapshot of that era's `version`, of as many of `layers` as it has, and not
    what it trains. -3: of what it trains the parameters alone, rounded to bf16."""
    ahead: bool = False
    """The sender is to hold the one layer of `layers` in the following layout: it fetches what is trained now, replays
    the steps that come, and compares the state with the holders' when the layout ends. So the offer has no digest."""
    base: int = -1
    """The version of parameters alone that the sender has; -1: none."""
    to_compare: bool = False
    """The sender has the state of its group's layers already: describe what most holders have signed, and pin
    nothing."""


class StateOffer(EraMessage, frozen=True):
    """`digests` per layer; the version stays pinned for `pinned_s` from each request."""

    version: int
    digests: tuple[tuple[str, str], ...]
    pinned_s: float
    signatures: tuple[tuple[PeerID, bytes], ...] = ()
    """Signatures for a newcomer of the group: which holders have signed the root of these very digests, and how
    (`Attestation`)."""
    base: int = -1
    """The version of parameters alone that was named in the request, if the sender has that, too, and can send the
    difference to it; -1: it cannot."""


class Keep(EraMessage, frozen=True):
    """Fetch the sender's state of `version` and keep it on disk: the sender's whole stage may die.

    Answered at once; fetched when the receiver has time."""

    version: int
    layers: tuple[str, ...]


class Halt(EraMessage, frozen=True):
    """The sender leaves, and holds a stage alone: the leader of stage 0 is to begin no further step for a while.

    `at_once`: nor to hand out what is left of a step that has begun, which then is not committed.
    """

    at_once: bool = False


class Halted(_Message, frozen=True):
    """Says that every stage comes to `version`, and none goes past it while the halt lasts."""

    version: int


class Save(EraMessage, frozen=True):
    """Write your layers to your disk at `version`, which every stage is about to reach. The answer comes when that is
    done."""

    version: int


class Saved(_Message, frozen=True):
    """The sender's layers are on its disk at `version`. A version below the one asked for: the sender has not come to
    that one yet."""

    version: int


class StateChunkRequest(EraMessage, frozen=True, kw_only=True):
    """Send elements [start, stop) of one tensor of one layer, as StateChunk frames: 0 parameters, 1 and 2 moments, 3
    the reduced gradient with which the layer stepped to `version`."""

    stored_era: int = -1
    """The era of a stored snapshot, as in the StateRequest; of a gradient, its era."""

    version: int
    layer: str
    tensor: int
    start: int
    stop: int
    holder: PeerID | None = None
    """Who has it; the receiver is to get it from there and to pass it on. None: the receiver has it."""
    base: int = -1
    """The version of parameters alone that the sender has, where the receiver offers the difference to it
    (`StateOffer.base`). -1: send them as they are."""


class ReducedRequest(EraMessage, frozen=True):
    """Send the reduced gradient of `step` (once there is one) as BULK frames; for a newcomer that catches up.

    The version of the answer, a `Digest`, says what comes: beyond `step`, the gradient; `step`, nothing but pieces of
    its round, which are on their way to the sender; less, nothing.
    """

    stage: int
    step: int


class TiedRequest(EraMessage, frozen=True):
    """Send your stage's reduced gradient of a tied model's matrix, of `step`, as soon as it is there."""

    stage: int
    """The receiver's."""
    step: int
    serial: int = 0
    """The sender's count of these."""
    peek: bool = False
    """Send nothing, and say whether you have it with both ends in it, or need it not."""


class TiedOffer(EraMessage, frozen=True):
    """Answers TiedRequest; the gradient follows as frames."""

    is_whole: bool
    """It has the gradient of the other end in it."""
    form: WireFormat = "fp32"
    """The format of the frames."""


class InferenceRequest(_Message, frozen=True, kw_only=True):
    """Whoever has an invite to train asks the swarm's stages what the model says to some tokens. The receiver sees to
    it, whatever it holds itself."""

    way: int = 0
    """Chosen by the asker: requests with the same one go to the same members."""
    session: int = 0
    """Chosen by the asker, for tokens that come in several requests: the stages remember those before. 0: they need
    not."""
    version: int = -1
    """The version of the weights; -1: the newest, which the answer names."""
    rows: int = 1
    position: int = 0
    """Tokens of the session so far."""
    tokens: bytes
    """int32 [rows, T]."""
    targets: bytes = b""
    """int32 [rows, T], whose likelihoods are asked for, `IGNORED` where none is. Empty: what follows the last token."""
    begins: bytes = b""
    """uint8 [rows, T], whether a document begins. Empty: attention looks across documents."""


class InferenceAnswer(_Message, frozen=True, kw_only=True):
    """Answers an InferenceRequest: with targets, float32 [rows, T] log-likelihoods and uint8 [rows, T], whether each is
    the likeliest; without, the likeliest tokens, int32 [K], and their logits, float32 [K]."""

    version: int
    era: int
    payload: bytes
    is_past: bool = False
    """There is no answer, because a stage is past the version that was asked for: a newer one may be asked for."""


class InferenceOutput(EraMessage, frozen=True, kw_only=True):
    """The end of a request's way through the stages, to the peer that was asked."""

    serial: int
    version: int = -1
    payload: bytes = b""
    refused: str = ""
    """The reason why there is none; for people."""
    is_past: bool = False
    """The reason is that the version that was asked for is gone."""


class Ping(_Message, frozen=True):
    """Measures a round trip; `pad` is sent back."""

    pad: bytes = b""


class PingRequest(_Message, frozen=True):
    """The coordinator, which `peer` does not answer, asks another member to ping it. The answer is that peer's Ping."""

    peer: PeerID


class ProbeTogether(_Message, frozen=True):
    """Asks a peer behind the same network card to probe `links` while the sender does so, too."""

    links: tuple[LinkReport, ...]


class Probed(_Message, frozen=True):
    """Answers a ProbeTogether: for each link how many bytes arrived, and how many seconds after the request the last of
    them did. Empty: the sender declines."""

    arrived: tuple[tuple[int, float], ...]


class Done(_Message, frozen=True):
    """Answers a message that needs no other answer."""


class Refusal(_Message, frozen=True):
    """The sender has understood the message and declines; the sentence is for people.

    `keeps_out` says that the run does not let the sender in, whatever it asks.
    """

    reason: str
    keeps_out: bool = False


Message = (
    Heartbeat
    | HeartbeatReply
    | TermRequest
    | TermGrant
    | PlanOffer
    | PlanVote
    | PlanLive
    | ChainRequest
    | ChainLinks
    | Exclude
    | Renew
    | Renewed
    | HandOver
    | Leave
    | StandingRequest
    | Standing
    | Reset
    | StatusRequest
    | SwarmStatus
    | HistoryRequest
    | History
    | Hello
    | Progress
    | RoundStart
    | RoundEnded
    | Digest
    | Attestation
    | Claim
    | Grant
    | Repair
    | Again
    | HandBack
    | ExpertDone
    | ValidationResult
    | StateRequest
    | StateOffer
    | Keep
    | Halt
    | Halted
    | Save
    | Saved
    | StateChunkRequest
    | ReducedRequest
    | TiedRequest
    | TiedOffer
    | InferenceRequest
    | InferenceAnswer
    | InferenceOutput
    | Ping
    | PingRequest
    | ProbeTogether
    | Probed
    | Done
    | Refusal
)


# --- headers of tensor frames: shapes and dtypes follow from the run spec, never from the sender ---


class Activation(EraMessage, frozen=True):
    """Goes to the next stage. Payload: the activation [B, T, D] in the wire dtype, then targets [B, T] as int32; where
    the run leaves some out, their weight behind them (`peer/pipeline/wire.py`)."""

    stage: int
    """The receiver's stage."""
    incarnation: int
    """The incarnation of the sender, as in its Hello, which this frame may overtake."""
    step: int
    index: int
    again: bool = False
    """The microbatch may have come before, maybe to another replica: keep what it adds apart."""


class Gradient(EraMessage, frozen=True):
    """Goes back to the sender of the activation. Payload: its gradient [B, T, D]; empty for validation."""

    stage: int
    """The receiver's stage."""
    step: int
    index: int
    loss: float
    waited_s: float
    """How long the microbatch stood in queues from the receiver's sending it on until now: such time is no sign of a
    long way."""
    commit_s: float
    """The time from the last contribution to a step to the next version, at the slowest of the stages so far."""


class ExpertTokens(EraMessage, frozen=True, kw_only=True):
    """Tokens of one microbatch in one layer, to a holder of some of its experts. Payload: the tokens [N, D] in the wire
    dtype, one expert's behind the other's; for a backward the gradients [N, D] of what came out of them behind all of
    these."""

    stage: int
    """The stage whose experts these are, and to which the sender belongs."""
    incarnation: int
    """The incarnation of the sender's membership."""
    passage: int
    """The number of the sender's run of the microbatch: one run may be given up and begun anew."""
    serial: int
    """A count of the sender's frames in this membership; a repeated request has the same serial."""
    step: int
    index: int
    layer: int
    """The decoder layer."""
    backward: bool
    counts: tuple[tuple[int, int], ...]
    """(expert, tokens), of whom there are any."""


class ExpertOutput(EraMessage, frozen=True, kw_only=True):
    """Answers ExpertTokens with the experts' outputs [N, D], for a backward with the gradients of the tokens."""

    stage: int
    """The receiver's stage."""
    incarnation: int
    serial: int
    refused: str = ""
    """The reason why there is no output; for people."""


class InferenceInput(EraMessage, frozen=True, kw_only=True):
    """A request of somebody outside on its way through the stages. Payload: the tokens [rows, T] as int32 to stage 0,
    else the activation [rows, T, D], of a subspace model its coordinates [rows, T, k] and the tokens
    (`peer/inference/wire.py`); then targets and beginnings, where there are any."""

    stage: int
    """The receiver's stage."""
    first_layer: int
    """The receiver's, as the sender knows it."""
    entry: PeerID
    """The peer that was asked, which gets the output."""
    serial: int
    """The entry's count of what it was asked."""
    way: int
    session: int
    version: int
    rows: int
    length: int
    """T."""
    position: int
    has_targets: bool
    has_begins: bool


class ReducePart(EraMessage, frozen=True):
    """Reduce-scatter: elements [start, start + n) of the sender's summed gradient of `step`, fp32."""

    stage: int
    step: int
    attempt: int
    start: int


class GatherPart(EraMessage, frozen=True):
    """All-gather: elements [start, start + n) of the reduced gradient, fp32, same bytes for everyone."""

    stage: int
    step: int
    attempt: int
    start: int


class StateChunk(EraMessage, frozen=True, kw_only=True):
    """Elements [start, start + n) of one tensor of one layer at `version`, fp32; a gradient as the run's wire has it,
    and parameters alone (`stored_era` -3) in bf16."""

    stored_era: int = -1

    version: int
    layer: str
    tensor: int
    start: int
    base: int = -1
    """The version of parameters alone to which this is the difference (`peer/handoff/difference.py`). -1: it is
    none."""


class ReducedChunk(EraMessage, frozen=True):
    """Elements [start, start + size) of the reduced gradient of `step`."""

    stage: int
    step: int
    start: int
    size: int
    form: WireFormat
    """The format of the payload: the round's, or one that is exact."""


class TiedChunk(EraMessage, frozen=True):
    """Elements [start, start + n) of the reduced gradient of a tied model's matrix, of `step`."""

    stage: int
    """The receiver's."""
    step: int
    serial: int
    """The serial of the request that it answers."""
    start: int


class ProbeChunk(_Message, frozen=True):
    """Carries bytes for their own sake. `echo`: the receiver answers with an empty one of the same `nonce`."""

    nonce: int
    """-1 marks the moment from which the receiver takes the time; other negative ones say nothing."""
    echo: bool
    took_s: float = 0.0
    """An answer says how many seconds went by from the last such mark to the frame that it answers."""


FrameMeta = (
    Activation
    | Gradient
    | ExpertTokens
    | ExpertOutput
    | ReducePart
    | GatherPart
    | StateChunk
    | ReducedChunk
    | TiedChunk
    | InferenceInput
    | ProbeChunk
)


# --- directory records ---


class SpecRecord(_Message, frozen=True):
    """The run spec, signed by the run's owner."""

    spec: bytes


class AdvertRecord(_Message, frozen=True):
    advert: Advert


class PlanHead(_Message, frozen=True):
    """Says where the chain is, so that a newcomer finds the coordinator."""

    term: int
    sequence: int
    digest: str
    coordinator: PeerID
    addresses: tuple[str, ...]


Record = SpecRecord | AdvertRecord | PlanHead
