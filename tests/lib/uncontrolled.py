"""Traffic for comparisons: microbatches run ahead as far as `s_max` admits, even where that saves no time."""

from shoal.peer.replica.flow import Control, Traffic
from shoal.protocol.spec import RunSpec


class Uncontrolled(Traffic):
    def control(self, spec: RunSpec) -> Control | None:
        return None
