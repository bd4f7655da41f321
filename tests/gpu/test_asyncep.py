"""`vllm serve --executor asyncep` on GPUs answers as plain vLLM does, from the same kernels.

One GPU is enough: engines then share it.
"""

from __future__ import annotations

from typing import Any

import pytest
from parity_asyncep import CONFIGS, MODELS, PROMPTS, Parity, measure

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

_ALONE, _TOGETHER = 1e-3, 0.1  # nats


@pytest.fixture(scope="module", params=MODELS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Parity]:
    return measure(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_answers_are_plain_vllms(found: list[Parity], config: dict[str, Any]) -> None:
    parity = found[CONFIGS.index(config)]
    print(parity)
    assert parity.alone <= _ALONE
    assert parity.same == len(PROMPTS)
    assert parity.together <= _TOGETHER
    for engine in parity.engines:
        assert engine["tokens"] > 0
        assert (engine["gathers"] > 0) == (config != {"gpus": 1})
