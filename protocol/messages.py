"""Control messages: a closed set of typed messages of at most 256 KiB, decoded once, at the edge. Pure.

Five conversations: a peer with the coordinator (heartbeats, plans, status), a peer with the directory (records),
members within a stage group (progress, rounds, digests, claims), a newcomer with state holders, and an inference client
with the stages. Peers share no clock, so messages carry durations only.

In all messages `era` and `version` name a training generation and a number of committed steps in it. In answers `term`
is the highest term that the sender has granted or obeyed, and `live` its live plan, empty if it has none (in TermGrant
and PlanVote also if the request's is as new).

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
    """A message about one era's training. `Endpoint` stamps the sender's era and revision, and refuses others.

    A new era begins when a layer has lost all holders and the run restores a snapshot; versions grow within an era.
    """

    era: int = 0
    revision: int = 0
    """Revision of the sender's spec: revisions differ in learning rates and in the last step."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A structure inside messages."""


# --- a peer's description of itself, on the directory and in heartbeats ---


class Advert(_Part, frozen=True):
    """A peer's description of itself; the coordinator trusts its neighbours' measurements more."""

    name: str
    device: str
    flop_per_s: float
    """Measured by a probe on this model's own layer shape, fp32."""
    memory_bytes: int
    upload_bytes_per_s: float
    download_bytes_per_s: float
    addresses: tuple[str, ...]
    has_data: bool
    """The peer has the run's text, checked by digest, so it may serve stage 0."""
    willing_to_coordinate: bool = True
    protocol_version: int = PROTOCOL_VERSION
    machine: str = ""
    """Equal for peers of one machine, which share its network card; empty: unknown."""
    card_bytes_per_s: float = 0.0
    """Highest measured rate over several links together; 0: unknown."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"name has a control character or a line break: {self.name!r}")


class LinkReport(_Part, frozen=True, array_like=True):
    """The sender's measurements of its link with `peer`; 0: unknown."""

    peer: PeerID
    round_trip_s: float
    bytes_per_s: float
    """Rate towards `peer`."""
    received_bytes_per_s: float = 0.0
    """Highest rate seen from `peer`, a lower bound of its rate."""
    num_probes: int = 0
    """Probes of which `bytes_per_s` is the best; 0: it comes from frames."""
    num_failed: int = 0
    """Calls and frames to `peer` that failed in a row, without an answer since."""
    has_fallen: bool = False
    """True if the last two probes both show a far lower rate than the best one before."""


class CommitReport(_Part, frozen=True, kw_only=True):
    """One commit's figures, from the group's leader."""

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
    """Members with another state, which then fetch the group's."""
    gradient_norm: float | None = None
    """2-norm of the group's reduced gradient before clipping; None: the sender did not step itself."""
    age_s: float = 0.0
    """Age of the commit when the report was sent, which may have waited for a coordinator."""


class ValidationReport(_Part, frozen=True, kw_only=True):
    era: int = 0
    step: int
    """The validated version."""
    loss: float
    microbatches: int


class Holding(_Part, frozen=True):
    """A complete snapshot on the sender's disk."""

    era: int
    version: int
    layers: tuple[str, ...]


class PaceMark(_Part, frozen=True, array_like=True):
    """All steps up to `step` were committed `age_s` ago; `num_steps` and `tokens` count from the previous mark."""

    era: int
    step: int
    age_s: float
    num_steps: int
    tokens: int


# --- peer and coordinator ---


