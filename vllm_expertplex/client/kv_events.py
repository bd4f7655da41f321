"""Listening to what the engines' KV caches hold.

Owns: the sockets, and turning vLLM's events and prompts into the index's. Must not know: what
becomes of a request.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.logger import init_logger

from vllm_expertplex.client.prefixes import Key, PrefixIndex
from vllm_expertplex.layout import Server

logger = init_logger(__name__)


def endpoint(run_dir: Path, server: Server) -> str:
    """Where an engine says which blocks its KV cache holds."""
    return f"ipc://{run_dir}/kv-{server.name}"


def publishing(run_dir: Path, server: Server) -> KVEventsConfig:
    """What makes an engine say so."""
    return KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint(run_dir, server))


class KVEventListener:
    """Follows one engine. Made before the engine gets its first request; nothing is missed then."""

    def __init__(self, engine: int, endpoint: str, index: PrefixIndex) -> None:
        self._engine = engine
        self._index = index
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0

    async def run(self) -> None:
        """Update the index until cancelled."""
        try:
            while True:
                _, sequence, payload = await self._socket.recv_multipart()
                self._apply(int.from_bytes(sequence, "big"), payload)
        except asyncio.CancelledError:
            self._socket.close(linger=0)
            raise

    def _apply(self, sequence: int, payload: bytes) -> None:
        if sequence != self._next:
            # What the cache holds is not known any more; wrong guesses cost time, not answers.
            logger.warning(
                "engine %d: KV events %d to %d were lost", self._engine, self._next, sequence - 1
            )
            self._index.cleared(self._engine)
        self._next = sequence + 1
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved) and not event.group_idx:
                self._index.removed(self._engine, event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._index.cleared(self._engine)

    def _stored(self, event: BlockStored) -> None:
        if event.group_idx:
            return  # models with several kinds of attention: the first kind speaks for all
        extras: list[Any] = event.extra_keys or []
        if any(extras[1:]):
            return  # images: named by more than their tokens
        root = tuple(extras[0]) if extras and extras[0] else None
        self._index.stored(
            self._engine, event.block_hashes, event.parent_block_hash, event.token_ids, root
        )


def keys_of(request: Any, index: PrefixIndex) -> list[Key]:
    """The blocks of an EngineCoreRequest's prompt; none where its engine looks for none."""
    params = request.sampling_params or request.pooling_params
    unshared = getattr(params, "skip_reading_prefix_cache", False) or request.mm_features
    if unshared or request.prompt_token_ids is None:
        return []
    return index.keys(request.prompt_token_ids, _root_of(request))


def _root_of(request: Any) -> tuple[Any, ...] | None:
    """What, beside tokens, names the first block of an EngineCoreRequest, as in vLLM's events."""
    lora = request.lora_request.name if request.lora_request is not None else None
    found = tuple(part for part in (lora, request.cache_salt) if part is not None)
    return found or None
