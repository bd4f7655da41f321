"""Where vLLM lets a different class stand in for its RoutedExperts layer.

Owns: putting the stand-in in place. Must not know: what the stand-in does.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.model_executor.custom_op import op_registry_oot

# vLLM swaps a PluggableLayer by class name (model_executor/custom_op.py).
_NAME = "RoutedExperts"


@contextmanager
def replaced_routed_experts(stand_in: type) -> Iterator[None]:
    """While active, vLLM's models build `stand_in` for every RoutedExperts layer."""
    previous = op_registry_oot.get(_NAME)
    op_registry_oot[_NAME] = stand_in
    try:
        yield
    finally:
        if previous is None:
            del op_registry_oot[_NAME]
        else:
            op_registry_oot[_NAME] = previous