class Heartbeat(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Sent by every peer to its coordinator every `heartbeat_s`."""

    advert: Advert
    plan_sequence: int
    plan_digest: str
    era: int = 0
    """The era of `version` and `synced`; lower than the plan's until the sender has adopted the plan."""
    stage: int | None
    version: int
    synced: bool
    """The sender holds its stage's state and takes traffic."""
    light: tuple[int, int] | None = None
    """Set for a learner, which trains while the state downloads: (layers with state, all layers of its stage)."""
    draining: bool
    commits: tuple[CommitReport, ...] = ()
    validations: tuple[ValidationReport, ...] = ()
    """The newest validation that the sender led is repeated, so that no coordinator misses the run's last one."""
    links: tuple[LinkReport, ...] = ()
    """Some of the sender's links in turn, `LINKS_PER_HEARTBEAT_MAX` at most."""
    holdings: tuple[Holding, ...] = ()
    attested: tuple[Attested, ...] = ()
    """Signed versions that the sender's plan does not certify yet."""
    carried: Holding | None = None
    """State of the last layout that the sender keeps in memory for the layers' new holders."""
    unfetched_bytes: int = 0
    """Bytes that the sender still has to prefetch for the layout that follows the plan `plan_sequence`: layers, and
    steps that they are behind. 0 if it has no room to prefetch."""
    held: tuple[tuple[int, int], ...] = ()
    """(expert group, version) of all expert state that the sender holds."""
    loads: tuple[int, ...] = ()
    """Tokens that the sender's microbatches have sent to each placed expert since it took its place."""
    silent: tuple[PeerID, ...] = ()
    """Members that the sender cannot reach: a hint for the coordinator to check sooner."""
    unsound: tuple[PeerID, ...] = ()
    """Members that have sent invalid gradients (NaN, infinity, absurd values) or restart without end. One report is no
    proof and is shown to people; a majority of the member's group takes its place."""
    forward_s: float = 0.0
    window: int = 0
    end: bytes = b""
    """The sender's `end` statement: its whole state is at the run's last version. Empty: not yet."""
    ends: tuple[tuple[PeerID, bytes], ...] = ()
    """(member, its `end` statement) of enough members to prove the run's end to a coordinator that has missed some."""
    revision: int = 0
    """Revision of the sender's spec. A coordinator with another revision does not count the sender."""
    paused_s: float | None = None
    """How long the sender has been paused, its device given back to its owner; None: not paused."""
    unsaved_s: float = 0.0
    """Seconds since the last snapshot of the sender's stage, or since the sender took its place."""
    shortages: int = 0
    """How often the sender ran out of memory for its place; its advert claims less since then."""


class HeartbeatReply(_Message, frozen=True):
    """`plan` is the live plan's link (`SignedPlan.link`) if the sender of the heartbeat obeys another plan, else empty.

    A live plan always travels as its link, so that the receiver can check the votes.
    """

    coordinator: PeerID
    term: int
    is_coordinator: bool
    plan: bytes = b""
    ends: tuple[tuple[PeerID, bytes], ...] = ()
    """(member, its `end` statement) of a majority of every group: the run is done. Empty: it is not."""
    revision: int = 0
    """Revision of the sender's spec, to which `ends` belong."""
    pace: tuple[PaceMark, ...] = ()
    """Recent progress, oldest first, with which the next coordinator continues."""
    save_at: int = 0
    """The version of which every stage is to write a snapshot; 0: none is due."""
    safe: tuple[int, int] = (0, 0)
    """(era, version) of the newest snapshot with every layer on two disks: older ones can go. Version 0: none."""
    probe: tuple[PeerID, ...] = ()
    """Peers to which the receiver is to measure its link, `PROBES_PER_REPLY_MAX` at most."""
    beside: tuple[PeerID, ...] = ()
    """Peers that claim the receiver's network card, `TOGETHER_MAX` at most, with which it measures the card."""
    in_doubt: bool = False
    """The run is far slower than the known devices and links explain."""


class TermRequest(_Message, frozen=True, rename={"prevote": "sounding"}):
    """A candidate, a member of the live plan, asks the other members for `term` before it proposes a plan in it."""

    term: int
    live: bytes
    """The sender's live plan; a receiver with an older one adopts it first."""
    permit: bytes
    """The coordinator's signature that the sender is its successor, so that members that still hear the coordinator
    need not wait for its silence; empty: none."""
    prevote: bool = False
    """The receiver says if it would grant the term, and promises nothing: a peer that lost its way uses up no term."""


class TermGrant(_Message, frozen=True):
    """Answers a TermRequest. A grant ends votes for lower terms' plans and for others' plans of this term."""

    granted: bool
    reason: str = ""
    term: int = 0
    live: bytes = b""
    accepted: bytes = b""
    """The sender's vote for a successor of the live plan. It may be live: the candidate must finish it first."""
    accepted_term: int = 0


class PlanOffer(_Message, frozen=True):
    """A coordinator asks a member of the predecessor to vote for `plan`."""

    term: int
    """The term of the offer: the plan's own, or a later one when the sender finishes a dead coordinator's plan."""
    plan: bytes
    predecessor: bytes
    """The predecessor, for members that lack it; empty if both do not fit in one message, and heartbeats bring it."""


class PlanVote(_Message, frozen=True):
    """Answers a PlanOffer. `signature`, a `vote` statement on the offer's term and plan, is published with the plan."""

    accepted: bool
    reason: str = ""
    term: int = 0
    live: bytes = b""
    signature: bytes = b""
    unfit: bool = False


class PlanLive(_Message, frozen=True):
    """A majority of the predecessor's electors voted for `plan`: obey it."""

    plan: bytes


class ChainRequest(_Message, frozen=True, rename={"override_epoch": "reign"}):
    """Asks for the live plans after the one with digest `after`, which the sender obeys; empty: it knows none."""

    after: str
    override_epoch: int


class ChainLinks(_Message, frozen=True):
    """The links after the requested plan, oldest first, as many as fit; the last two if the sender lacks that plan."""

    links: tuple[bytes, ...]


class Exclude(_Message, frozen=True):
    """An exclusion order (`exclusion.py`), or one vote for such an order."""

    order: bytes


class Renew(_Message, frozen=True):
    """Asks the run's owner for a longer certificate."""


class Renewed(_Message, frozen=True):
    """The renewed certificate (`membership.py`)."""

    certificate: bytes


class TransferLeadership(_Message, frozen=True, kw_only=True, tag="HandOver"):
    """Transfers the leadership at the end of a term; `roster` lists the live peers for the successor's first plan."""

    plan: bytes
    roster: tuple[tuple[PeerID, Advert], ...]
    permit: bytes = b""
    """The sender's signature that the receiver is its successor (`TermRequest.permit`)."""
    era: int = 0
    version: int = 0
    """The highest version of this era that the sender has heard of."""
    step: int = 0
    """Steps that most members of every stage have confirmed."""
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    pace: tuple[PaceMark, ...] = ()
    staleness_steps_mean: float = 0.0
    elapsed_s: float = 0.0
    searched: bool = False
    """The sender has searched for a better layout, and none was worth its moves."""
    plans: "tuple[PlanNote, ...]" = ()
    loads: tuple[tuple[float, ...], ...] = ()
    """Recent tokens by stage and expert, where experts are placed; a stage without data has none."""
    absent: "tuple[Absence, ...]" = ()
    """Members of the plan that have been silent for a while."""
    records: "tuple[FailureRecord, ...]" = ()
    """Failures of members and recent members, where experts are placed."""
    calibration: "LayoutCalibration | None" = None
    arrivals: "tuple[ArrivalStatistics, ...]" = ()
    """Heartbeat statistics of irregular peers, which get longer timeouts."""
    unreachable: "tuple[UnreachablePair, ...]" = ()
    """Pairs that cannot reach each other, confirmed by both."""


class LayoutCalibration(_Part, frozen=True, array_like=True):
    """Measured against predicted speed of layouts."""

    learned: tuple[tuple[int, float, int], ...]
    """(number of stages, smoothed log(measured / predicted with current figures), number of steps behind it)."""
    era: int
    steady_from: int
    """The version of `era` since which the live layout has been complete; -1: it is not yet."""
    noted: float = 0.0
    """Measured / predicted speed when the last search for a better layout began; 0: not compared yet."""
    factor_then: float = 1.0
    off: tuple[float, ...] = ()
    """log(measured tokens/s / tokens/s that its first plan predicted) of each recent earlier layout."""


class ArrivalStatistics(_Part, frozen=True, array_like=True):
    """Mean, mean deviation and recent maximum of the gaps between heartbeats (`coordinator/adaptive_timeout.py`)."""

    peer: PeerID
    mean_s: float
    deviation_s: float
    worst_s: float


class UnreachablePair(_Part, frozen=True, array_like=True):
    """Two peers that cannot reach each other, though others reach both."""

    one: PeerID
    other: PeerID
    age_s: float


class Absence(_Part, frozen=True, array_like=True):
    """A silent peer."""

    peer: PeerID
    advert: Advert
    seconds: float


class Leave(_Message, frozen=True):
    """Announces that the sender leaves: nobody is to wait for it."""


class StandingRequest(_Message, frozen=True):
    """Asks for the receiver's state: sent by `shoal recover`, by voters before they judge a plan, or by observers."""


class Standing(_Message, frozen=True, kw_only=True):
    live: bytes
    term: int
    era: int
    stage: int | None
    version: int
    synced: bool
    holdings: tuple[Holding, ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    leaves: bool = False
    """The sender drains, or is about to leave the run."""
    revision: int = 0


class Reset(_Message, frozen=True, kw_only=True):
    """The owner permits the receiver to make a plan without votes, as successor of `live`, for `roster` alone: too few
    of that plan's members are left for a majority."""

    mandate: bytes
    live: bytes
    """The highest plan that a reachable peer obeys."""
    version: int
    """The highest version, in that plan's era, of a reachable peer."""
    roster: tuple[tuple[PeerID, Advert], ...]


class StatusRequest(_Message, frozen=True):
    pass


class PeerStatus(_Part, frozen=True, omit_defaults=True):
    peer: PeerID
    name: str
    device: str
    stage: int | None
    version: int
    """-1: this coordinator has not heard the peer yet."""
    synced: bool
    draining: bool
    seen_s_ago: float
    forward_s: float
    window: int
    share: float = 0.0
    """Planned share of its stage's traffic; 0 for a spare."""
    flop_per_s: float = 0.0
    paused_s: float | None = None
    """The next three are those of the peer's heartbeat."""
    shortages: int = 0
    light: tuple[int, int] | None = None


class ExpertStatus(_Part, frozen=True, omit_defaults=True):
    """One expert of all layers of a stage with placed experts."""

    stage: int
    expert: int
    load: float = 0.0
    """Recent share of the stage's expert tokens, in [0, 1]; all 0 before any report."""
    holders: tuple[int, ...] = ()
    """Planned holders with the expert's state, as positions in `SwarmStatus.peers`."""
    coming: tuple[int, ...] = ()
    """Planned holders that have not reported the state yet."""


class PlanNote(_Part, frozen=True, array_like=True):
    """One plan of the chain, for people."""

    term: int
    sequence: int
    seconds_ago: float
    coordinator: PeerID
    reason: str
    outcome: str = ""
    """A sentence: predicted and measured speed of the layout, and its bottleneck."""


class FailureRecord(_Part, frozen=True, array_like=True):
    """One peer's reliability, as coordinators have seen it."""

    peer: PeerID
    failures: float
    """Losses of the peer without a good-bye; older ones count in part."""
    seen_s: float
    """Seconds in which a failure would have been noticed."""


class Comparison(_Part, frozen=True, omit_defaults=True):
    """Predicted and measured speed of the live layout."""

    foreseen_tokens_per_s: float
    sentence: str
    seen_tokens_per_s: float = 0.0
    """Recent median without standstills; 0: too few steps yet."""
    steps: int = 0
    today_tokens_per_s: float = 0.0
    """Predicted with current figures, as in `sentence`; for synchronous steps while these last."""
    bound: str = ""
    """The current bottleneck (`protocol.plan.Bound`)."""
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
    """Over the last minute, or the last few steps if they are slow; standstills count (`coordinator.token_rate`)."""
    loss: float | None
    validation_loss: float | None
    validation_step: int | None = None
    staleness_steps_mean: float
    stages: tuple[tuple[int, int], ...]
    peers: tuple[PeerStatus, ...]
    era: int = 0
    """Training generation: restarts from a snapshot or with another layout."""
    rollbacks: int = 0
    """Restarts that lost steps."""
    elapsed_s: float
    plans: tuple[PlanNote, ...] = ()
    experts: tuple[ExpertStatus, ...] = ()
    left_s: float | None = None
    """Seconds until the last step at `tokens_per_s`; None: unknown, or no progress."""
    stands_s: float = 0.0
    """Seconds without a commit, once that is longer than a step takes; 0: the run progresses."""
    waits_for: str = ""
    """The obstacle to progress, in words; empty: none known."""
    risks: tuple[str, ...] = ()
    """Single points of failure, unreachable pairs, and plans that members refused, in sentences."""
    comparison: Comparison | None = None
    """None: the coordinator has no prediction."""
    formats: Formats | None = None


class PastCommit(_Part, frozen=True, array_like=True):
    """A commit of one of the sender's groups."""

    seconds_ago: float
    report: CommitReport


class PastValidation(_Part, frozen=True, array_like=True):
    """A validation that the sender led."""

    seconds_ago: float
    report: ValidationReport


class HistoryRequest(_Message, frozen=True):
    """Asks a peer for its record of the run; any observer may ask."""

    commits_from: tuple[int, int]
    validations_from: tuple[int, int]


class History(_Message, frozen=True):
    """The oldest requested entries that the sender remembers, in order; `HISTORY_PER_REPLY_MAX` of each at most."""

    commits: tuple[PastCommit, ...] = ()
    validations: tuple[PastValidation, ...] = ()


# --- inside a stage group ---


class ExpertPlace(_Part, frozen=True, array_like=True):
    """The sender's place in a group of expert holders; fields as in Hello."""

    group: int
    incarnation: int
    version: int
    ready: bool
    is_open: bool
    draining: bool = False


class PresenceUpdate(EraMessage, frozen=True, kw_only=True, tag="Hello", rename={"learner": "light"}):
    """Sent to the sender's group and both neighbouring stages when it changes. The answer is a PresenceUpdate."""

    incarnation: int
    """Grows with every start of the sender's process and every stage that it enters: earlier state is gone."""
    count: int = 0
    """Serial number, since Hellos may overtake each other."""

    plan_sequence: int
    stage: int
    """-1: none."""
    version: int
    ready: bool
    """The sender holds its stage's state and takes part in rounds."""
    is_open: bool
    """The sender takes new traffic; a newcomer may be ready before that."""
    learner: bool = False
    """The sender is a learner: it takes part in rounds with its stage's weights alone, rounded to bf16. It serves no
    state, cannot hold its stage alone, owns no part of a sum and has no vote on digests."""
    draining: bool = False
    """The sender is leaving: it stays ready, not open, until its work is done, even if the plan no longer names it."""
    experts: tuple[ExpertPlace, ...] = ()


class Progress(EraMessage, frozen=True, rename={"leader": "lead", "held_out": "apart"}):
    """The sender's accumulated contribution to `step`, sent to the whole group whenever it grows."""

    incarnation: int
    """The incarnation in the sender's Hello, which this message may overtake or outlive."""
    count: int
    """Serial number within this incarnation, since messages may overtake each other."""
    stage: int
    step: int
    indices: bytes
    """Bitmap: bit i is set if microbatch i is accumulated."""
    leader: PeerID
    """The sender's choice of leader, or empty. A leader acts once all ready members name it."""
    claimed: bytes
    """Bitmap, stage 0 only: microbatches granted to the sender, accumulated or not."""
    loss_sum: float
    staleness_sum: int
    held_out: tuple[tuple[int, float, int], ...] = ()
    """(index, loss, staleness) of repeated microbatches, held out of the sum: a round may leave them out."""


class RoundMember(_Part, frozen=True):
    peer: PeerID
    bandwidth: float
    indices: bytes
    """Bitmap of its contribution: its whole sum, and the held-out microbatches that the leader selects."""


class RoundStart(EraMessage, frozen=True, rename={"learners": "light"}):
    """The group's leader opens the reduction of `step`; `members` are exactly its members, in rank order."""

    stage: int
    step: int
    attempt: int
    """Grows with the plan's sequence and with every retry; the latest leader's latest attempt counts."""
    members: tuple[RoundMember, ...]
    duplicates: int
    given_up: int
    loss_sum: float
    staleness_sum: int
    form: WireFormat = "fp32"
    """Wire format of the pieces, one of `WireSpec.sums`."""
    learners: tuple[PeerID, ...] = ()
    """Learners: they contribute and get the reduced gradient, and own no part of the sum."""


class RoundEnded(EraMessage, frozen=True):
    """The sender has the reduced gradient of `step` from this attempt, and waits for the other end of a tied model
    (`peer/group/tied.py`). A receiver that answers joins no other attempt."""

    stage: int
    step: int
    attempt: int


class Digest(EraMessage, frozen=True):
    """The digest of the sender's state after the step to `version`."""

    stage: int
    version: int
    digest: str


class Attestation(EraMessage, frozen=True):
    """The sender's signature on its group's state at `version`, for others to forward. Sent to the other holders while
    a newcomer joins, which may fetch only what most of them have signed."""

    stage: int
    version: int
    root: str
    """Root over the digests of all layers of the group (`peer/replica/attestations.py`)."""
    signature: bytes


class Claim(EraMessage, frozen=True):
    """A stage-0 replica asks the group's leader for microbatches to compute."""

    count: int


class Grant(EraMessage, frozen=True):
    """`items` are (step, index); index < 0 is validation microbatch -1 - index at version `step`."""

    items: tuple[tuple[int, int], ...]
    steps_ahead: int = -1
    """The leader's choice of steps to run ahead, -1: unknown; `gain` scales the number in flight (`flow.py`)."""
    gain: float = 1.0


class Repair(EraMessage, frozen=True):
    """A group's leader tells stage 0 that the stage lost its part of these microbatches of `step` with a replica. They
    are computed again; a holder of their gradient computes and adds nothing."""

    step: int
    indices: bytes


class Again(EraMessage, frozen=True):
    """Stage 0's leader assigns (step, index) of microbatches to compute again to a group member."""

    items: tuple[tuple[int, int], ...]


class Reject(EraMessage, frozen=True, tag="HandBack"):
    """The sender, of `stage`, rejects microbatches because it pauses or lags: (step, index, True if it may have run).
    The peer that sent them sends them elsewhere; those of stage 0 go back to its leader."""

    stage: int
    items: tuple[tuple[int, int, bool], ...]


class ExpertDone(EraMessage, frozen=True, kw_only=True, rename={"retried": "again"}):
    """A member of `stage` has finished a microbatch: the holder's sum for these experts is complete in it.

    Refused if the holder lacks a part; then another holder gets all of it.
    """

    stage: int
    incarnation: int
    """Both this and `passage` equal those of the sender's ExpertTokens."""
    passage: int
    step: int
    index: int
    experts: tuple[tuple[int, int], ...]
    """(expert, number of layers with a backward); 0: without tokens. Every expert counts every microbatch once."""
    retried: bool
    """The microbatch may have come before, maybe to another holder: keep its contribution separate."""


class ValidationResult(EraMessage, frozen=True):
    """A stage-0 replica reports the loss of one validation microbatch to its leader."""

    step: int
    index: int
    loss: float


# --- state for newcomers ---


class StateRequest(EraMessage, frozen=True):
    """Asks the receiver to pin its current version (or `version`, if still there) and to describe it."""

    layers: tuple[str, ...]
    version: int = -1
    stored_era: int = -1
    """If >= 0, describe the stored snapshot of that era's `version`, of as many of `layers` as it has. -3: describe the
    current parameters alone, rounded to bf16."""
    ahead: bool = False
    """The sender prefetches the one layer of `layers` for the next layout: it fetches the current state, replays the
    steps that follow, and compares with the holders when the layout ends. So the offer has no digest."""
    base: int = -1
    """The version of the sender's bf16 parameters; -1: none."""
    to_compare: bool = False
    """The sender has the state already: describe what most holders have signed, and pin nothing."""


class StateOffer(EraMessage, frozen=True):
    """`digests` per layer; the version stays pinned for `pinned_s` from each request."""

    version: int
    digests: tuple[tuple[str, str], ...]
    pinned_s: float
    signatures: tuple[tuple[PeerID, bytes], ...] = ()
    """The holders' signatures (`Attestation`) on the root of these digests, for a newcomer of the group."""
    base: int = -1
    """The requested `base` if the sender has that version and can send the difference to it; else -1."""


class Keep(EraMessage, frozen=True):
    """Asks for a copy on the receiver's disk, since the sender's whole stage may die. Answered before the fetch."""

    version: int
    layers: tuple[str, ...]


class Halt(EraMessage, frozen=True):
    """The sender, a stage's only holder, leaves: the leader of stage 0 is to begin no further step for a while.

    `at_once`: nor to hand out the rest of an open step, which then is not committed.
    """

    at_once: bool = False


class Halted(_Message, frozen=True):
    """Every stage reaches `version` and goes no further while the halt lasts."""

    version: int


class Save(EraMessage, frozen=True):
    """Asks the receiver to save its layers at `version`, which every stage is about to reach, and then to answer."""

    version: int


class Saved(_Message, frozen=True):
    """The sender's layers are on disk at `version`; below the requested version: it has not reached that one yet."""

    version: int


class StateChunkRequest(EraMessage, frozen=True, kw_only=True, rename={"via": "holder"}):
    """Asks for elements [start, stop) of one tensor of one layer, as StateChunk frames. `tensor` 0: parameters, 1 and
    2: moments, 3: the reduced gradient with which the layer stepped to `version`."""

    stored_era: int = -1
    """Same as in the StateRequest; for a gradient, its era."""

    version: int
    layer: str
    tensor: int
    start: int
    stop: int
    via: PeerID | None = None
    """The peer from which the receiver is to fetch the elements and pass them on; None: it has them."""
    base: int = -1
    """The sender's bf16 version, if the receiver offers the difference to it (`StateOffer.base`); -1: full values."""


class ReducedRequest(EraMessage, frozen=True):
    """Asks for the reduced gradient of `step`, once it exists, as BULK frames; for a newcomer that catches up.

    The answer is a `Digest`; its version says what follows. Above `step`: the gradient. `step`: only the pieces of the
    round that are on their way to the sender. Below: nothing.
    """

    stage: int
    step: int


class TiedRequest(EraMessage, frozen=True):
    """Asks for the reduced gradient of a tied model's matrix, of `step`, as soon as it exists."""

    stage: int
    step: int
    serial: int = 0
    peek: bool = False
    """Send nothing; answer if you have the gradient of both ends, or do not need it."""


class TiedOffer(EraMessage, frozen=True):
    """Answers TiedRequest; the gradient follows as frames."""

    is_whole: bool
    form: WireFormat = "fp32"


class InferenceRequest(_Message, frozen=True, kw_only=True):
    """A member asks the swarm's model about some tokens. The receiver serves the request, whatever it holds itself."""

    way: int = 0
    """Chosen by the client: requests with the same way go to the same members."""
    session: int = 0
    """Chosen by the client for tokens in several requests: the stages keep the earlier tokens. 0: no session."""
    version: int = -1
    """Version of the weights; -1: the newest, which the answer names."""
    rows: int = 1
    position: int = 0
    tokens: bytes
    """int32 [rows, T]."""
    targets: bytes = b""
    """int32 [rows, T], targets to score, `IGNORED` for none. Empty: predict the next token."""
    begins: bytes = b""
    """uint8 [rows, T], 1 where a document begins. Empty: attention crosses documents."""


class InferenceAnswer(_Message, frozen=True, kw_only=True):
    """Answers an InferenceRequest. With targets: float32 [rows, T] log-likelihoods, then uint8 [rows, T], 1 where the
    target is the likeliest token. Without: the likeliest tokens, int32 [K], and their logits, float32 [K]."""

    version: int
    era: int
    payload: bytes
    is_past: bool = False
    """No answer: a stage is past the requested version; ask for a newer one."""


class InferenceOutput(EraMessage, frozen=True, kw_only=True):
    """A request's result, from the last stage to the entry peer."""

    serial: int
    version: int = -1
    payload: bytes = b""
    refused: str = ""
    is_past: bool = False


class Ping(_Message, frozen=True):
    """Measures a round trip; `pad` is sent back."""

    pad: bytes = b""


class PingRequest(_Message, frozen=True):
    """The coordinator, which cannot reach `peer`, asks another member to ping it and to return its Ping."""

    peer: PeerID


class ProbeTogether(_Message, frozen=True):
    """Asks a peer behind the same network card to probe `links` at the same time as the sender."""

    links: tuple[LinkReport, ...]


class Probed(_Message, frozen=True):
    """Answers a ProbeTogether: for each link (bytes that arrived, seconds to the last byte). Empty: declined."""

    arrived: tuple[tuple[int, float], ...]


class Done(_Message, frozen=True):
    """Answers a message that needs no other answer."""


class Refusal(_Message, frozen=True):
    """The sender understood the message and declines; `reason` is for people.

    `keeps_out`: the run does not admit the receiver, whatever it asks.
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
# `stage` is the receiver's, unless the field says otherwise.


class Activation(EraMessage, frozen=True, rename={"retried": "again"}):
    """Sent to the next stage. Payload: the activation [B, T, D] in the wire dtype, then targets [B, T] as int32, then
    their weights if the run leaves some targets out (`peer/pipeline/wire.py`)."""

    stage: int
    incarnation: int
    """The incarnation in the sender's Hello, which this frame may overtake."""
    step: int
    index: int
    retried: bool = False
    """The microbatch may have come before, maybe to another replica: keep its contribution separate."""


class Gradient(EraMessage, frozen=True):
    """Sent back to the sender of the activation. Payload: the gradient [B, T, D]; empty for validation."""

    stage: int
    step: int
    index: int
    loss: float
    waited_s: float
    """Time that the microbatch spent in queues since the receiver sent it on; it is not part of the round trip."""
    commit_s: float
    """Time from a step's last contribution to the next version, at the slowest stage so far."""


class ExpertTokens(EraMessage, frozen=True, kw_only=True):
    """Tokens of one microbatch in one layer, to a holder of some of its experts. Payload: the tokens [N, D] in the wire
    dtype, grouped by expert; in a backward followed by the gradients [N, D] of their outputs."""

    stage: int
    """The sender's stage, to which the experts belong."""
    incarnation: int
    passage: int
    """Serial number of the sender's run of the microbatch, since a run may be given up and repeated."""
    serial: int
    """Serial number of the sender's requests in this membership; a repeated request keeps it."""
    step: int
    index: int
    layer: int
    backward: bool
    counts: tuple[tuple[int, int], ...]


class ExpertOutput(EraMessage, frozen=True, kw_only=True):
    """Answers ExpertTokens with the outputs [N, D], in a backward with the tokens' gradients."""

    stage: int
    incarnation: int
    serial: int
    refused: str = ""


class InferenceInput(EraMessage, frozen=True, kw_only=True):
    """A client's request on its way through the stages. Payload: to stage 0 the tokens [rows, T] as int32; to the
    others the activation [rows, T, D], or in a subspace model coordinates [rows, T, k] and tokens
    (`peer/inference/wire.py`). Then targets and beginnings, if there are any."""

    stage: int
    first_layer: int
    """The receiver's first layer, as the sender knows it."""
    entry: PeerID
    """The peer that received the request and gets the output."""
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
    """Reduce-scatter: elements [start, start + n) of the sender's summed gradient of `step`, in the round's format."""

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
    """Elements [start, start + n) of a layer's tensor, in fp32; a gradient in its wire format, light parameters in
    bf16."""

    stored_era: int = -1

    version: int
    layer: str
    tensor: int
    start: int
    base: int = -1
    """The bf16 version to which this is the difference (`peer/encoding/difference.py`); -1: full values."""


class ReducedChunk(EraMessage, frozen=True):
    """Elements [start, start + size) of the reduced gradient of `step`."""

    stage: int
    step: int
    start: int
    size: int
    form: WireFormat
    """The payload's format: the round's, or a lossless one."""


class TiedChunk(EraMessage, frozen=True):
    """Elements [start, start + n) of the reduced gradient of a tied model's matrix, of `step`."""

    stage: int
    step: int
    serial: int
    start: int


class ProbeChunk(_Message, frozen=True):
    """Bytes for a rate measurement. `echo`: the receiver answers with an empty frame of the same `nonce`."""

    nonce: int
    """-1 starts the receiver's clock; other negative values mean nothing."""
    echo: bool
    took_s: float = 0.0
    """Set in an answer: seconds from the last such start to the answered frame."""


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
    """The head of the plan chain, from which a newcomer finds the coordinator."""

    term: int
    sequence: int
    digest: str
    coordinator: PeerID
    addresses: tuple[str, ...]


Record = SpecRecord | AdvertRecord | PlanHead
