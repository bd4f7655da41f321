"""Tile sizes of the CPU backend: how much one worker computes between two scheduling decisions.

Owns: the sizes and their reasons. Must not know: threads, operations, weights' values.

A prefill tile bounds how long decode waits for a worker; a decode tile bounds how evenly its
operation spreads over the workers. Both are a fraction of a millisecond whatever the model.
"""

from vllm_expertplex._scheduler import PANEL, Layout, TileSizes

# A prefill tile is bound by arithmetic: about 100 us at 400 GFLOP/s, one core with AMX.
_PREFILL_FLOP = 40e6
_PREFILL_ROWS = 128
# A decode tile is bound by reading weights: about 50 us at 10 GB/s.
_DECODE_BYTES = 512 * 1024
_DECODE_ROWS = 32
# Counting and copying rows: bound by memory, tens of microseconds for so many tokens.
_TOKENS = 64
# Operations of up to so many tokens find their rows at submission, which takes microseconds.
_INLINE_TOKENS = 256


def prefill_tiles(hidden: int, intermediate: int) -> TileSizes:
    """Tiles of a prefill operation: rows of experts packed one after the other."""
    flop_per_panel = 2 * _PREFILL_ROWS * PANEL
    return TileSizes(
        layout=Layout.CONTIGUOUS,
        tile_m=_PREFILL_ROWS,
        gate_up_panels=_panels(_PREFILL_FLOP / (2 * hidden * flop_per_panel), intermediate),
        down_panels=_panels(_PREFILL_FLOP / (intermediate * flop_per_panel), hidden),
        token_block=_TOKENS,
        inline_tokens=_INLINE_TOKENS,
    )


def decode_tiles(hidden: int, intermediate: int, element_size: int) -> TileSizes:
    """Tiles of a decode operation: every expert's rows at a fixed place."""
    bytes_per_panel = PANEL * element_size
    return TileSizes(
        layout=Layout.MASKED,
        tile_m=_DECODE_ROWS,
        gate_up_panels=_panels(_DECODE_BYTES / (2 * hidden * bytes_per_panel), intermediate),
        down_panels=_panels(_DECODE_BYTES / (intermediate * bytes_per_panel), hidden),
        token_block=_TOKENS,
        inline_tokens=_INLINE_TOKENS,
    )


def _panels(wanted: float, columns: int) -> int:
    """Panels per tile, evened out so that the last tile of a row is no fragment."""
    panels = columns // PANEL
    tiles = max(1, round(panels / max(1.0, wanted)))
    return -(-panels // tiles)
