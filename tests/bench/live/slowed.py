"""A device that becomes four times slower in mid-run, and a link at a tenth, against the new optimum.

The new optimum is the layout of `shoal plan` for the network as it is then, pinned and simulated in that network.
"""

from dataclasses import replace

import msgspec
from hindered_swarm import Slowing, after, hindered
from live.cases import case, with_steps
from live.comparison import Live, Pinned, figure, over, pinned, told

from shoal.deploy.simulate.modelled import ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.scenario import STEPS_MAX, Scenario
from shoal.protocol.spec import AUTO_STAGES

BEFORE_S = 300.0
"""The swarm has so long to settle."""
TERMS = 2.0
MEASURED_S = 120.0
DEVICE_TIMES, LINK_TIMES = 4.0, 10.0


class Slowed(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    what: str
    seed: int
    before: Pinned
    """The optimum before it."""
    then: Pinned
    """The optimum after it."""
    rate_before: float
    """The live swarm's, in the last `MEASURED_S` before it."""
    rate: float
    """The live swarm's, from two terms after it on."""
    live: Live

    @property
    def share(self) -> float:
        return over(self.rate, self.then.tokens_per_s)


def slowings_of(scenario: Scenario, what: str) -> tuple[Slowing, ...]:
    """The quickest device, or all links of the device with the quickest line."""
    t = scenario.topology
    devices = range(t.num_devices)
    if what == "device":
        return (Slowing(BEFORE_S, max(devices, key=lambda device: t.flop_per_s[device]), DEVICE_TIMES),)
    device = max(devices, key=lambda each: (t.up_bytes_per_s[each], t.flop_per_s[each]))
    return (Slowing(BEFORE_S, device, LINK_TIMES, others=tuple(d for d in devices if d != device)),)


def slowed(name: str, what: str, seed: int, known: dict[str, Pinned]) -> Slowed:
    scenario = with_steps(case(name), STEPS_MAX)
    slowings = slowings_of(scenario, what)
    then = replace(scenario, name=f"{name}, slower {what}", topology=after(scenario.topology, slowings))
    spec = msgspec.structs.replace(
        scenario.spec,
        swarm=msgspec.structs.replace(scenario.spec.swarm, stages=AUTO_STAGES, min_peers=1),
    )
    from_s = BEFORE_S + TERMS * spec.swarm.term_s
    seconds = from_s + MEASURED_S
    result = run_modelled(
        ModelledRun(
            topology=scenario.topology,
            spec=spec,
            seed=seed,
            make_swarm=hindered(*slowings),
            limits=RunLimits(steps=STEPS_MAX, steps_after=spec.training.s_max + 1, seconds=seconds),
        )
    )

    before = result.tokens_by(BEFORE_S) - result.tokens_by(BEFORE_S - MEASURED_S)
    return Slowed(
        case=name,
        what=what,
        seed=seed,
        before=pinned(scenario, "ours", seed, known, None),
        then=pinned(then, "ours", seed, known, None),
        rate_before=before / MEASURED_S,
        rate=result.tokens_per_s_from(from_s),  # until the last commit: a step in flight is a seventh of the time
        live=told(result, seconds),
    )


HEADING = (
    f"{'case':<18}{'slower':>8}{'planned':>10}{'live':>10}{'then planned':>14}{'live':>10}{'live/planned':>13}"
    f"{'plans':>6}{'div':>4}{'wall':>6}"
)


def row(found: Slowed) -> str:
    live = found.live
    return (
        f"{found.case:<18}{found.what:>8}{figure(found.before.tokens_per_s):>10}{figure(found.rate_before):>10}"
        f"{figure(found.then.tokens_per_s):>14}{figure(found.rate):>10}{found.share:>13.2f}{live.plans:>6}"
        f"{live.divisions:>4}{live.wall_s:>6.0f}"
    )
