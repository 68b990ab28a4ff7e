"""Control messages: a closed set of typed messages of at most 256 KiB, decoded once, by `Endpoint`. Pure.

There are five conversations: a peer with the coordinator (heartbeats, plans, status), a peer with the directory
(records), members within a stage group (progress, rounds, digests, claims), a newcomer with state holders, and an
inference client with the stages. Peers share no clock, so messages carry durations only.

In all messages `era` is a training generation and `version` a number of committed steps in it. In answers `term` is the
highest leadership term that the sender has granted or obeyed, and `live` the sender's live plan (the one in force).
`live` is empty if the sender has no live plan; in TermGrant and PlanVote also if the requester's plan is as new.

This file is long so that everything that may cross the wire can be read in one place.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.protocol.certificate import Attested
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import FETCH_SOURCES_MAX, PROTOCOL_VERSION
from shoal.protocol.names import is_name
from shoal.protocol.wire_format import Formats, WireFormat


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    pass


class EraMessage(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """A message about the training of one era (training generation). `Endpoint` writes the sender's era and revision
    into it, and refuses messages of another era or revision.

    A new era begins when the run restores a snapshot because a layer has lost all holders, or when the layout changes.
    Versions grow only within an era.
    """

    era: int = 0
    revision: int = 0
    """Revision of the sender's run spec: revisions differ in learning rates and in the last step."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A structure inside messages."""


# --- a peer's description of itself, on the directory and in heartbeats ---


class Advert(_Part, frozen=True):
    """A peer's description of itself. The coordinator prefers other peers' measurements to these claims."""

    name: str
    device: str
    flop_per_s: float
    """Speed of the sender's device, measured in fp32 by a probe with the shapes of this model's layers."""
    memory_bytes: int
    upload_bytes_per_s: float
    download_bytes_per_s: float
    addresses: tuple[str, ...]
    has_data: bool
    """The peer has the run's text, checked by digest, so it may serve stage 0."""
    willing_to_coordinate: bool = True
    protocol_version: int = PROTOCOL_VERSION
    machine: str = ""
    """Name of the machine: peers with the same name share its network card; empty: unknown."""
    card_bytes_per_s: float = 0.0
    """The network card's highest measured rate, over several links together; 0: unknown."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"name has a control character or a line break: {self.name!r}")


class LinkReport(_Part, frozen=True, array_like=True):
    """The sender's measurements of its link with `peer`; 0: unknown."""

    peer: PeerID
    round_trip_s: float
    bytes_per_s: float
    """Rate of the link in the direction to `peer`."""
    received_bytes_per_s: float = 0.0
    """Highest rate seen from `peer`, a lower bound of the link's rate."""
    num_probes: int = 0
    """Number of probes; `bytes_per_s` is the best of their rates. 0: `bytes_per_s` was measured on training frames."""
    num_failed: int = 0
    """Number of calls and frames to `peer` that have failed since its last answer."""
    has_fallen: bool = False
    """True if the last two probes both show a far lower rate than the best probe before them."""


class CommitReport(_Part, frozen=True, kw_only=True):
    """Figures of one commit (optimizer step of a stage group), reported by the group's leader."""

    era: int = 0

    stage: int
    step: int
    members: int
    microbatches: int
    duplicates: int
    given_up: int
    tokens: int
    staleness_steps_mean: float
    loss: float | None
    """Mean over the step's microbatches; only the last stage knows it."""
    digest: str
    dissenting: int = 0
    """Number of members with another state than most of the group; these members then fetch the group's state."""
    gradient_norm: float | None = None
    """2-norm of the group's reduced gradient before clipping; None: the sender did not make this step itself."""
    age_s: float = 0.0
    """Age of the commit when the report was sent: the report may have waited for a coordinator."""


class ValidationReport(_Part, frozen=True, kw_only=True):
    era: int = 0
    step: int
    """The version of the weights that was validated."""
    loss: float
    microbatches: int


class Holding(_Part, frozen=True):
    """State of whole layers at one version: a snapshot on the sender's disk, or `Heartbeat.carried` in memory."""

    era: int
    version: int
    layers: tuple[str, ...]


class PaceMark(_Part, frozen=True, array_like=True):
    """All steps up to `step` were committed `age_s` ago; `num_steps` and `tokens` count from the previous PaceMark."""

    era: int
    step: int
    age_s: float
    num_steps: int
    tokens: int


# --- peer and coordinator ---


FetchedKind = Literal["state", "weights", "state while training", "the frozen base"]


class FetchStatus(_Part, frozen=True, omit_defaults=True):
    """A fetch that is under way, as the fetching peer reports it."""

    what: FetchedKind
    total_bytes: Annotated[int, Meta(ge=0)] = 0
    """0: the peer still asks for holders."""
    left_bytes: Annotated[int, Meta(ge=0)] = 0
    left_s: Annotated[int, Meta(ge=0)] | None = None
    """Estimated seconds until everything has arrived, at the mean rate so far; None: nothing has arrived yet."""
    sources: Annotated[tuple[PeerID, ...], Meta(max_length=FETCH_SOURCES_MAX)] = ()
    """The peers that have sent most of it, at most `FETCH_SOURCES_MAX`, the largest part first."""


