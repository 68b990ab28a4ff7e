import pytest

from twins import DEVICE


@pytest.fixture(scope="session")
def device() -> str:
    """Where the twins run: a CUDA device, or Triton's interpreter if there is none."""
    return DEVICE
