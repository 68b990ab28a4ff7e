"""Whether the members of a round have the same state after it. Pure.

Each member tells the others the digest of every version it reaches. Once all members of a round have spoken, the digest
that most have is the group's; who has another fetches the state, and the first who has it reports the commit. The
others keep the report for as long as its reporter may die with it: whoever counts, counts a commit once.
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
"""Versions that we may be ahead of a member's digest: its device may be slow to step, though its network is not."""
MUTE_S = 5.0
"""A member that has not spoken of a version for so long after we stepped has no vote, if most others have spoken. One
whose part of a round was empty is not missed by the round itself, only by those who wait for its word."""
MUTE_AT_THE_END_S = 0.3
"""The same where the layout has ended: when the next one begins nobody counts a commit of this one any more."""


@dataclass(kw_only=True, slots=True)
class Agreement:
    """One member's view of who has said what.

    Args:
        microbatches: M, per step.
        tokens_per_microbatch: for the ledger.
        has_loss: the last stage, whose report carries the step's loss.
    """

    me: PeerID
    stage: int
    microbatches: int
    tokens_per_microbatch: int
    has_loss: bool
    _digests: dict[int, dict[PeerID, str]] = field(default_factory=dict)
    _spoken: dict[PeerID, int] = field(default_factory=dict)
    _norms: dict[int, float] = field(default_factory=dict)
    """Version -> norm of the gradient with which we stepped to it."""
    own: tuple[Digest, ...] = ()
    """What we have said of the version that we are at; nothing before the first."""
    _since_s: dict[int, float] = field(default_factory=dict)
    """Step -> when we first saw its round behind us."""
    next_s: float = math.inf
    """When a round may settle without anybody's word."""
    _unreported: deque[tuple[PeerID, CommitReport]] = field(default_factory=lambda: deque(maxlen=UNCOMPARED_MAX))

    def stepped(self, version: int, digest: str, gradient_norm: float | None) -> None:
        """We are at `version`. Args: gradient_norm: of the gradient that brought us there, if a step of ours did."""
        self.own = (Digest(stage=self.stage, version=version, digest=digest),)
        if gradient_norm is not None:
            self._norms[version] = gradient_norm
        self.heard(self.me, version, digest)

    def heard(self, peer: PeerID, version: int, digest: str) -> None:
        """Of each peer its latest versions are kept, `DIGESTS_OF_ONE_MAX` of them."""
        self._digests.setdefault(version, {})[peer] = digest
        self._spoken[peer] = max(version, self._spoken.get(peer, version))
        versions = [v for v, said in self._digests.items() if peer in said]
        if len(versions) > DIGESTS_OF_ONE_MAX:
            oldest = self._digests[min(versions)]
            del oldest[peer]
            if not oldest:
                del self._digests[min(versions)]

    def forget_all_but(self, known: Container[PeerID]) -> None:
        """What anybody else has said counts no more: no plan of late names it."""
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
        """Somebody has spoken of a later one."""
        return any(spoken > version for spoken in self._spoken.values())

    def num_past(self, version: int, peers: Collection[PeerID]) -> int:
        """How many of them have spoken of a later one."""
        return sum(self._spoken.get(peer, -1) > version for peer in peers)

    def ahead_of(self, version: int, is_gone: Callable[[PeerID], bool]) -> list[PeerID]:
        """Who is past `version`: those who are least far, since who is further may have dropped what leads there."""
        ahead = {peer: spoken for peer, spoken in self._spoken.items() if spoken > version and not is_gone(peer)}
        first = min(ahead.values(), default=version)
        return sorted(peer for peer, spoken in ahead.items() if spoken == first)

    def are_past(self, version: int, peers: Collection[PeerID]) -> bool:
        """Whether each of them has spoken of a later one."""
        return all(self._spoken.get(peer, -1) > version for peer in peers)

    def is_alone_at(self, version: int, mates: Collection[PeerID]) -> bool:
        """Whether there are mates and none has spoken of this version, or a later one."""
        return bool(mates) and all(self._spoken.get(mate, -1) < version for mate in mates)

    def reports_left_by(self, reporter: PeerID) -> list[CommitCommand]:
        """It died: what it may not have reported any more."""
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
        """Rounds up to `version` of which every member has spoken, or is gone: the dead do not vote, nor do the mute.

        A member that has only spoken of a later version has skipped one, by fetching that later state.

        Args: has_ended: the layout commits no step more.
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
        """Compare what the members of a settled round have said; `in_plan`: the plan has a place for us."""
        version = start.step + 1
        digests = self._digests.pop(version, {})
        voters = [peer for peer in _voters(start) if peer in digests]
        if not voters:
            return []
        others = [peer for peer in _voters(start) if peer != self.me]
        if others and voters == [self.me] and not (in_plan and all(peer in gone for peer in others)):
            # Those who live have not come by this version this way: we slept, and they went on without us.
            return []
        votes = [digests[peer] for peer in voters]
        # The digest most members have; among equals the lead's.
        truth = max(dict.fromkeys(votes), key=lambda digest: (votes.count(digest), -votes.index(digest)))
        reporter = voters[votes.index(truth)]
        if digests.get(self.me, truth) != truth:  # we may have skipped that version by fetching a later state
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
    """Whose digests count after a round: those of the members that hold the state."""
    return [member.peer for member in start.members if member.peer not in start.light]
