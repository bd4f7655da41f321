// Operation templates: the stages of one MoE layer's routed experts and how many tiles each has at
// run time. Fixed before serving starts, one per phase: buffers and tile sizes belong to the kernel
// that executes them.
#pragma once
#include "queue.h"

namespace expertplex {
enum class Kind : uint8_t { kScatter, kGateUp, kActivation, kDown, kGather };
enum class Layout : uint8_t {
  kContiguous,
  kMasked
};  // experts' rows packed, or each expert at a fixed offset

struct StageTemplate {
  Kind kind;
  uint32_t n_blocks;     // grouped stages: column blocks per (expert, row block)
  uint32_t token_block;  // scatter and gather: tokens per tile
};

struct OpTemplate {
  Layout layout;
  uint32_t tile_m;  // rows of one expert per tile: M_t of eq. (3)
  uint32_t raster;  // see locate() in tiles.h
  uint32_t n_stages;
  StageTemplate stage[kMaxStages];
};

XP_HD bool by_token(Kind kind) { return kind == Kind::kScatter || kind == Kind::kGather; }

// Tiles of one stage for `tokens` tokens whose rows fill `x_moe` (expert, row block) pairs. A
// device that counts rows in its scatter stage submits with x_moe 0 and calls set_tiles when the
// count is known.
XP_HD uint32_t stage_tiles(const StageTemplate& stage, uint32_t tokens, uint32_t x_moe) {
  return by_token(stage.kind) ? ceil_div(tokens, stage.token_block) : x_moe * stage.n_blocks;
}

XP_HD Operation instantiate(const OpTemplate& t, uint64_t sources, uint32_t layer, uint32_t tokens,
                            uint32_t x_moe) {
  Operation op{};
  op.sources = sources;
  op.layer = layer;
  op.x_moe = x_moe;
  op.n_stages = t.n_stages;
  for (uint32_t s = 0; s < t.n_stages; ++s) op.tiles[s] = stage_tiles(t.stage[s], tokens, x_moe);
  return op;
}
}  // namespace expertplex
