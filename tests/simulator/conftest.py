"""What the simulator's tests share."""

import pytest

from vllm_expertplex.planner.cli import find_plan
from vllm_expertplex.planner.setup import setting


@pytest.fixture(scope="session")
def m2():
    """MiniMax-M2.7 on 8 x H800, and its plan."""
    given = setting("minimax-m2.7", "h800", "sharegpt", 1, 0.05)
    return given, find_plan(given, 8)
