"""Records in the run directory, and the handshake over them."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_expertplex.layout import Server
from vllm_expertplex.serve.records import (
    Agreement,
    MismatchError,
    ServerRecord,
    check_agreement,
    errors_written,
    read_error,
    read_ports,
    read_record,
    write_error,
    write_ports,
    write_record,
)

SAME = Agreement(
    package_version="0.1.0",
    vllm_version="0.32.0",
    model="/models/m",
    revision=None,
    architectures=["MixtralForCausalLM"],
    dtype="bfloat16",
    hidden_size=64,
    experts=8,
    moe_layers=["model.layers.0.mlp"],
)


def record(server: Server, **differs: Any) -> ServerRecord:
    agreement = msgspec.structs.replace(SAME, **differs)
    return ServerRecord(server.role, server.rank, 1234, "cpu", 4096, agreement)


def test_a_record_reads_back(tmp_path: Path) -> None:
    server = Server("decode", 3)
    assert read_record(tmp_path, server) is None
    write_record(tmp_path, record(server))
    assert read_record(tmp_path, server) == record(server)
    assert read_record(tmp_path, server).server == server  # type: ignore[union-attr]
    assert read_record(tmp_path, Server("prefill", 3)) is None
    assert read_record(tmp_path, Server("decode", 30)) is None


def test_errors_and_ports_read_back(tmp_path: Path) -> None:
    assert read_error(tmp_path, Server("moe", 0)) is None
    write_error(tmp_path, Server("moe", 0), "no room: é")
    assert read_error(tmp_path, Server("moe", 0)) == "no room: é"
    write_ports(tmp_path, {"prefill-0": 1, "decode-0": 2})
    assert read_ports(tmp_path) == {"prefill-0": 1, "decode-0": 2}


def test_the_first_word_of_an_error_stays(tmp_path: Path) -> None:
    """A worker's own; its engine knows only that a worker failed."""
    server = Server("decode", 0)
    with (
        pytest.raises(RuntimeError),
        errors_written(tmp_path, server),
        errors_written(tmp_path, server),
    ):
        raise RuntimeError("no room")
    with pytest.raises(RuntimeError), errors_written(tmp_path, server):
        raise RuntimeError("a worker failed")
    assert read_error(tmp_path, server) == "RuntimeError: no room"


def test_a_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    server, stop = Server("moe", 0), threading.Event()
    sizes = [1, 20_000]

    def write() -> None:
        while not stop.is_set():
            for size in sizes:
                write_record(tmp_path, record(server, moe_layers=["layer"] * size))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            found = read_record(tmp_path, server)
            assert found is None or len(found.agreement.moe_layers) in sizes
    finally:
        stop.set()
        writer.join()


def test_servers_that_agree_pass() -> None:
    check_agreement([record(Server("prefill", 0)), record(Server("moe", 0))])
    check_agreement([record(Server("prefill", 0))])


OTHER = {
    "package_version": "0.2.0",
    "vllm_version": "0.33.0",
    "model": "/models/n",
    "revision": "main",
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "float32",
    "hidden_size": 128,
    "experts": 16,
    "moe_layers": ["model.layers.0.mlp", "model.layers.1.mlp"],
}


@pytest.mark.parametrize("field", Agreement.__struct_fields__)
def test_every_difference_is_refused_with_both_values(field: str) -> None:
    records = [record(Server("prefill", 0)), record(Server("decode", 0))]
    records.append(record(Server("moe", 1), **{field: OTHER[field]}))
    with pytest.raises(MismatchError) as error:
        check_agreement(records)
    message = str(error.value)
    assert message.startswith(f"{field} differs: prefill-0 has {getattr(SAME, field)!r}, moe-1 has")
    assert repr(OTHER[field]) in message


def test_long_values_are_cut() -> None:
    layers = [f"model.layers.{i}.mlp" for i in range(500)]
    with pytest.raises(MismatchError, match=r"\.\.\. \(\d+ characters\)") as error:
        check_agreement([record(Server("prefill", 0)), record(Server("moe", 0), moe_layers=layers)])
    assert len(str(error.value)) < 800


def test_a_record_tells_this_process_and_its_model() -> None:
    @dataclass
    class Model:
        model: str = "/models/m"
        revision: None = None
        architectures: tuple[str, ...] = ("MixtralForCausalLM",)
        dtype: str = "torch.bfloat16"

        def get_hidden_size(self) -> int:
            return 64

        def get_num_experts(self) -> int:
            return 8

    @dataclass
    class Device:
        device_type: str = "cpu"

    @dataclass
    class Config:
        model_config: Model
        device_config: Device

    config = Config(Model(), Device())
    found = ServerRecord.of(Server("moe", 1), config, 10, SAME.moe_layers)
    assert (found.role, found.rank, found.device, found.weight_bytes) == ("moe", 1, "cpu", 10)
    assert found.agreement.dtype == "bfloat16"
    assert found.agreement.moe_layers == SAME.moe_layers
