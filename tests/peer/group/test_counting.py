"""What a member tells its mates that it has contributed is what its sum holds."""

from types import SimpleNamespace

import pytest
import torch

from shoal.peer.encoding.vectors import VECTORS
from shoal.peer.membership.group_membership import GroupMembership
from shoal.peer.pipeline.contributions import Contributions
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import Count
from shoal.peer.replica.events import GradientCounted


@pytest.mark.parametrize("version", [3, 4])
def test_a_gradient_that_comes_when_the_device_has_stepped_is_not_told(version):
    """Its digest is not through yet, so the core still has the version before. The mates would have taken the word for
    a contribution, opened another round, and reported a loss with the microbatch in it twice."""
    contributions = Contributions(4, VECTORS)
    microbatch = Microbatch(3, 1)
    contributions.finish(microbatch, torch.ones(4))

    def contribute(microbatch, *, held_out):
        return contributions.contribute(microbatch, version=version, held_out=held_out)

    member = SimpleNamespace(_held=SimpleNamespace(contribute=contribute))
    counted = GradientCounted(microbatch, 2.0, 0, held_out=True)
    found = GroupMembership._perform(member, Count(counted, retried=True))
    assert found == (counted if version == 3 else None)
    assert contributions.has(microbatch) == (found is not None)
