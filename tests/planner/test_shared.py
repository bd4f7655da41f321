"""GPUs that attention and MoE servers share: shares, memory, search, plan and errors."""

import argparse
import json

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner import cli
from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.model_catalogue import CATALOGUE
from vllm_expertplex.planner.plan import read_plan
from vllm_expertplex.planner.search import fixed_layout
from vllm_expertplex.planner.search_shared import best_way, search_shared
from vllm_expertplex.planner.setup import Setting, setting
from vllm_expertplex.planner.sharing import Sharing, ways

percents = st.integers(1, 99)
layouts = st.integers(1, 6).flatmap(
    lambda gpus: st.builds(Layout, st.integers(1, gpus), st.integers(1, gpus), st.just(gpus))
)
loads = st.builds(
    setting,
    st.sampled_from(["qwen3-30b-a3b-fp8", "gpt-oss-120b", "olmoe-1b-7b-0924", "minimax-m2.7"]),
    st.sampled_from(["h100", "h200", "b200"]),
    st.builds("{}/{}".format, st.integers(16, 20_000), st.integers(2, 1000)),
    st.floats(0.1, 10),
    st.floats(0.005, 0.2),
    st.just(Assumptions(sm_step=24)),
)
searches = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@given(layouts, percents, percents, st.sampled_from([78, 114, 132, 148]))
def test_the_servers_of_a_gpu_have_no_more_than_its_sms(layout, moe, prefill, sms) -> None:
    sharing = Sharing(layout, moe, prefill)
    shares = sharing.shares(sms)
    assert min(shares) >= 0
    attention = (shares.prefill, shares.decode)
    together = sum(attention) if sharing.crowded else max(attention)
    assert shares.moe + together <= 1 + 1e-9


@given(layouts, st.sampled_from([78, 132]))
def test_every_way_that_is_tried_leaves_each_server_some(layout, sms) -> None:
    tried = ways(layout, sms)
    assert tried
    assert all(min(way.shares(sms)) > 0 for way in tried)
    assert len(set(tried)) == len(tried)


