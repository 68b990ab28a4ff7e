"""What can members of bad will do? The swarms of `coordination.py`, in which the last peer lies, or the last third of
the peers, which came by one invite and tell the same lies.

Each seed draws two of these lies, beside the crashes, cuts and pauses of the others, which train on and certify what
they train:

| it              | does                                                                                  |
|-----------------|---------------------------------------------------------------------------------------|
| forges          | claims a snapshot of a version that nobody has reached, of all layers, in any era     |
| boasts          | says that it holds that version, whatever its place                                   |
| signs           | attests digests of its own for every group                                            |
| rules           | half of the plans that it makes drop the others, go back, or have absurd shares       |
| objects         | refuses half of the plans that it is offered                                          |
| excludes        | votes to put every other member out                                                   |

Checked, beside what `coordination.py` checks of the honest members:

- the run goes back to nothing but the newest version that is certified, with the honest digests;
- no plan certifies a digest that is not the honest one, but of layers that the liar alone holds;
- no honest member is excluded, and at the end one plan has all of them.

    tests/soak/insiders.py [--seeds 1000] [--first 0] [--jobs 2]
    tests/soak/insiders.py --third                                          a third of the peers
    tests/soak/insiders.py --replay 4711
"""

import argparse
import logging
import multiprocessing
import sys
import time
from functools import partial
from typing import Any

import msgspec
from coordination import Game, Verdict

from shoal.coordinator.driver import Coordination
from shoal.coordinator.era import newest_whole
from shoal.protocol.certificate import Attested, layers_at
from shoal.protocol.exclusion import propose_exclusion
from shoal.protocol.identity import PeerID, public_key_of
from shoal.protocol.layers import all_layer_keys, group_keys
from shoal.protocol.messages import Advert, Heartbeat, Holding, PlanVote
from shoal.protocol.plan import Plan, SignedPlan, sign_plan
from shoal.protocol.sim.world import SimPeer
from shoal.protocol.spec import run_id
from shoal.protocol.statement import sign_statement

LIES = ("forges", "boasts", "signs", "rules", "objects", "excludes")
STEP_S = 0.7
SAVED_EVERY = 7
FORGED = 4800


