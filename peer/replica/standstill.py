"""Say in words what a group waits for: the first thing to know when a run stands still."""

from collections.abc import Sequence

from shoal.peer.replica.members import MembershipView
from shoal.protocol.messages import RoundStart


def standstill(members: MembershipView, open_round: RoundStart | None, missing: Sequence[int]) -> str:
    """`missing`: microbatches of the step that no member has contributed."""
    if open_round is not None:
        return "the round of " + ", ".join(member.peer[-8:] for member in open_round.members)
    what = f"microbatches {list(missing)}" if missing else "a round"
    if members.leader is None:
        return f"{what}, and a leader"
    if members.leader != members.me:
        return f"{what}, from the leader, {members.leader[-8:]}"
    others = ", ".join(peer[-8:] for peer in members.doubtful)
    return f"{what}; we lead, but these have not confirmed it: {others}" if others else f"{what}; we lead"
