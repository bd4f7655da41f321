// Where a ticket's tile lies: expert, block of rows, block of columns. Contiguous and masked
// layouts differ only in where an expert's rows start, which is the kernel's business; the
// arithmetic here serves both.
#pragma once
#include "platform.h"

namespace expertplex {
struct TileCoord {
  uint32_t expert, m, n;  // block of rows within the expert, block of columns
};

// Rows -> blocks: prefix[e] = sum of ceil(rows[i] / tile_m) for i < e, prefix[experts] in all,
// which is x_moe of eq. (3) (ExpertPlex section 6). Returns prefix[experts].
XP_HD uint32_t block_prefix(const uint32_t* rows, uint32_t experts, uint32_t tile_m,
                            uint32_t* prefix) {
  uint32_t sum = 0;
  for (uint32_t e = 0; e < experts; ++e) {
    prefix[e] = sum;
    sum += ceil_div(rows[e], tile_m);
  }
  prefix[experts] = sum;
  return sum;
}

// Ticket in [0, prefix[experts] * n_blocks) -> tile. Within an expert the order goes `raster` row
// blocks down, then one column block across, so that neighbouring tickets share weights without
// walking a large expert in one column.
XP_HD TileCoord locate(uint32_t ticket, uint32_t n_blocks, const uint32_t* prefix, uint32_t experts,
                       uint32_t raster) {
  uint32_t lo = 0,
           hi = experts;  // largest e with prefix[e] * n_blocks <= ticket: empty experts fall away
  while (hi - lo > 1) {
    const uint32_t mid = (lo + hi) / 2;
    (prefix[mid] * n_blocks <= ticket ? lo : hi) = mid;
  }
  const uint32_t within = ticket - prefix[lo] * n_blocks, m_blocks = prefix[lo + 1] - prefix[lo];
  const uint32_t band = within / (raster * n_blocks), rest = within - band * raster * n_blocks;
  const uint32_t left = m_blocks - band * raster, height = left < raster ? left : raster;
  return {lo, band * raster + rest % height, rest / height};
}
}  // namespace expertplex
