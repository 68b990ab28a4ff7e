"""Compare the members' states after each round. Pure.

Each member sends the others the digest of every version that it reaches. Once all members of a round have sent their
digests, the most frequent digest is the group's. A member with another digest fetches the state; the first member by
rank with the group's digest reports the commit to the coordinator. The other members keep a copy of that report, and
send it if the reporter dies first, so that no commit is missing.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field

from shoal.peer.replica.commands import CommitCommand, Report, Resync, Witness
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import DIGESTS_OF_ONE_MAX
from shoal.protocol.messages import CommitReport, Digest, RoundStart

UNCOMPARED_MAX = 16
"""A member that has not sent its digest by the time we are this many versions past a round loses its vote in that
round, if most members have sent theirs: its device is slow."""
MUTE_S = 5.0
"""Seconds after our step until a member that has not sent its digest loses its vote, if most members have sent theirs.
A timeout is needed because a round can end without a member that owns no part of the gradient."""
MUTE_AT_THE_END_S = 0.3
"""Replaces `MUTE_S` once the layout has ended: a commit counts only if it is compared before the next layout begins."""


@dataclass(kw_only=True, slots=True)
class Agreement:
    """The digests received by one member. Args: has_loss: our stage is the last, which reports the step's loss."""

    me: PeerID
    stage: int
    microbatches: int
    tokens_per_microbatch: int
    has_loss: bool
    _digests: dict[int, dict[PeerID, str]] = field(default_factory=dict)
    _spoken: dict[PeerID, int] = field(default_factory=dict)
    _norms: dict[int, float] = field(default_factory=dict)
    """Version -> norm of the gradient with which we stepped to that version."""
    own: tuple[Digest, ...] = ()
    """The digest of our present state, as a tuple of one; empty: we have no complete state yet."""
    _since_s: dict[int, float] = field(default_factory=dict)
    """Step -> time at which `settle` first found that we had made this step."""
    next_s: float = math.inf
    """Time to call `settle` again: `MUTE_S` then ends for a round that lacks digests. Infinite: no round waits."""
    _unreported: deque[tuple[PeerID, CommitReport]] = field(default_factory=lambda: deque(maxlen=UNCOMPARED_MAX))

    def stepped(self, version: int, digest: str, gradient_norm: float | None) -> None:
        """Record that we are at `version`. Args: gradient_norm: None if we loaded the state instead of stepping."""
        self.own = (Digest(stage=self.stage, version=version, digest=digest),)
        if gradient_norm is not None:
            self._norms[version] = gradient_norm
        self.heard(self.me, version, digest)

    def heard(self, peer: PeerID, version: int, digest: str) -> None:
        """Record a member's digest. Keep the latest `DIGESTS_OF_ONE_MAX` versions of each member."""
        self._digests.setdefault(version, {})[peer] = digest
        self._spoken[peer] = max(version, self._spoken.get(peer, version))
        versions = [v for v, said in self._digests.items() if peer in said]
        if len(versions) > DIGESTS_OF_ONE_MAX:
            oldest = self._digests[min(versions)]
            del oldest[peer]
            if not oldest:
                del self._digests[min(versions)]

    def forget_all_but(self, known: Container[PeerID]) -> None:
        """Drop the digests of peers outside `known`: no recent plan names these peers."""
        self._spoken = {peer: version for peer, version in self._spoken.items() if peer in known}
        for version in list(self._digests):
            self._digests[version] = {p: digest for p, digest in self._digests[version].items() if p in known}
            if not self._digests[version]:
                del self._digests[version]

    def forget_before(self, version: int) -> None:
        for old in [v for v in self._digests if v < version]:
            del self._digests[old]
        self._norms = {step: norm for step, norm in self._norms.items() if step >= version}
        self._since_s = {step: since_s for step, since_s in self._since_s.items() if step >= version}

    def is_behind(self, version: int) -> bool:
        """True if a member has announced a later version."""
        return any(spoken > version for spoken in self._spoken.values())

    def num_past(self, version: int, peers: Collection[PeerID]) -> int:
        """Return how many of `peers` have announced a later version."""
        return sum(self._spoken.get(peer, -1) > version for peer in peers)

    def ahead_of(self, version: int, is_gone: Callable[[PeerID], bool]) -> list[PeerID]:
        """Return the peers at the lowest announced version above `version`: peers further ahead may no longer keep the
        gradient of our next step."""
        ahead = {peer: spoken for peer, spoken in self._spoken.items() if spoken > version and not is_gone(peer)}
        first = min(ahead.values(), default=version)
        return sorted(peer for peer, spoken in ahead.items() if spoken == first)

    def reports_left_by(self, reporter: PeerID) -> list[CommitCommand]:
        """Return the commit reports that `reporter` may not have sent before it died, so that we send them."""
        return [Report(report) for peer, report in self._unreported if peer == reporter]

    def settle(
        self,
        rounds: Mapping[int, RoundStart],
        version: int,
        gone: Container[PeerID],
        *,
        now_s: float,
        has_ended: bool = False,
    ) -> list[RoundStart]:
        """Return the rounds before `version` with digests that can be compared now: each full member has sent one or is
        gone, or most have sent one and time is up (`MUTE_S`, `UNCOMPARED_MAX`).

        A digest of a later version counts as sent: the sender skipped the round's version by fetching a later state.
        Args: has_ended: the layout commits no more steps.
        """
        settled, self.next_s = [], math.inf
        for step, start in sorted(rounds.items()):
            if step >= version:
                break
            spoken = [peer for peer in _voters(start) if self._spoken.get(peer, -1) > step]
            mute_s = self._since_s.setdefault(step, now_s) + (MUTE_AT_THE_END_S if has_ended else MUTE_S)
            overdue = now_s >= mute_s or step < version - UNCOMPARED_MAX
            voters = _voters(start)
            if all(peer in gone or peer in spoken for peer in voters) or (overdue and 2 * len(spoken) > len(voters)):
                settled.append(start)
            elif now_s < mute_s:
                self.next_s = min(self.next_s, mute_s)
        return settled

    def conclude(self, start: RoundStart, gone: Container[PeerID], *, in_plan: bool) -> list[CommitCommand]:
        """Compare the digests after a round that `settle` returned. If ours is not the most frequent, return a command
        to fetch the state, else one to report the commit or to keep the report. Args: in_plan: the plan names us."""
        version = start.step + 1
        digests = self._digests.pop(version, {})
        voters = [peer for peer in _voters(start) if peer in digests]
        if not voters:
            return []
        others = [peer for peer in _voters(start) if peer != self.me]
        if others and voters == [self.me] and not (in_plan and all(peer in gone for peer in others)):
            # The living members did not reach this version by this round: we were suspended, and they made another.
            return []
        votes = [digests[peer] for peer in voters]
        # The most frequent digest wins; in a tie, the one of the first member by rank.
        truth = max(dict.fromkeys(votes), key=lambda digest: (votes.count(digest), -votes.index(digest)))
        reporter = voters[votes.index(truth)]
        if digests.get(self.me, truth) != truth:  # we have none if we skipped that version by fetching a later state
            return [Resync(reporter, version)]
        dissenting = sum(digest != truth for digest in votes)
        report = self._report(start, truth, dissenting)
        if reporter == self.me or reporter in gone:
            return [Report(report)]
        self._unreported.append((reporter, report))
        return [Witness(report)]

    def _report(self, start: RoundStart, digest: str, dissenting: int) -> CommitReport:
        contributed = self.microbatches - start.given_up + start.duplicates
        return CommitReport(
            stage=self.stage,
            step=start.step,
            members=len(start.members),
            microbatches=self.microbatches - start.given_up,
            duplicates=start.duplicates,
            given_up=start.given_up,
            tokens=(self.microbatches - start.given_up) * self.tokens_per_microbatch,
            staleness_steps_mean=start.staleness_sum / max(1, contributed),
            loss=start.loss_sum / max(1, contributed) if self.has_loss else None,
            digest=digest,
            dissenting=dissenting,
            gradient_norm=self._norms.get(start.step + 1),
        )


def _voters(start: RoundStart) -> list[PeerID]:
    """Return the round's full members, which vote on the digest by sending theirs; learners have no complete state."""
    return [member.peer for member in start.members if member.peer not in start.learners]
