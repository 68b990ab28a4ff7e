"""Experts of the coordinator's table, as every view has them."""

import math

from shoal.deploy.dashboard.picture import expert_views
from shoal.deploy.dashboard.view import ExpertView
from shoal.deploy.record.report import Status
from shoal.protocol.messages import ExpertStatus


def test_a_load_is_told_against_an_even_share(feed, make_status, make_peer):
    experts = (
        ExpertStatus(stage=0, expert=0, load=0.75, holders=(0,)),
        ExpertStatus(stage=0, expert=1, load=0.25, coming=(0,)),
        ExpertStatus(stage=1, expert=0, holders=(1,)),
    )
    feed.take(Status(status=make_status(make_peer("a", 0), make_peer("b", 1), experts=experts)), 0.0)
    assert feed.view(1.0).experts == (
        ExpertView(stage=0, expert=0, load=1.5, replicas=1, holders=(0,)),
        ExpertView(stage=0, expert=1, load=0.5, replicas=0, coming=(0,)),
        ExpertView(stage=1, expert=0, load=None, replicas=1, holders=(1,)),
    )


def test_a_run_without_experts_shows_none(feed, two_peers):
    feed.take(two_peers, 0.0)
    assert feed.view(1.0).experts == ()


def test_what_cannot_be_is_left_out(make_status, make_peer):
    experts = (
        ExpertStatus(stage=7, expert=0, load=0.5),
        ExpertStatus(stage=-1, expert=0, load=0.5),
        ExpertStatus(stage=0, expert=0, load=math.nan, holders=(-1, 0, 99)),
        ExpertStatus(stage=0, expert=1, load=math.inf, coming=(2,)),
        ExpertStatus(stage=0, expert=2, load=9e9),
    )
    first, second, third = expert_views(make_status(make_peer("a", 0), experts=experts))
    assert (first.load, first.holders, first.replicas) == (0.0, (0,), 1)
    assert (second.load, second.coming) == (0.0, ())
    assert third.load == 3.0
