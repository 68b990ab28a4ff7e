"""What is counted of experts' places."""

from shoal.deploy.demo.expert_book import ExpertBook, ExpertFigures
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertStatus, PeerStatus, SwarmStatus
from statuses import swarm_status


def status(*experts: ExpertStatus) -> SwarmStatus:
    peers = tuple(
        PeerStatus(
            peer=PeerID(name),
            name=name,
            device="cpu",
            stage=0,
            version=1,
            synced=True,
            draining=False,
            seen_s_ago=0.1,
            forward_s=0.0,
            window=0,
        )
        for name in "abc"
    )
    return swarm_status(
        coordinator=PeerID("a"),
        step=0,
        stages=((0, 1),),
        peers=peers,
        elapsed_s=0.0,
        experts=experts,
    )


def held(expert: int, *holders: int, coming: tuple[int, ...] = (), load: float = 0.0) -> ExpertStatus:
    return ExpertStatus(stage=0, expert=expert, load=load, holders=holders, coming=coming)


def test_moves_are_counted_once_whether_fetched_or_not() -> None:
    book = ExpertBook()
    assert book.figures is None
    assert book.see(status(held(0, coming=(0, 1)), held(1, coming=(1, 2))))
    assert not book.see(status(held(0, 0, 1), held(1, 1, 2))), "they have fetched it"
    assert book.see(status(held(0, 0, 1, coming=(2,), load=0.75), held(1, 2, load=0.25)))
    assert not book.see(status(held(0, 0, 1, 2), held(1, 2)))
    assert book.see(status(held(0, 0, 1, 2), held(1, 2, coming=(0, 1))))
    assert book.figures == ExpertFigures(placements=2, copies=3, holders_min=1, holders_max=3, load_max=1.5)


def test_a_run_without_experts_has_no_figures() -> None:
    book = ExpertBook()
    assert not book.see(status())
    assert book.figures is None
