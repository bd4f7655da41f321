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


HEAD = "timestamp,input_tokens,output_tokens\n"
LINE = '{"timestamp": 0, "input_length": 7, "output_length": 3}\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", ""),
        ("t.csv", HEAD),
        ("t.csv", HEAD + "0,100,5\n1,abc,5\n"),
        ("t.csv", HEAD + "0,100,5\n1,100\n"),
        ("t.csv", HEAD + "0,100,5\n1,,5\n"),
        ("t.csv", HEAD + "0,100,5\n1,-100,5\n"),
        ("t.csv", HEAD + "0,100,5\n1,nan,5\n"),
        ("t.csv", HEAD + "0,100,5\n1,100,1e30\n"),
        ("t.csv", HEAD + "0,100,5\nnan,100,5\n"),
        ("t.csv", HEAD + "0,100,5\ninf,100,5\n"),
        ("t.csv", HEAD + "0,100,5\nyesterday,100,5\n"),
        ("t.csv", HEAD + "0,100,5\n,100,5\n"),
        ("t.csv", "\x00\x01"),
        ("t.jsonl", LINE + '{"timestamp": 5'),
        ("t.jsonl", LINE + "[1, 2]\n"),
        ("t.jsonl", "3\n"),
        ("t.jsonl", LINE + '{"timestamp": 1, "input_length": 7}\n'),
        ("t.jsonl", LINE + '{"timestamp": 1, "input_length": [7], "output_length": 3}\n'),
        ("t.jsonl", LINE + '{"timestamp": null, "input_length": 7, "output_length": 3}\n'),
    ],
)
def test_a_broken_trace_is_named_with_its_row(name: str, text: str, tmp_path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)) as refused:
        read_trace(str(path))
    rows = text.count("\n") + (not text.endswith("\n"))
    if rows == 2 + (name == "t.csv"):
        assert "row 2" in str(refused.value)


@pytest.mark.parametrize("zone", ["", "Z", "+02:00"])
def test_times_with_a_zone_and_any_digits(zone: str, tmp_path) -> None:
    path = tmp_path / "t.csv"
    # a byte-order mark, as spreadsheets write; the hour that summer time skips in places
    path.write_text(
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n"
        f"2023-03-26 01:59:59.5000000{zone},10,2\n2023-03-26 03:00:00{zone},30,4\n"
    )
    times = read_trace(str(path))[2]
    assert times is not None
    assert times.tolist() == pytest.approx([0.0, 3600.5])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_targets_are_finite(value: float) -> None:
    for pair in ((value, 1.0), (1.0, value)):
        with pytest.raises(ValueError, match="positive"):
            Targets(*pair)
