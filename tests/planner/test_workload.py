"""Loads: names, pairs, traces."""

import numpy as np
import pytest

from vllm_expertplex.planner.workload import Targets, load_workload, read_trace


@pytest.mark.parametrize("name", ["sharegpt", "long-input", "azure-code", "1000/200"])
def test_samples_have_the_stated_means(name: str) -> None:
    load = load_workload(name)
    inputs, outputs = load.sample(200_000, np.random.default_rng(0))
    assert inputs.mean() == pytest.approx(load.mean_input, rel=0.02)
    assert outputs.mean() == pytest.approx(load.mean_output, rel=0.02)
    assert inputs.min() >= 1


def test_csv_and_json_lines_traces(tmp_path) -> None:
    csv = tmp_path / "t.csv"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:47.5000000,10,2\n2023-11-16 18:15:46.0000000,30,4\n"
    )
    inputs, outputs, times = read_trace(str(csv))
    assert inputs.tolist() == [30, 10]
    assert outputs.tolist() == [4, 2]
    assert times is not None
    assert times.tolist() == pytest.approx([0.0, 1.5])
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"timestamp": 500, "input_length": 7, "output_length": 3}\n')
    assert read_trace(str(lines))[0].tolist() == [7]
    assert load_workload(str(csv)).mean_input == pytest.approx(20, abs=1)


def test_a_trace_with_other_columns_is_refused(tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected one of"):
        read_trace(str(path))


def test_targets_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        Targets(0.0, 1.0)
