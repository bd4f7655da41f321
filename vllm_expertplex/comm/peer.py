"""The GPU data path's shared words and buffers, and how its two ends find each other.

Owns: what lies where in a slot, the ready word, the done words' places, the records with IPC
handles in the run directory. Must not know: kernels, models, CUDA.

An attention server owns a *slot* on each MoE server, in the memory of that server's GPU (two, where
its steps run as two microbatches; each of several ranks has its own): inputs pushed by the
attention server, then one partial sum per token left there to be pulled. To each slot belongs a
*done* word in the attention server's own GPU memory, where its waiting kernel polls cheaply.
The kernels of both sides compute the same layout (`csrc/attention/slot.cuh`).
"""

import time
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from vllm_expertplex.files import write_whole
from vllm_expertplex.layout import Server, SlotOwner

HEADER_BYTES = 1024  # of a slot: `ready` (uint64) first, the rest zero
ALIGNMENT = 1024  # of a slot's sections
SCALE_COLUMNS = 128  # activations under one fp32 scale
DONE_STRIDE = 128  # bytes between done words

_LAYER_BITS, _TOKEN_BITS = 11, 20
MAX_LAYERS, MAX_TOKENS = 1 << _LAYER_BITS, (1 << _TOKEN_BITS) - 1


class SlotLayout(msgspec.Struct, frozen=True):
    """Sizes of a slot, and the byte offsets that follow. T = max_tokens, H = hidden, K = topk.

    Token t is row t on every MoE server. Rows of tokens without a local expert are never written,
    only their ids are.
    """

    max_tokens: int
    hidden: int
    topk: int
    fp8: bool  # tokens are FP8 e4m3 with a scale per 128 columns; else bf16

    def __post_init__(self) -> None:
        if not 0 < self.max_tokens <= MAX_TOKENS:
            raise ValueError(
                f"{self.max_tokens} tokens per step; a slot takes 1 to {MAX_TOKENS}: lower "
                "--max-num-batched-tokens"
            )
        if self.hidden <= 0 or self.hidden % SCALE_COLUMNS:
            raise ValueError(
                f"hidden size {self.hidden} is not a positive multiple of {SCALE_COLUMNS}, which "
                "the GPU kernels need"
            )
        if not 1 <= self.topk <= 32:
            raise ValueError(f"{self.topk} experts per token; the GPU kernels take 1 to 32")

    @property
    def tokens_at(self) -> int:
        """[T, H] FP8 e4m3 or bf16."""
        return HEADER_BYTES

    @property
    def scales_at(self) -> int:
        """[T, H / 128] fp32: value = FP8 x scale. Empty for bf16."""
        return _after(self.tokens_at, self.max_tokens * self.hidden * (1 if self.fp8 else 2))

    @property
    def ids_at(self) -> int:
        """[T, K] int32: slot of a local expert, or -1 where the expert is elsewhere."""
        scales = self.max_tokens * self.hidden // SCALE_COLUMNS * 4 if self.fp8 else 0
        return _after(self.scales_at, scales)

    @property
    def weights_at(self) -> int:
        """[T, K] fp32."""
        return _after(self.ids_at, self.max_tokens * self.topk * 4)

    @property
    def result_at(self) -> int:
        """[T, H] bf16: partial sums over local experts."""
        return _after(self.weights_at, self.max_tokens * self.topk * 4)

    @property
    def size(self) -> int:
        """Bytes of the whole slot."""
        return _after(self.result_at, self.max_tokens * self.hidden * 2)


def _after(start: int, size: int) -> int:
    return -(-(start + size) // ALIGNMENT) * ALIGNMENT


class Ready(NamedTuple):
    """What a slot's ready word says: operation number `seq` (never 0), and what it is."""

    seq: int
    phase: int  # 1: prefill
    layer: int
    tokens: int

    def pack(self) -> int:
        """seq in bits 32-63, phase in 31, layer in 20-30, tokens in 0-19."""
        return self.seq << 32 | self.phase << 31 | self.layer << _TOKEN_BITS | self.tokens

    @classmethod
    def unpack(cls, word: int) -> "Ready":
        return cls(
            word >> 32, word >> 31 & 1, word >> _TOKEN_BITS & MAX_LAYERS - 1, word & MAX_TOKENS
        )


class SlotsRecord(msgspec.Struct, frozen=True):
    """A MoE server's word: its slots are allocated and their ready words are zero.

    Slot i is that of `owners[i]`.
    """

    FILE: ClassVar[str] = "peer-slots"

    server: Server
    device: str  # GPU UUID
    owners: list[SlotOwner]
    layouts: list[SlotLayout]
    handles: list[bytes]  # CUDA IPC, one allocation per slot

    @property
    def of(self) -> Server:
        return self.server


class DoneRecord(msgspec.Struct, frozen=True):
    """An attention server's word: the done words of one of its slots are allocated and zero.

    The word of MoE server z is at byte z * DONE_STRIDE.
    """

    FILE: ClassVar[str] = "peer-done"

    owner: SlotOwner
    device: str
    words: int
    handle: bytes

    @property
    def of(self) -> SlotOwner:
        return self.owner


Record = TypeVar("Record", SlotsRecord, DoneRecord)


def publish(run_dir: Path, record: SlotsRecord | DoneRecord) -> None:
    """Write a record whole: a reader sees all of it or nothing."""
    path = _path(run_dir, type(record), record.of)
    write_whole(path, msgspec.json.encode(record))


def await_record(
    run_dir: Path, kind: type[Record], of: Server | SlotOwner, timeout_s: float
) -> Record:
    """The record of `of`, once it is there. Raises TimeoutError naming both."""
    path = _path(run_dir, kind, of)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{of.name} has not published {path.name} within {timeout_s:g} s: it has "
                    "not come as far as allocating its GPU buffers; its own log says why"
                ) from None
        time.sleep(0.01)


def _path(
    run_dir: Path, kind: type[SlotsRecord] | type[DoneRecord], of: Server | SlotOwner
) -> Path:
    return run_dir / f"{kind.FILE}-{of.name}.json"
