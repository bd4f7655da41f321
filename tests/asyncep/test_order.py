"""The order of gathers: never too early, never stuck, whatever the interleaving."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.asyncep.order import GatherOrder


@given(st.integers(1, 9), st.lists(st.booleans(), max_size=200))
def test_a_layer_is_in_its_buffer_when_it_is_computed(layers: int, turns: list[bool]) -> None:
    order = GatherOrder(layers)
    buffers: list[int | None] = [None, None]
    layer = 0
    for fill_first in turns:
        ready, may_fill = order.ready(layer), order.may_fill()
        assert ready or may_fill, "neither side can go on"
        if may_fill and (fill_first or not ready):
            filling = order.layer_to_fill
            # What is overwritten is not the layer whose turn it is, once that one is there.
            if ready:
                assert (
                    order.buffer(filling) != order.buffer(layer)
                    or buffers[order.buffer(layer)] != layer
                )
            buffers[order.buffer(filling)] = filling
            order.filled()
        elif ready:
            assert buffers[order.buffer(layer)] == layer
            order.used()
            layer = (layer + 1) % layers


@given(st.integers(3, 40), st.integers(1, 200))
def test_the_next_layer_is_gathered_while_one_is_computed(layers: int, steps: int) -> None:
    """Filling as early as allowed, only the first layer after an odd turn may have to wait."""
    order = GatherOrder(layers)
    while order.may_fill():
        order.filled()
    for step in range(steps):
        layer = step % layers
        assert order.ready(layer)
        order.used()
        while order.may_fill():
            order.filled()


@given(st.integers(1, 2), st.integers(1, 20))
def test_one_or_two_layers_are_gathered_once(layers: int, passes: int) -> None:
    order = GatherOrder(layers)
    fills = 0
    for step in range(passes * layers):
        while order.may_fill():
            order.filled()
            fills += 1
        assert order.ready(step % layers)
        order.used()
    assert fills == layers


def test_a_skipped_layer_is_an_error() -> None:
    order = GatherOrder(4)
    with pytest.raises(RuntimeError, match="expected layer 0"):
        order.ready(1)