class InsiderGame(Game):
    """One swarm with liars in it. Args: third: a third of the peers lie, not one."""

    def __init__(self, seed: int, *, third: bool = False, **how: Any) -> None:
        super().__init__(seed, peers_max=9 if third else 7, **how)
        training = msgspec.structs.replace(self._spec.training, steps=FORGED)
        self._spec = msgspec.structs.replace(self._spec, training=training)
        self._liars = self._names[-(len(self._names) // 3 if third else 1) :]
        self._lies = frozenset(self._rng.sample(LIES, 2))
        self._ahead = self._rng.choice((0, 0, 1))
        """How many eras what it forges is ahead of the live one."""
        self._tell(f"{', '.join(self._liars)}: {' and '.join(sorted(self._lies))}")

    # --- what the members say ---

    def _beat(self, port: SimPeer, live: SignedPlan | None, advert: Advert) -> Heartbeat:
        beat = super()._beat(port, live, advert)
        if live is None or live.plan.stage_of(port.peer_id) is None:
            return self._lied(beat, port, live) if port.name in self._liars else beat
        version = int(self._world.now_s() / STEP_S)
        saved = version - version % SAVED_EVERY
        # A disk keeps what is certified beside the newest snapshot.
        ages = {(live.plan.era, saved), newest_whole(live.plan, self._spec.model)[0]}
        every = all_layer_keys(self._spec.model)
        held = tuple(Holding(era=era, version=at, layers=every) for era, at in sorted(ages) if at)
        words = (self._word(port, live.plan, beat.stage or 0, saved, ""),) if saved else ()
        beat = msgspec.structs.replace(beat, version=version, holdings=held, attested=words)
        return self._lied(beat, port, live) if port.name in self._liars else beat

    def _word(self, port: SimPeer, plan: Plan, group: int, version: int, salt: str) -> Attested:
        keys = group_keys(self._spec.model, plan, group)
        word = Attested(plan.era, version, tuple((key, f"{key}@{version}{salt}") for key in keys), b"")
        run = run_id(self._spec, self._world.peers[self._names[0]].peer_id)
        return msgspec.structs.replace(word, signature=sign_statement(port.identity, "state", run=run, body=word.body))

    def _lied(self, beat: Heartbeat, port: SimPeer, live: SignedPlan | None) -> Heartbeat:
        every = all_layer_keys(self._spec.model)
        replace, era = msgspec.structs.replace, beat.era
        if "forges" in self._lies:
            forged = Holding(era=era + self._ahead, version=FORGED, layers=every)
            beat = replace(beat, holdings=(forged, *beat.holdings))
        if "boasts" in self._lies:
            beat = replace(beat, version=FORGED, stage=beat.stage or 0, synced=True)
        if "signs" in self._lies and live is not None:
            groups = range(len(live.plan.stages))
            words = tuple(self._word(port, live.plan, group, FORGED, "forged") for group in groups)
            beat = replace(
                beat, attested=(*words, *(self._word(port, live.plan, g, beat.version, "x") for g in groups))
            )
        return beat

    def _invite_of(self, peer: PeerID) -> bytes:
        """The owner needed no invite, the other honest members came by two, the liars by one."""
        name = next(name for name in self._names if self._world.peers[name].peer_id == peer)
        if name in self._liars:
            return b"bad"
        return b"" if name == self._names[0] else (b"even", b"odd")[int(name[1:]) % 2]

    def _tamper(self, name: str, coordination: Coordination) -> None:
        core, identity = coordination.core, self._world.peers[name].identity
        if len(self._liars) > 1:
            core.view.electorate._invite_of = self._invite_of
        if name not in self._liars:
            return
        if "rules" in self._lies:
            proposer = core._proposer
            make = proposer.make

            def poisoned(base: SignedPlan | None, *args: Any, **named: Any) -> SignedPlan:
                made = make(base, *args, **named)
                if base is None or self._rng.random() < 0.5:
                    return made
                return sign_plan(identity, self._poisoned(made.plan, base.plan))

            proposer.make = poisoned  # type: ignore[method-assign]
        if "objects" in self._lies:
            vote = core._vote

            def objecting(event: Any, offer: Any, plan: Any, now_s: float) -> Any:
                commands = vote(event, offer, plan, now_s)
                if self._rng.random() < 0.5:
                    return commands
                no = PlanVote(accepted=False, reason="no", term=core.chain.granted_term, unfit=True)
                return [
                    msgspec.structs.replace(c, message=no) if isinstance(getattr(c, "message", None), PlanVote) else c
                    for c in commands
                ]

            core._vote = objecting  # type: ignore[method-assign]
        if "excludes" in self._lies:
            self._later(3.0, lambda: self._excludes(name, coordination))

    def _poisoned(self, plan: Plan, base: Plan) -> Plan:
        replace = msgspec.structs.replace
        kind = self._rng.choice(("drops", "back", "seed", "shares"))
        if kind == "drops":
            alone = tuple(
                replace(stage, members=tuple(replace(stage.members[0], peer=peer) for peer in (mine,)))
                for stage, mine in zip(plan.stages, (plan.coordinator, plan.members[0]), strict=False)
            )
            alone = tuple({stage.peers: stage for stage in alone}.values())
            if len(alone) == len(plan.stages):
                return replace(plan, stages=alone, spares=(), roll=())
            kind = "back"
        if kind == "shares":
            first = plan.stages[0]
            odd = tuple(replace(m, share=1e17 if m.peer == plan.coordinator else 1.0) for m in first.members)
            return replace(plan, stages=(replace(first, members=odd), *plan.stages[1:]))
        version = FORGED if kind == "back" else 0
        return replace(plan, era=base.era + 1, rollbacks=base.rollbacks + 1, restore_version=version, not_started=True)

    def _excludes(self, name: str, coordination: Coordination) -> None:
        live, port = coordination.plan, self._world.peers[name]
        if live is None or not port.is_alive or port.peer_id not in live.plan.electors:
            return
        others = {public_key_of(PeerID(peer)): b"" for peer in live.plan.members if peer != port.peer_id}
        order = propose_exclusion(others, base=live.digest)
        run = run_id(self._spec, self._world.peers[self._names[0]].peer_id)
        signature = sign_statement(port.identity, "exclusion", run=run, body=order.body)
        at = live.plan.electors.index(port.peer_id)
        coordination.exclude(msgspec.structs.replace(order, votes=((at, signature),)))
        self._later(5.0, lambda: self._excludes(name, coordination))

    # --- what is checked ---

    def _obeys(self, name: str, signed: SignedPlan) -> None:
        if name in self._liars:
            return
        super()._obeys(name, signed)
        plan = signed.plan
        before = next((signed.plan for signed in self._plans.values() if signed.digest == plan.previous), None)
        if before is not None and plan.era != before.era:
            at, wanted = (plan.restore_era, plan.restore_version), all_layer_keys(self._spec.model)
            honest = {key: f"{key}@{plan.restore_version}" for key in wanted}
            ages = {entry.age for entry in before.certified}
            whole = (age for age in ages if layers_at(before.certified, age).keys() >= set(wanted))
            newest = max(whole, default=(0, 0))
            if at < newest or (plan.restore_version and layers_at(plan.certified, at) != honest):
                self.verdict.flaws.append(f"{name} went back to version {at}, and {newest} is certified")
        if plan.exclusions:
            self.verdict.flaws.append(f"{name} obeys an order of exclusion")
        for entry in plan.certified:
            is_forged = any(digest != f"{key}@{entry.version}" for key, digest in entry.proofs)
            if is_forged and (entry.signatures and not self._is_its_own(entry.keys, plan)):
                self.verdict.flaws.append(f"{name} obeys a plan that certifies a forged version {entry.version}")

    def _is_its_own(self, keys: tuple[str, ...], plan: Plan) -> bool:
        """True if liars alone held these layers: then nobody knows better."""
        base = next((signed.plan for signed in self._plans.values() if signed.digest == plan.previous), None)
        liars = {self._world.peers[name].peer_id for name in self._liars}
        groups = range(len(base.stages)) if base is not None else range(0)
        found = [g for g in groups if base is not None and group_keys(self._spec.model, base, g) == keys]
        return all(base is None or liars >= {*base.stages[group].peers} for group in found)

    def _is_calm(self) -> bool:
        honest = [peer for name, peer in self._peers.items() if name not in self._liars]
        lives = [peer.coordination.plan for peer in honest if peer.port.is_alive]
        if len(lives) < len(honest) or any(live is None for live in lives):
            return False
        plans = {live.digest: live.plan for live in lives if live is not None}
        (first, *more) = plans.values()
        return not more and {peer.port.peer_id for peer in honest} <= set(first.members)


def judge(seed: int, *, third: bool = False) -> Verdict:
    """One seed, whatever comes out of it."""
    game = InsiderGame(seed, third=third)
    try:
        return game.play()
    except Exception as error:  # what a driver lets out is a flaw, too
        game.verdict.flaws.append(repr(error))
        return game.verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--third", action="store_true", help="a third of the peers lie, all by one invite")
    parser.add_argument("--replay", type=int, default=None)
    asked = parser.parse_args()
    if asked.replay is not None:
        logging.basicConfig(level=logging.INFO, format="         %(name)s: %(message)s", stream=sys.stdout)
        verdict = InsiderGame(asked.replay, third=asked.third, tell=lambda text: sys.stdout.write(f"{text}\n")).play()
        sys.stdout.write(f"{verdict}\n")
        return int(bool(verdict.flaws))
    logging.disable(logging.CRITICAL)
    begun_s, flawed, num_plans = time.monotonic(), [], 0
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for verdict in pool.imap(
            partial(judge, third=asked.third), range(asked.first, asked.first + asked.seeds), chunksize=4
        ):
            num_plans += verdict.num_plans
            if verdict.flaws:
                flawed.append(verdict.seed)
                sys.stdout.write(f"seed {verdict.seed}: {'; '.join(dict.fromkeys(verdict.flaws))}\n")
                sys.stdout.flush()
    seconds = time.monotonic() - begun_s
    sys.stdout.write(f"{asked.seeds} seeds, {num_plans} live plans, {seconds:.0f} s; flawed: {flawed or 'none'}\n")
    return int(bool(flawed))


if __name__ == "__main__":
    sys.exit(main())
