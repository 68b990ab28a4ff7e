"""The baselines are modules that benchmarks import from their own folder, `tests/bench`, which goes on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
