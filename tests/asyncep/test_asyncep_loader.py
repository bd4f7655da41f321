"""Random weights that stay on the host are those that the engine's device would have drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import LoadConfig

from vllm_expertplex.asyncep import loader
from vllm_expertplex.asyncep.loader import DUMMY_LOAD_FORMAT, DummyShardLoader


def test_offloaded_weights_are_drawn_where_the_engine_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = torch.nn.Linear(64, 32, bias=False).to(torch.float8_e4m3fn)
    held, drawn_on = layer.weight.data, []
    original: Any = loader.initialize_single_dummy_weight

    def draw(tensor: torch.Tensor) -> None:
        drawn_on.append(tensor.data_ptr())
        original(tensor)

    monkeypatch.setattr(loader, "initialize_single_dummy_weight", draw)
    held.zero_()
    DummyShardLoader(LoadConfig(load_format=DUMMY_LOAD_FORMAT)).load_weights(layer, None)
    assert layer.weight.data_ptr() == held.data_ptr()
    assert drawn_on
    assert held.data_ptr() not in drawn_on
    expected = torch.empty_like(held)
    original(expected)
    assert torch.equal(held.float(), expected.float())
    assert held.float().abs().max() > 0