@searches
@given(loads, st.integers(1, 4))
def test_what_a_gpu_holds_never_exceeds_it(load: Setting, gpus: int) -> None:
    model, w = load.model, load.workload
    for sharing, best in search_shared(load, gpus):
        held = (
            -(-model.experts // gpus) * model.expert_weight_bytes * model.moe_layers
            + float(load.memory().buffers(best.prefill, best.decode, gpus))
            + load.assumptions.runtime_reserve
        )
        per_request = model.kv_bytes_per_request
        prompt = model.kv_bytes_per_token * w.mean_input + per_request
        whole = prompt + model.kv_bytes_per_token * w.mean_output
        attention = model.attention_server_bytes + load.assumptions.graph_reserve
        prefill = attention + -(-best.prefill_batch // best.prefill) * prompt
        decode = attention + -(-best.decode_batch // best.decode) * whole
        beside = prefill + decode if sharing.crowded else max(prefill, decode)
        assert held + beside <= load.memory().usable * (1 + 1e-9)


@searches
@given(loads, layouts, st.data())
def test_all_ways_at_once_are_as_good_as_the_best_alone(load: Setting, layout, data) -> None:
    sms, step = load.gpu.sms, load.assumptions.sm_step
    some = data.draw(st.lists(st.sampled_from(ways(layout, sms)), min_size=1, max_size=3))
    p, d, e = (np.array([n]) for n in (layout.prefill, layout.decode, layout.moe))
    best = 0.0
    for way in some:
        problem = load._replace(sharing=way).problem(layout.moe)
        for q in range(step, int(problem.latency.moe_sms), step):
            rates = (f(n, e, np.array([q]), 1) for f, n in (
                (problem.prefill_rate, p), (problem.decode_rate, d),
            ))  # fmt: skip
            best = max(best, min(float(r.rate[0]) for r in rates))
    found = best_way(load, some)
    assert (found[1].goodput if found else 0.0) == pytest.approx(best, rel=1e-9)


@searches
@given(loads, st.integers(1, 3))
def test_more_gpus_memory_or_time_never_plan_less(load: Setting, gpus: int) -> None:
    def goodput(of: Setting, count: int = gpus) -> float:
        return max((c.goodput for _, c in search_shared(of, count)), default=0.0)

    now = goodput(load)
    assume(now > 0)
    targets = load.targets
    later = load._replace(targets=type(targets)(targets.ttft * 1.5, targets.tpot * 1.5))
    assert goodput(later) >= now
    more = msgspec.structs.replace(load.gpu, memory_bytes=load.gpu.memory_bytes * 1.2)
    assert goodput(load._replace(gpu=more)) >= now
    assert goodput(load, gpus + 1) >= now


@searches
@given(loads, st.sampled_from(["1P1D1E", "1P1D2E", "2P1D2E", "2P3D3E"]))
def test_gpus_of_their_own_serve_at_least_as_much(load: Setting, text: str) -> None:
    layout = Layout.parse(text)
    shared = search_shared(load, layout.moe, layout)
    assume(shared)
    servers = layout.prefill + layout.decode + layout.moe
    own = fixed_layout(load.problem(servers), load.space(servers, "free"), layout)
    assert own is not None
    assert own.goodput >= shared[0][1].goodput * (1 - 1e-9)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(list(words)))


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_few_gpus_are_planned_as_they_are_served(gpus: str, tmp_path, capsys) -> None:
    path = str(tmp_path / "plan.json")
    assert run("qwen3-30b-a3b-fp8", "--gpus", gpus, "--output", path) == 0
    plan, shown = read_plan(path), capsys.readouterr().out
    assert plan.layout.endswith(f"D{gpus}E")
    assert plan.sharing is not None
    assert plan.decode_sms < plan.sharing.shares(plan.gpu_sms).moe * plan.gpu_sms
    assert (plan.prefill_sm_percent is not None) == plan.sharing.crowded
    assert f"moe_sm_percent {plan.moe_sm_percent}" in shown
    assert "+ one GPU" in shown
    assert all(use.rest >= 0 for use in plan.memory)


def test_a_layout_that_shares_gpus_is_planned(capsys) -> None:
    words = ("qwen3-30b-a3b-fp8", "--gpus", "4", "--shared", "--layout", "2P1D4E", "--json")
    assert run(*words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"] == "2P1D4E"
    assert plan["moe_sm_percent"] is not None
    assert plan["prefill_sm_percent"] is None  # nobody is beside a prefill server


def test_own_gpus_have_no_shares(capsys) -> None:
    assert run("qwen3-30b-a3b-fp8", "--gpus", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["moe_sm_percent"] is None


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--gpus", "2", "--layout", "1P1D1E"], 2, "expected 2 MoE servers, one on each"),
        (["--gpus", "2", "--layout", "3P1D2E"], 2, "for example 1P1D2E"),
        (["--gpus", "9", "--shared"], 2, "one node, of 8 GPUs here, found 9"),
        (["--gpus", "8", "--shared", "--placement", "free"], 2, "leave out --placement"),
        (["--gpus", "2", "--exhaustive"], 2, "leave out --placement"),
        (["--gpus", "1", "--ttft", "0.001"], 1, "what would do: a TTFT of"),
        (["--gpus", "1", "--gpu-set", "memory_bytes=36e9"], 1, "at least 2 of these GPUs"),
        (["--gpus", "1", "--set", "sm_step=104"], 2, "at most 104 SMs of a GPU"),
    ],
)
def test_what_shared_gpus_cannot_do_is_named(words, code, expected, capsys) -> None:
    assert run("qwen3-30b-a3b-fp8", *words) == code
    assert expected in capsys.readouterr().err


def test_more_gpus_than_a_node_has_are_not_named(capsys) -> None:
    assert run("deepseek-v3", "--gpu", "h100", "--gpus", "2") == 1
    said = capsys.readouterr().err
    assert "does not fit" in said
    assert "of these GPUs" not in said


def test_shared_gpus_are_at_most_as_many_as_experts(tmp_path, capsys) -> None:
    few = {**CATALOGUE["mixtral-8x7b-instruct-v0.1"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(few))
    assert run(str(tmp_path), "--gpus", "5", "--shared") == 2
    assert "at most one server per expert" in capsys.readouterr().err
    assert run(str(tmp_path), "--gpus", "4", "--shared", "--brief") == 0


def test_the_number_of_shared_gpus_it_names_is_enough(capsys) -> None:
    words = ["minimax-m2.7", "--gpu", "h200", "--brief"]
    assert run(*words, "--gpus", "1") == 1
    needed = capsys.readouterr().err.split("at least ")[1].split(" ")[0]
    assert run(*words, "--shared", "--gpus", needed) == 0
    assert run(*words, "--shared", "--gpus", str(int(needed) - 1)) == 1