class Heartbeat(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Sent by every peer to its coordinator, every `heartbeat_s` seconds."""

    advert: Advert
    plan_sequence: int
    plan_digest: str
    era: int = 0
    """The era to which `version` and `synced` belong; lower than the plan's until the sender has adopted the plan."""
    stage: int | None
    version: int
    synced: bool
    """The sender holds its stage's state and takes traffic."""
    light: tuple[int, int] | None = None
    """(number of layers with state, number of layers of its stage) if the sender is a learner: a member that trains
    with weights alone while its state downloads. None: it is no learner."""
    fetch: FetchStatus | None = None
    draining: bool
    commits: tuple[CommitReport, ...] = ()
    validations: tuple[ValidationReport, ...] = ()
    """Every heartbeat repeats the newest validation that the sender led, so that no coordinator misses the last one."""
    links: tuple[LinkReport, ...] = ()
    """Some of the sender's links, at most `LINKS_PER_HEARTBEAT_MAX`; its heartbeats report all links in turn."""
    holdings: tuple[Holding, ...] = ()
    attested: tuple[Attested, ...] = ()
    """Signed digests of versions of the sender's state that its plan does not certify yet."""
    carried: Holding | None = None
    """State at the end of the last layout, which the sender keeps in memory for the layers' new holders; None: none."""
    unfetched_bytes: int = 0
    """Bytes that the sender must still prefetch for the layout that follows the plan `plan_sequence`: the layers, and
    the gradients of the steps that prefetched layers lack. 0 also if the sender has no room to prefetch."""
    held: tuple[tuple[int, int], ...] = ()
    """(expert group, version) of each expert that the sender holds: the version of the expert's state."""
    loads: tuple[int, ...] = ()
    """[expert], tokens that the sender's microbatches sent to each placed expert since the sender joined its stage."""
    silent: tuple[PeerID, ...] = ()
    """Members that the sender cannot reach: a hint for the coordinator to check them sooner."""
    unsound: tuple[PeerID, ...] = ()
    """Members that have sent invalid gradients (NaN, infinity, absurd values) or keep restarting. One report proves
    nothing and is only shown to people; a member that a majority of its group reports loses its place in the plan."""
    forward_s: float = 0.0
    window: int = 0
    end: bytes = b""
    """The sender's signature (`end` statement) that its whole state is at the run's last version. Empty: not yet."""
    ends: tuple[tuple[PeerID, bytes], ...] = ()
    """(member, its `end` statement) of enough members to prove to any coordinator that the run has ended."""
    revision: int = 0
    """Revision of the sender's run spec. A coordinator with another revision does not count the sender."""
    paused_s: float | None = None
    """Seconds since the sender paused and left its device to the device's owner; None: it is not paused."""
    unsaved_s: float = 0.0
    """Seconds since a snapshot of the sender's stage was last due, or since the sender joined it; 0: it writes none."""
    shortages: int = 0
    """How often the sender has run out of memory for its work; after each time its advert claims less memory."""


class HeartbeatReply(_Message, frozen=True):
    """Answers a Heartbeat. `plan` is the live plan with its votes (`SignedPlan.link`), so that the receiver can check
    the votes. `plan` is empty if the sender of the heartbeat obeys this plan already."""

    coordinator: PeerID
    term: int
    is_coordinator: bool
    plan: bytes = b""
    ends: tuple[tuple[PeerID, bytes], ...] = ()
    """(member, its `end` statement) of a majority of every group: proof that the run is done. Empty: it is not done."""
    revision: int = 0
    """Revision of the sender's run spec, to which `ends` belong."""
    pace: tuple[PaceMark, ...] = ()
    """The run's recent progress, oldest first; a next coordinator continues these figures."""
    save_at: int = 0
    """The version at which every stage is to write a snapshot; 0: none is due."""
    safe: tuple[int, int] = (0, 0)
    """(era, version) of the newest snapshot that has every layer on two disks: older snapshots can be deleted. Version
    0: there is none."""
    probe: tuple[PeerID, ...] = ()
    """Peers, at most `PROBES_PER_REPLY_MAX`, to which the receiver is to measure its link."""
    beside: tuple[PeerID, ...] = ()
    """Peers (at most `TOGETHER_MAX`) that claim to share the receiver's network card, to measure it together."""
    in_doubt: bool = False
    """The run is far slower than known figures predict: training frames on a busy link now count as a probe."""


class TermRequest(_Message, frozen=True, rename={"prevote": "sounding"}):
    """A candidate, a member of the live plan, asks the other members for leadership in `term`, to propose a plan."""

    term: int
    live: bytes
    """The sender's live plan; a receiver with an older one adopts it first."""
    permit: bytes
    """The coordinator's signature that the sender is its successor: members then grant the term even though they still
    hear from the coordinator; empty: none."""
    prevote: bool = False
    """The receiver only says if it would grant the term. So a peer that has lost contact to others uses up no terms."""


class TermGrant(_Message, frozen=True):
    """Answers a TermRequest. A member that grants the term votes no more for plans of lower terms, nor for plans of
    other candidates in this term."""

    granted: bool
    reason: str = ""
    term: int = 0
    live: bytes = b""
    accepted: bytes = b""
    """The plan, meant to follow the live one, for which the sender has voted. It may have a majority: the candidate
    must offer it again before any plan of its own. Empty: none."""
    accepted_term: int = 0


class PlanOffer(_Message, frozen=True):
    """A coordinator asks a member of the preceding plan to vote for `plan`."""

    term: int
    """The term of the offer: the plan's own, or a later one if the sender finishes a dead coordinator's plan."""
    plan: bytes
    predecessor: bytes
    """The preceding plan, for members that lack it. Empty if both plans do not fit into one message; such members then
    get it with a HeartbeatReply."""


class PlanVote(_Message, frozen=True):
    """Answers a PlanOffer. The vote is `signature`, over the offer's term and plan, and is published with the plan."""

    accepted: bool
    reason: str = ""
    term: int = 0
    live: bytes = b""
    signature: bytes = b""
    unfit: bool = False


class PlanLive(_Message, frozen=True):
    """A majority of the preceding plan's electors has voted for `plan`: the receiver is to obey it."""

    plan: bytes


class ChainRequest(_Message, frozen=True, rename={"override_epoch": "reign"}):
    """Asks for the live plans after the sender's plan, which has digest `after`; empty: the sender has no plan."""

    after: str
    override_epoch: int


class ChainLinks(_Message, frozen=True):
    """Answers a ChainRequest: the live plans after the requested plan, with their votes (links), oldest first, as many
    as fit. If the sender lacks the requested plan, it sends its two newest links."""

    links: tuple[bytes, ...]


class Exclude(_Message, frozen=True):
    """Carries an exclusion order (`exclusion.py`), or one vote for such an order."""

    order: bytes


class Renew(_Message, frozen=True):
    """Asks the run's owner for a new membership certificate, valid for longer."""


class Renewed(_Message, frozen=True):
    """Answers a Renew with the new certificate (`membership.py`)."""

    certificate: bytes


class TransferLeadership(_Message, frozen=True, kw_only=True, tag="HandOver"):
    """A coordinator at the end of its term transfers the leadership, and what it knows of the run, to its successor.
    `roster` lists the living peers, for the successor's first plan."""

    plan: bytes
    roster: tuple[tuple[PeerID, Advert], ...]
    permit: bytes = b""
    """The sender's signature that the receiver is its successor (`TermRequest.permit`)."""
    era: int = 0
    version: int = 0
    """The highest version of this era that the sender has heard of."""
    step: int = 0
    """Number of steps that most members of every stage have confirmed."""
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    pace: tuple[PaceMark, ...] = ()
    staleness_steps_mean: float = 0.0
    elapsed_s: float = 0.0
    plans: "tuple[PlanNote, ...]" = ()
    loads: tuple[tuple[float, ...], ...] = ()
    """[stage][expert], recent number of tokens of each placed expert; empty for a stage without figures."""
    absent: "tuple[Absence, ...]" = ()
    """Members of the plan that have been silent for a while."""
    records: "tuple[FailureRecord, ...]" = ()
    """Failures of members and recent members; empty in a run without placed experts."""
    calibration: "LayoutCalibration | None" = None
    arrivals: "tuple[ArrivalStatistics, ...]" = ()
    """Statistics of peers with irregular heartbeats, for which the coordinator's timeouts are longer."""
    unreachable: "tuple[UnreachablePair, ...]" = ()
    """Pairs of peers that cannot reach each other, as both report."""


class LayoutCalibration(_Part, frozen=True, array_like=True):
    """Compares the measured speed of layouts with their predicted speed."""

    learned: tuple[tuple[int, float, int], ...]
    """(number of stages, smoothed log(measured speed / speed by current figures), steps measured) by number."""
    era: int
    steady_from: int
    """Version of `era` from which the live layout's speed is measured, once all members are ready; -1: none."""
    factor_then: float = 1.0
    off: tuple[float, ...] = ()
    """log(measured tokens/s / tokens/s that its first plan predicted) of each recent earlier layout."""
    chosen: float = 0.0
    """Tokens/s predicted for the live layout when it was chosen; 0: unknown."""
    chosen_peers: int = 0
    """How many peers the run had when the live layout was chosen; 0: unknown."""
    seen_before: float = 0.0
    """Tokens/s that the live layout made before its last members came; 0: unknown."""


class ArrivalStatistics(_Part, frozen=True, array_like=True):
    """Mean, mean deviation and recent maximum of the times between a peer's heartbeats
    (`coordinator/adaptive_timeout.py`)."""

    peer: PeerID
    mean_s: float
    deviation_s: float
    worst_s: float


class UnreachablePair(_Part, frozen=True, array_like=True):
    """Two peers that cannot reach each other, though other peers reach both."""

    one: PeerID
    other: PeerID
    age_s: float


class Absence(_Part, frozen=True, array_like=True):
    """A peer that has not been heard for `seconds`."""

    peer: PeerID
    advert: Advert
    seconds: float


class Leave(_Message, frozen=True):
    """Announces that the sender leaves now, so that no peer waits for it."""


class StandingRequest(_Message, frozen=True):
    """Asks for the receiver's live plan, its stage in that plan, and its version. Senders are `shoal recover`, voters
    that check a plan, and observers."""


class Standing(_Message, frozen=True, kw_only=True):
    """Answers a StandingRequest with the sender's live plan, its stage in that plan, and its version."""

    live: bytes
    term: int
    era: int
    stage: int | None
    version: int
    synced: bool
    holdings: tuple[Holding, ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    leaves: bool = False
    """The sender drains (finishes its work before it leaves), or is about to leave the run."""
    revision: int = 0


class Reset(_Message, frozen=True, kw_only=True):
    """The owner permits the receiver to make the next plan after `live` without votes, for the peers in `roster` alone,
    since too few members of `live` are left for a majority."""

    mandate: bytes
    live: bytes
    """The highest plan that a reachable peer obeys."""
    version: int
    """The highest version that a reachable peer has, in the era of `live`."""
    roster: tuple[tuple[PeerID, Advert], ...]


class StatusRequest(_Message, frozen=True):
    pass


class PeerStatus(_Part, frozen=True, omit_defaults=True):
    peer: PeerID
    name: str
    device: str
    stage: int | None
    version: int
    """The version that the peer has reported; -1: this coordinator has not heard the peer yet."""
    synced: bool
    draining: bool
    seen_s_ago: float
    forward_s: float
    window: int
    share: float = 0.0
    """Planned share of its stage's microbatches, in [0, 1]; 0 for a spare."""
    flop_per_s: float = 0.0
    paused_s: float | None = None
    """Seconds since the peer paused; None: not paused. Like the following fields copied from its heartbeat."""
    shortages: int = 0
    light: tuple[int, int] | None = None
    fetch: FetchStatus | None = None


class ExpertStatus(_Part, frozen=True, omit_defaults=True):
    """Status of one expert in a stage with placed experts; the expert spans all layers of the stage."""

    stage: int
    expert: int
    load: float = 0.0
    """Recent share of the stage's expert tokens, in [0, 1]; 0 for all experts before any report."""
    holders: tuple[int, ...] = ()
    """Planned holders that have the expert's state, as positions in `SwarmStatus.peers`."""
    coming: tuple[int, ...] = ()
    """Planned holders that have not reported the expert's state yet, as positions in `SwarmStatus.peers`."""


class PlanNote(_Part, frozen=True, array_like=True):
    """Describes one of the run's plans in words for people."""

    term: int
    sequence: int
    seconds_ago: float
    coordinator: PeerID
    reason: str
    outcome: str = ""
    """One sentence with the layout's predicted and measured speed and its bottleneck."""


class FailureRecord(_Part, frozen=True, array_like=True):
    """How often coordinators have lost one peer."""

    peer: PeerID
    failures: float
    """Number of times that the peer was lost without a Leave; an older loss counts as less than one."""
    seen_s: float
    """Seconds for which coordinators have watched the peer, in which they would have noticed a failure."""


class Comparison(_Part, frozen=True, omit_defaults=True):
    """Predicted and measured speed of the live layout."""

    foreseen_tokens_per_s: float
    sentence: str
    seen_tokens_per_s: float = 0.0
    """Median of the recently measured tokens/s, without standstills; 0: too few steps so far."""
    steps: int = 0
    today_tokens_per_s: float = 0.0
    """Tokens/s predicted from current figures; for synchronous steps, while the run makes these."""
    bound: str = ""
    """The bottleneck of a step by this prediction (`protocol.plan.Bound`)."""
    stage: int = 0


class SwarmStatus(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """The swarm's state for `shoal status`, the live view and the dashboard, from the coordinator's heartbeats."""

    run: str
    name: str
    coordinator: PeerID
    term: int
    plan_sequence: int
    plan_reason: str
    step: int
    steps: int
    tokens_per_s: float
    """Mean over the last minute, or over the last few steps if these are slow; standstills are included."""
    loss: float | None
    validation_loss: float | None
    validation_step: int | None = None
    staleness_steps_mean: float
    stages: tuple[tuple[int, int], ...]
    peers: tuple[PeerStatus, ...]
    era: int = 0
    """Training generation: number of restarts, from a snapshot or with another layout."""
    rollbacks: int = 0
    """Number of restarts that lost steps."""
    elapsed_s: float
    plans: tuple[PlanNote, ...] = ()
    experts: tuple[ExpertStatus, ...] = ()
    left_s: float | None = None
    """Seconds until the run's last step at `tokens_per_s`; None: unknown, or the run makes no progress."""
    stands_s: float = 0.0
    """Seconds since the last commit, if that is longer than a step takes; 0: the run makes progress."""
    waits_for: str = ""
    """One sentence about what keeps the run from progress; empty: no cause is known."""
    risks: tuple[str, ...] = ()
    """Single points of failure, unreachable pairs, and plans that members refused, in sentences."""
    comparison: Comparison | None = None
    """Predicted and measured speed; None: the coordinator has no prediction."""
    formats: Formats | None = None


class PastCommit(_Part, frozen=True, array_like=True):
    """A past commit (optimizer step) of one of the sender's groups."""

    seconds_ago: float
    report: CommitReport


class PastValidation(_Part, frozen=True, array_like=True):
    """A past validation that the sender led."""

    seconds_ago: float
    report: ValidationReport


class HistoryRequest(_Message, frozen=True):
    """Asks for the commits and validations that the receiver remembers, from the given (era, version) on."""

    commits_from: tuple[int, int]
    validations_from: tuple[int, int]


class History(_Message, frozen=True):
    """Answers a HistoryRequest: the oldest requested commits and validations that the sender remembers, in order, at
    most `HISTORY_PER_REPLY_MAX` of each kind."""

    commits: tuple[PastCommit, ...] = ()
    validations: tuple[PastValidation, ...] = ()


# --- inside a stage group ---


class ExpertPlace(_Part, frozen=True, array_like=True):
    """The sender's state in one group of expert holders. The fields mean the same as in `PresenceUpdate`."""

    group: int
    incarnation: int
    version: int
    ready: bool
    is_open: bool
    draining: bool = False


class PresenceUpdate(EraMessage, frozen=True, kw_only=True, tag="Hello", rename={"learner": "light"}):
    """Tells the sender's group and both neighbouring stages that the sender's stage or readiness has changed. The
    answer is also a PresenceUpdate."""

    incarnation: int
    """A number that grows with every start of the sender's process and every stage that it enters. With a new number
    the sender has lost what it held under the old one."""
    count: int = 0
    """Serial number, since these messages may overtake each other."""

    plan_sequence: int
    stage: int
    """The sender's stage; -1: none."""
    version: int
    ready: bool
    """The sender holds its stage's state and takes part in rounds."""
    is_open: bool
    """The sender takes new traffic; a newcomer may be ready for rounds before it is open."""
    learner: bool = False
    """The sender is a learner: it takes part in rounds with its stage's weights alone, rounded to bf16. It serves no
    state, does not count as a holder of its stage, sums no part of a reduction and has no vote on digests."""
    draining: bool = False
    """The sender leaves: until its work is done it stays ready but not open, even if the plan no longer names it."""
    experts: tuple[ExpertPlace, ...] = ()


class Progress(EraMessage, frozen=True, rename={"leader": "lead", "held_out": "apart"}):
    """The sender's accumulated contribution to `step`, sent to the whole group whenever it grows."""

    incarnation: int
    """The incarnation in the sender's PresenceUpdate. This message may come before the update or after a newer one."""
    count: int
    """Serial number within this incarnation, since messages may overtake each other."""
    stage: int
    step: int
    indices: bytes
    """Bitmap: bit i is set if microbatch i is accumulated."""
    leader: PeerID
    """The member that the sender chose as the group's leader, or empty. It leads once all ready members chose it."""
    claimed: bytes
    """Bitmap of the microbatches granted to the sender, whether accumulated or not; only in stage 0."""
    loss_sum: float
    staleness_sum: int
    held_out: tuple[tuple[int, float, int], ...] = ()
    """(index, loss, staleness in steps) of microbatches with gradients that the sender keeps apart from its sum, so
    that a round may omit them: repeated ones, and those that came after a round of the step had begun."""


class RoundMember(_Part, frozen=True):
    peer: PeerID
    bandwidth: float
    indices: bytes
    """Bitmap of the member's contribution: microbatches in its sum, and the leader's choice of those in `held_out`."""


class RoundStart(EraMessage, frozen=True, rename={"learners": "light"}):
    """The group's leader begins the reduction of `step`; `members` are all that take part, in rank order."""

    stage: int
    step: int
    attempt: int
    """A number that grows with the plan's sequence and with every retry; the attempt with the highest number counts."""
    members: tuple[RoundMember, ...]
    duplicates: int
    given_up: int
    loss_sum: float
    staleness_sum: int
    form: WireFormat = "fp32"
    """Wire format of the pieces of gradient, one of `WireSpec.sums`."""
    learners: tuple[PeerID, ...] = ()
    """Members that are learners: they contribute and get the reduced gradient, but sum no part of it."""


class RoundEnded(EraMessage, frozen=True):
    """The sender has the reduced gradient of `step` from this attempt. Sent if embedding and head are tied: the sender
    then waits for the gradient of the pipeline's other end (`peer/group/tied.py`). By answering, the receiver promises
    to join no other attempt at `step`."""

    stage: int
    step: int
    attempt: int


class Digest(EraMessage, frozen=True):
    """The digest of the sender's state at `version`."""

    stage: int
    version: int
    digest: str


class Attestation(EraMessage, frozen=True):
    """The sender's signature on its group's state at `version`; other peers may forward it. Holders exchange these
    signatures while a newcomer joins, since a newcomer accepts only state that most holders have signed."""

    stage: int
    version: int
    root: str
    """One digest over the digests of all layers of the group (`certificate.root_of`)."""
    signature: bytes


class Claim(EraMessage, frozen=True):
    """A stage-0 replica asks the group's leader for microbatches to compute."""

    count: int


class Grant(EraMessage, frozen=True):
    """Answers a Claim. `items` are (step, index) of microbatches to compute; index < 0 is validation microbatch
    -1 - index, at version `step`."""

    items: tuple[tuple[int, int], ...]
    steps_ahead: int = -1
    """How many steps ahead of the group's version the leader lets microbatches begin; -1: not chosen yet. `gain` is the
    factor g on the number of microbatches in flight (`protocol/running_ahead.py`)."""
    gain: float = 1.0


class Repair(EraMessage, frozen=True):
    """A group's leader tells stage 0 that the group has lost a replica, and so the gradients of these microbatches of
    `step`. The microbatches run again; a peer that still holds their gradient does not add that gradient again."""

    step: int
    indices: bytes


class Again(EraMessage, frozen=True):
    """The leader of stage 0 tells a member of its group to compute microbatches again: `items` are (step, index)."""

    items: tuple[tuple[int, int], ...]


class Reject(EraMessage, frozen=True, tag="HandBack"):
    """The sender, a member of `stage`, rejects microbatches because it pauses or lags: (step, index, True if the
    microbatch may have run). The peer that sent the microbatches tries another replica; if `stage` is 0, they go back
    to that stage's leader."""

    stage: int
    items: tuple[tuple[int, int, bool], ...]


class ExpertDone(EraMessage, frozen=True, kw_only=True, rename={"retried": "again"}):
    """A member of `stage` tells an expert holder that it has finished a microbatch: the holder now has all gradients of
    the microbatch for these experts.

    The holder refuses if it lacks some of the gradients; another holder then gets the whole microbatch.
    """

    stage: int
    incarnation: int
    """`incarnation` and `passage` equal those of the sender's ExpertTokens."""
    passage: int
    step: int
    index: int
    experts: tuple[tuple[int, int], ...]
    """(expert, number of layers with a backward). 0 layers: the expert got no tokens, but every expert counts every
    microbatch once."""
    retried: bool
    """The microbatch may have run before, maybe at another holder: keep its contribution separate."""


class ValidationResult(EraMessage, frozen=True):
    """A stage-0 replica reports the loss of one validation microbatch to its leader."""

    step: int
    index: int
    loss: float


# --- state for newcomers ---


class StateRequest(EraMessage, frozen=True):
    """Asks the receiver to keep (pin) and describe one version of `layers`: `version` if the receiver still has it,
    else its current version."""

    layers: tuple[str, ...]
    version: int = -1
    stored_era: int = -1
    """State to describe. >= 0: the stored snapshot of that era's `version`, with those of `layers` that it contains;
    -1: the state that trains now; -2: the run's first parameters; -3: the current parameters, rounded to bf16."""
    ahead: bool = False
    """The sender prefetches the one layer in `layers` for the next layout: it fetches the current state, replays later
    steps, and compares its result with the holders when the layout ends. So the offer needs no digest."""
    base: int = -1
    """Version of the bf16 parameters that the sender has, so that a difference to them is enough; -1: it has none."""
    to_compare: bool = False
    """The sender has the state of `version` already: describe what holders have signed of it, and pin nothing."""


class StateOffer(EraMessage, frozen=True):
    """Answers a StateRequest: a version, kept (pinned) for `pinned_s` after each request, and a digest per layer."""

    version: int
    digests: tuple[tuple[str, str], ...]
    pinned_s: float
    signatures: tuple[tuple[PeerID, bytes], ...] = ()
    """The holders' signatures (`Attestation`) on the root of these digests, for a newcomer of the group."""
    base: int = -1
    """The request's `base`, if the sender has that version and can send only the difference from it; else -1."""


class Keep(EraMessage, frozen=True):
    """Asks the receiver to copy the sender's layers to the receiver's disk, in case the sender's whole stage dies. The
    answer does not wait for the copy: a sender that leaves asks again until `Saved` names the version."""

    version: int
    layers: tuple[str, ...]


class Halt(EraMessage, frozen=True):
    """The sender, the only holder of its layers, leaves: the leader of stage 0 is to begin no further step for a while.

    `at_once`: the leader also grants no more microbatches of the present step, so that step is not committed.
    """

    at_once: bool = False


class Halted(_Message, frozen=True):
    """Answers a Halt: every stage reaches `version` and makes no further step while the halt lasts."""

    version: int


class Save(EraMessage, frozen=True):
    """Asks the receiver to answer once it has saved its layers at `version`, which every stage is about to reach."""

    version: int


class Saved(_Message, frozen=True):
    """Answers a Save or a Keep: the layers are on the sender's disk at `version`. If `version` is below the requested
    one, the sender has not reached the requested version, or has not written it yet."""

    version: int


class StateChunkRequest(EraMessage, frozen=True, kw_only=True, rename={"via": "holder"}):
    """Asks for elements [start, stop) of one tensor of one layer, as StateChunk frames. `tensor` 0: parameters, 1 and
    2: moments, 3: the reduced gradient with which the layer stepped to `version`."""

    stored_era: int = -1
    """The StateRequest's `stored_era`; if a gradient is requested, the gradient's era."""

    version: int
    layer: str
    tensor: int
    start: int
    stop: int
    via: PeerID | None = None
    """Holder from which the receiver is to fetch the elements and pass them on; None: the receiver has them."""
    base: int = -1
    """The version of the sender's bf16 parameters, if the receiver has offered the difference to that version
    (`StateOffer.base`); -1: send full values."""


class ReducedRequest(EraMessage, frozen=True):
    """A newcomer that catches up asks for the reduced gradient of `step`, as BULK frames, as soon as it exists.

    The answer is a `Digest`. If the Digest's version is above `step`, the gradient follows. If it equals `step`, only
    those pieces follow that the running reduction sends to the newcomer in any case. If it is below `step`, nothing
    follows.
    """

    stage: int
    step: int


class TiedRequest(EraMessage, frozen=True):
    """Asks for the reduced gradient of `step` of the matrix that embedding and head share, as soon as it exists."""

    stage: int
    step: int
    serial: int = 0
    peek: bool = False
    """True: send no gradient; only answer if the receiver has, or does not need, the sum of both ends' gradients."""


class TiedOffer(EraMessage, frozen=True):
    """Answers TiedRequest; the gradient follows as frames. `is_whole`: it is the sum over both pipeline ends."""

    is_whole: bool
    form: WireFormat = "fp32"


class InferenceRequest(_Message, frozen=True, kw_only=True):
    """A member asks for the output of the run's model on tokens. Any peer can receive this, whichever stage it holds or
    none: it passes the tokens through the stages and returns the answer."""

    way: int = 0
    """A number chosen by the client: requests with the same number go through the same members."""
    session: int = 0
    """A number chosen by the client that sends one text in several requests: the stages keep the earlier tokens. 0: no
    session."""
    version: int = -1
    """Version of the weights; -1: the newest. The answer names the version that was used."""
    rows: int = 1
    position: int = 0
    tokens: bytes
    """Token ids, int32 [rows, T], one row for each sequence."""
    targets: bytes = b""
    """Targets to score, int32 [rows, T], `IGNORED` at positions without a target. Empty: predict the next token."""
    begins: bytes = b""
    """uint8 [rows, T], 1 where a document begins. Empty: attention crosses documents."""


class InferenceAnswer(_Message, frozen=True, kw_only=True):
    """Answers an InferenceRequest. `payload` with targets: float32 [rows, T] log-likelihoods, then uint8 [rows, T], 1
    where the target is the likeliest token; without targets: int32 [K] likeliest tokens, then float32 [K] their
    logits."""

    version: int
    era: int
    payload: bytes
    is_past: bool = False
    """There is no result, because a stage no longer has the requested version: ask for a newer one."""


class InferenceOutput(EraMessage, frozen=True, kw_only=True):
    """The last stage sends an inference request's result to the peer that received the request."""

    serial: int
    version: int = -1
    payload: bytes = b""
    refused: str = ""
    is_past: bool = False


class Ping(_Message, frozen=True):
    """Measures a round trip; the receiver sends `pad` back."""

    pad: bytes = b""


class PingRequest(_Message, frozen=True):
    """A coordinator that cannot reach `peer` asks another member to ping `peer` and to return the answer."""

    peer: PeerID


class ProbeTogether(_Message, frozen=True):
    """Asks a peer behind the same network card to measure `links` while the sender measures its own."""

    links: tuple[LinkReport, ...]


class Probed(_Message, frozen=True):
    """Answers a ProbeTogether: for each link (bytes that arrived, seconds to the last byte). Empty: refused."""

    arrived: tuple[tuple[int, float], ...]


class Done(_Message, frozen=True):
    """Answers a message that needs no other answer."""


class Refusal(_Message, frozen=True):
    """The sender understood the message and declines; `reason` is a sentence for people.

    `keeps_out`: the sender takes the receiver for a stranger, and would refuse any message from it.
    """

    reason: str
    keeps_out: bool = False


# fmt: off
Message = (
    Heartbeat | HeartbeatReply | TermRequest | TermGrant | PlanOffer | PlanVote | PlanLive | ChainRequest | ChainLinks
    | Exclude | Renew | Renewed | TransferLeadership | Leave | StandingRequest | Standing | Reset
    | StatusRequest | SwarmStatus | HistoryRequest | History
    | PresenceUpdate | Progress | RoundStart | RoundEnded | Digest | Attestation | Claim | Grant | Repair | Again
    | Reject | ExpertDone | ValidationResult
    | StateRequest | StateOffer | Keep | Halt | Halted | Save | Saved | StateChunkRequest | ReducedRequest
    | TiedRequest | TiedOffer
    | InferenceRequest | InferenceAnswer | InferenceOutput
    | Ping | PingRequest | ProbeTogether | Probed | Done | Refusal
)
"""Every call and every answer, by conversation."""
# fmt: on


# --- headers of tensor frames: shapes and dtypes follow from the run spec, never from the sender ---
# `stage` is the receiver's stage, unless the field says otherwise.


class Activation(EraMessage, frozen=True, rename={"retried": "again"}):
    """Sent to the next stage. Payload: the activation [B, T, D] in the wire dtype, then targets [B, T] as int32, then
    the microbatch's weight if the run leaves some targets out (`peer/pipeline/wire.py`)."""

    stage: int
    incarnation: int
    """The incarnation in the sender's PresenceUpdate, before which this frame may arrive."""
    step: int
    index: int
    retried: bool = False
    """The microbatch may have run before, maybe at another replica: keep its contribution separate."""


class Gradient(EraMessage, frozen=True):
    """Sent back to the sender of the activation. Payload: the gradient [B, T, D]; empty for validation."""

    stage: int
    step: int
    index: int
    loss: float
    waited_s: float
    """Seconds that the microbatch spent in queues since the receiver sent its activation; the receiver subtracts them
    from the round trip."""
    commit_s: float
    """Longest commit in the sender's and later stages: seconds from a step's last contribution to the next version."""


class ExpertTokens(EraMessage, frozen=True, kw_only=True):
    """Tokens of one microbatch in one layer, sent to a holder of some experts of that layer. Payload: the tokens [N, D]
    in the wire dtype, grouped by expert; in a backward also the gradients [N, D] of the experts' outputs."""

    stage: int
    """The sender's stage, to which the experts belong."""
    incarnation: int
    passage: int
    """Number of the sender's attempt to run the microbatch; an attempt that is given up is repeated under a new one."""
    serial: int
    """Number of this request among the sender's requests under this `incarnation`; a repeated request keeps the
    number."""
    step: int
    index: int
    layer: int
    backward: bool
    counts: tuple[tuple[int, int], ...]


class ExpertOutput(EraMessage, frozen=True, kw_only=True):
    """Answers ExpertTokens with the experts' outputs [N, D]; in a backward, with the tokens' gradients [N, D]."""

    stage: int
    incarnation: int
    serial: int
    refused: str = ""


class InferenceInput(EraMessage, frozen=True, kw_only=True):
    """An inference request on its way through the stages. Payload for stage 0: the tokens [rows, T] as int32; for later
    stages: the activation [rows, T, D], or in a subspace model coordinates [rows, T, k] and tokens
    (`peer/inference/wire.py`). Then follow the targets and the marks where documents begin, if the request has them."""

    stage: int
    first_layer: int
    """The receiver's first layer, as the sender knows it."""
    entry: PeerID
    """The peer that received the client's request and gets the output."""
    serial: int
    way: int
    session: int
    version: int
    rows: int
    length: int
    position: int
    has_targets: bool
    has_begins: bool


class ReducePart(EraMessage, frozen=True):
    """Reduce-scatter: elements [start, start + n) of the sender's gradient sum of `step`, in the round's format."""

    stage: int
    step: int
    attempt: int
    start: int


class GatherPart(EraMessage, frozen=True):
    """All-gather: elements [start, start + n) of the reduced gradient, the same bytes for all members."""

    stage: int
    step: int
    attempt: int
    start: int


class StateChunk(EraMessage, frozen=True, kw_only=True):
    """Elements [start, start + n) of a layer's tensor: a gradient in its wire format, parameters that were requested
    alone (`stored_era` -3) in bf16, all else in fp32."""

    stored_era: int = -1

    version: int
    layer: str
    tensor: int
    start: int
    base: int = -1
    """Version of bf16 parameters to which this is the difference (`peer/encoding/difference.py`); -1: full values."""


class ReducedChunk(EraMessage, frozen=True):
    """Elements [start, start + size) of the reduced gradient of `step`."""

    stage: int
    step: int
    start: int
    size: int
    form: WireFormat
    """The payload's wire format: that of the round, or a lossless one."""


class TiedChunk(EraMessage, frozen=True):
    """Elements [start, start + n) of the reduced gradient of `step` of the matrix that embedding and head share."""

    stage: int
    step: int
    serial: int
    start: int


class ProbeChunk(_Message, frozen=True):
    """Bytes sent to measure a link's rate. `echo`: the receiver answers with one byte and the same `nonce`."""

    nonce: int
    """Number of the probe, which the answer repeats. -1: the receiver starts its clock; others below 0: filler."""
    echo: bool
    took_s: float = 0.0
    """Seconds, set in answers: from the arrival of the frame with nonce -1 to that of the answered frame."""


# fmt: off
FrameMeta = (
    Activation | Gradient | ExpertTokens | ExpertOutput
    | ReducePart | GatherPart | StateChunk | ReducedChunk | TiedChunk
    | InferenceInput | ProbeChunk
)
# fmt: on


# --- directory records ---


class SpecRecord(_Message, frozen=True):
    """The run spec, signed by the run's owner."""

    spec: bytes


class AdvertRecord(_Message, frozen=True):
    advert: Advert


class PlanHead(_Message, frozen=True):
    """The run's newest plan, by which a newcomer finds the coordinator."""

    term: int
    sequence: int
    digest: str
    coordinator: PeerID
    addresses: tuple[str, ...]


Record = SpecRecord | AdvertRecord | PlanHead
