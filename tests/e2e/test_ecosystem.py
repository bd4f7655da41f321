"""What people point at a vLLM server works against ExpertPlex unchanged."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from .models import checkpoint
from .server import MODEL_NAME, Server, serve

pytestmark = pytest.mark.e2e

MODEL = "minimax-m2"
REQUESTS = 12
BENCH_S = 180.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ecosystem") / "server.log"
    with serve(checkpoint(MODEL), log, layout="1P1D1E") as started:
        yield started


@pytest.fixture(scope="module")
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="-", timeout=60) as client:
        yield client


def test_openai_client(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL_NAME]
    question = {"role": "user", "content": "Hello"}
    whole = openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[question],  # type: ignore[list-item]
        temperature=0,
        max_tokens=12,
    )
    parts = openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[question],  # type: ignore[list-item]
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for part in parts:
        text += "".join(choice.delta.content or "" for choice in part.choices)
        usage = part.usage or usage
    assert whole.choices[0].finish_reason == "length"
    assert text == whole.choices[0].message.content
    assert usage == whole.usage
    assert usage is not None
    assert usage.completion_tokens == 12


def test_vllm_bench_serve_with_goodput(server: Server, tmp_path: Path) -> None:
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "bench", "serve"),
        *("--base-url", f"http://127.0.0.1:{server.port}", "--model", MODEL_NAME),
        *("--tokenizer", str(checkpoint(MODEL)), "--dataset-name", "random"),
        *("--random-input-len", "64", "--random-output-len", "8", "--ignore-eos"),
        *("--num-prompts", str(REQUESTS), "--request-rate", "20", "--seed", "1"),
        *("--goodput", "ttft:60000", "tpot:60000"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS
    assert result["failed"] == 0
    assert result["total_output_tokens"] == REQUESTS * 8
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])


def test_metrics_name_role_and_rank(server: Server) -> None:
    reply = server.post("/v1/completions", {"prompt": [5] * 30, "max_tokens": 4})
    assert reply.status_code == 200
    text = server.http.get("/metrics").text
    ours = [line for line in text.splitlines() if line.startswith("expertplex:")]
    servers = {
        (role.group(1), rank.group(1))
        for line in ours
        if (role := re.search(r'role="(\w+)"', line)) and (rank := re.search(r'rank="(\d+)"', line))
    }
    assert servers == {("prefill", "0"), ("decode", "0"), ("moe", "0")}
    # vLLM's own are there too, an engine for each attention server.
    assert set(re.findall(r'vllm:num_requests_running\{engine="(\d+)"', text)) == {"0", "1"}
    assert "vllm:time_to_first_token_seconds_count" in text
