"""Reports as a small swarm would make them."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.record.report import Contribution, Status
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

FACTS = RunFacts(
    name="a-run",
    steps=100,
    num_layers=4,
    tokens_per_step=1000,
    tokens_per_microbatch=100,
    activation_bytes_per_token=8,
)
WALL_S = 1_700_000_000.0


def peer_id(letter: str) -> PeerID:
    """52 characters, as real ones; its last eight are what plans say."""
    return PeerID("12D3KooW" + 36 * "x" + 8 * letter)


def peer_status(letter: str, stage: int | None = 0, **says: Any) -> PeerStatus:
    usual: dict[str, Any] = {
        "name": f"peer-{letter}",
        "device": "cpu",
        "version": 7,
        "synced": True,
        "draining": False,
        "seen_s_ago": 0.2,
        "forward_s": 0.01,
        "window": 0,
        "share": 0.0 if stage is None else 1.0,
        "flop_per_s": 1e12,
    }
    return PeerStatus(peer=peer_id(letter), stage=stage, **(usual | says))


def swarm_status(*peers: PeerStatus, **says: Any) -> SwarmStatus:
    usual: dict[str, Any] = {
        "run": "0123456789abcdef",
        "name": "a-run",
        "coordinator": peer_id("a"),
        "term": 1,
        "plan_sequence": 1,
        "plan_reason": "first plan",
        "step": 10,
        "steps": 100,
        "tokens_per_s": 500.0,
        "loss": 3.25,
        "validation_loss": None,
        "staleness_steps_mean": 0.5,
        "stages": ((0, 2), (2, 4)),
        "elapsed_s": 60.0,
        "left_s": 180.0,
    }
    return SwarmStatus(peers=peers, **(usual | says))


def contribution_of(letter: str = "a", **says: Any) -> Contribution:
    usual: dict[str, Any] = {
        "name": f"peer-{letter}",
        "stage": 0,
        "synced": True,
        "busy": 0.5,
        "sending": 0.2,
        "waiting": 0,
        "flop_per_s": 1e9,
        "microbatches_per_s": 2.5,
        "flop_total": 1e12,
        "microbatches_total": 40,
        "sent_bytes_total": 1e6,
        "received_bytes_total": 2e6,
        "links": (),
        "memory_bytes": 1 << 30,
        "uptime_s": 30.0,
    }
    return Contribution(peer=peer_id(letter), **(usual | says))


@pytest.fixture
def make_peer() -> Callable[..., PeerStatus]:
    return peer_status


@pytest.fixture
def make_status() -> Callable[..., SwarmStatus]:
    return swarm_status


@pytest.fixture
def make_contribution() -> Callable[..., Contribution]:
    return contribution_of


@pytest.fixture
def id_of() -> Callable[[str], PeerID]:
    return peer_id


@pytest.fixture
def feed() -> Feed:
    return Feed(FACTS, title="a test", wall_minus_clock_s=WALL_S)


@pytest.fixture
def two_peers() -> Status:
    return Status(status=swarm_status(peer_status("a", 0), peer_status("b", 1)))
