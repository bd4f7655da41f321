// One MoE operation on a CPU: its rows, its buffers, and what each tile of each stage computes.
// Knows nothing of threads: the scheduler decides who runs which tile when.
#pragma once
#include <algorithm>
#include <memory>
#include <span>

#include "cpu/kernels.h"
#include "scheduler/template.h"
#include "scheduler/tiles.h"

namespace expertplex::cpu {
struct Layer {  // weights packed by pack()
  const char *w13, *w2;
  const float *scale13,
      *scale2;  // FP8 only: [2 * ceil(I / 128), ceil(H / 128)] per expert, likewise
};

struct Model {
  int64_t hidden, intermediate;
  uint32_t experts;
  Dtype stored, compute, activations;
  std::vector<Layer> layers;

  int64_t scale_columns(int64_t n) const { return (n + kFp8Block - 1) / kFp8Block; }
};

// One attention server's part of an operation: views of its slot, as in moe_server/backend.py.
struct Member {
  const char* x;
  const int32_t* topk_ids;
  float* out;
  uint32_t tokens, topk;
  void* handle;  // the caller's, for completing it
};

// The stages of both templates. The count and plan stages are for operations of many tokens: small
// ones are routed at submission.
enum StageIndex : uint32_t { kCount, kPlan, kScatterRows, kGateUpAct, kDownRows, kStageCount };
constexpr const char* kStageNames[kStageCount] = {"count", "plan", "scatter", "gate_up", "down"};

struct TileSizes {  // of one phase
  Layout layout;
  uint32_t tile_m;  // rows of one expert
  uint32_t gate_up_panels,
      down_panels;         // panels of kPanel columns; GateUp takes as many of gate and of up
  uint32_t token_block;    // tokens of count and scatter
  uint32_t inline_tokens;  // up to so many tokens are routed at submission
};

inline OpTemplate make_template(const Model& model, const TileSizes& t) {
  const auto panels = [](int64_t n) { return static_cast<uint32_t>(n / kPanel); };
  OpTemplate op{};
  op.layout = t.layout;
  op.tile_m = t.tile_m;
  op.raster = 1;  // all column blocks of a row block, then the next: its rows stay in the cache
  op.n_stages = kStageCount;
  op.stage[kCount] = {Kind::kScatter, 0, t.token_block};
  op.stage[kPlan] = {Kind::kScatter, 0, 1u << 31};
  op.stage[kScatterRows] = {Kind::kScatter, 0, t.token_block};
  op.stage[kGateUpAct] = {Kind::kGateUp, ceil_div(panels(model.intermediate), t.gate_up_panels), 0};
  op.stage[kDownRows] = {Kind::kDown, ceil_div(panels(model.hidden), t.down_panels), 0};
  return op;
}

struct Scratch {  // of one worker
  std::vector<char> panel[2];
  std::vector<float> products;  // [kRows, 2 * kPanel]: gate, up; [kRows, kPanel]: down

  explicit Scratch(const Model& m) : products(2 * kRows * kPanel) {
    for (auto& p : panel)
      p.resize(static_cast<size_t>(std::max(m.hidden, m.intermediate) * kPanel * 4));
  }
};

// Memory that grows and is never cleared or moved back to the system.
template <class T>
class Buffer {
 public:
  T* need(size_t n) {
    if (n > size_) data_.reset(new T[size_ = n]);  // not initialised
    return data_.get();
  }
  T* get() { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
};

class Job {
 public:
  Job(const Model& model, const Products& products) : model_(model), products_(products) {}

  // Takes members whose operations run as one. Returns the operation to submit.
  Operation begin(const TileSizes& sizes, uint64_t sources, uint32_t layer,
                  std::vector<Member> members) {
    sizes_ = sizes;
    layer_ = layer;
    members_ = std::move(members);
    first_token_.assign(1, 0);
    for (const Member& m : members_) first_token_.push_back(first_token_.back() + m.tokens);
    tokens_ = first_token_.back();
    topk_ = members_[0].topk;  // one model, one top-k
    template_ = make_template(model_, sizes);
    blocks_ = ceil_div(tokens_, sizes.token_block);
    counts_.assign(size_t{std::max(blocks_, 1u)} * model_.experts, 0);
    const bool small = tokens_ <= sizes.inline_tokens;
    if (small) {
      for (uint32_t b = 0; b < blocks_; ++b) count(b);
      plan();
    }
    Operation op = instantiate(template_, sources, layer, tokens_, small ? x_moe() : 0);
    if (small) op.tiles[kCount] = op.tiles[kPlan] = 0;
    if (small && x_moe() == 0) op.tiles[kScatterRows] = 0;  // no expert of ours
    return op;
  }

  // `slot`: the scheduler's, for the tile that learns how many tiles later stages have.
  void run(const Tile& tile, Slot& slot, Scratch& scratch) {
    switch (tile.stage) {
      case kCount:
        return count(tile.ticket);
      case kPlan:
        plan();
        for (uint32_t s = kGateUpAct; s <= kDownRows; ++s)
          set_tiles(slot, s, stage_tiles(template_.stage[s], tokens_, x_moe()));
        return;
      case kScatterRows:
        return scatter(tile.ticket);
      case kGateUpAct:
        return gate_up(tile.ticket, scratch);
      default:
        return down(tile.ticket, scratch);
    }
  }

  // Bytes of weights that a tile of this stage reads.
  uint64_t weight_bytes(const Tile& tile) const {
    if (tile.stage != kGateUpAct && tile.stage != kDownRows) return 0;
    const bool up = tile.stage == kGateUpAct;
    const auto [begin, end] = panels(tile.stage, at(tile).n);
    return static_cast<uint64_t>((end - begin) * kPanel * size_of(model_.stored) *
                                 (up ? 2 * model_.hidden : model_.intermediate));
  }

  // Ends the operation: its members are the caller's again.
  std::vector<Member> take_members() { return std::move(members_); }

 private:
  uint32_t x_moe() const { return prefix_[model_.experts]; }

  template <class F>  // f(member, its token) for the tokens of a block
  void each_token(uint32_t block, F f) const {
    const uint32_t begin = block * sizes_.token_block,
                   end = std::min(begin + sizes_.token_block, tokens_);
    size_t m = 0;
    for (uint32_t t = begin; t < end; ++t) {
      while (t >= first_token_[m + 1]) ++m;
      f(members_[m], t - first_token_[m]);
    }
  }

  void count(uint32_t block) {
    uint32_t* counts = counts_.data() + size_t{block} * model_.experts;
    each_token(block, [&](const Member& m, uint32_t t) {
      for (uint32_t k = 0; k < topk_; ++k) {
        const int32_t e = m.topk_ids[size_t{t} * topk_ + k];
        if (e >= static_cast<int32_t>(model_.experts))
          throw std::runtime_error("topk_ids names expert slot " + std::to_string(e) +
                                   ", expected below " + std::to_string(model_.experts) + " or -1");
        if (e >= 0) ++counts[e];
      }
    });
  }

  // Counts per block -> first row of each block's part of each expert; rows and buffers.
  void plan() {
    const uint32_t experts = model_.experts;
    rows_.assign(experts, 0);
    row_start_.assign(experts + 1, 0);
    prefix_.assign(experts + 1, 0);
    const auto padded = [](int64_t rows) {
      return rows / kRows * kRows + (rows % kRows ? row_class(rows % kRows) : 0);
    };
    const int64_t capacity = padded(tokens_);
    int64_t next = 0;
    for (uint32_t e = 0; e < experts; ++e) {
      if (sizes_.layout == Layout::kMasked) next = e * capacity;
      row_start_[e] = next;
      for (uint32_t b = 0; b < blocks_; ++b) {
        uint32_t& c = counts_[size_t{b} * experts + e];
        const uint32_t here = c;
        c = static_cast<uint32_t>(next) + rows_[e];
        rows_[e] += here;
      }
      next += padded(rows_[e]);
    }
    block_prefix(rows_.data(), experts, sizes_.tile_m, prefix_.data());
    const size_t rows = static_cast<size_t>(next);
    a_.need(rows * static_cast<size_t>(model_.hidden * size_of(model_.compute)));
    activation_.need(rows * static_cast<size_t>(model_.intermediate * size_of(model_.compute)));
    target_.need(rows);
  }

  void scatter(uint32_t block) {
    uint32_t* next = counts_.data() + size_t{block} * model_.experts;
    const int64_t in = model_.hidden * size_of(model_.activations),
                  out = model_.hidden * size_of(model_.compute);
    each_token(block, [&](const Member& m, uint32_t t) {
      for (uint32_t k = 0; k < topk_; ++k) {
        const int32_t e = m.topk_ids[size_t{t} * topk_ + k];
        if (e >= 0) {
          const uint32_t row = next[e]++;
          target_.get()[row] = m.out + (size_t{t} * topk_ + k) * model_.hidden;
          load_row(m.x + t * in, model_.activations, model_.compute, a_.get() + row * out,
                   model_.hidden);
        }
      }
    });
  }

  TileCoord at(const Tile& tile) const {
    return locate(tile.ticket, template_.stage[tile.stage].n_blocks, prefix_.data(), model_.experts,
                  template_.raster);
  }
  struct Range {
    int64_t begin, end;
  };
  Range panels(uint32_t stage, uint32_t n) const {
    const bool up = stage == kGateUpAct;
    const int64_t per = up ? sizes_.gate_up_panels : sizes_.down_panels;
    const int64_t all = (up ? model_.intermediate : model_.hidden) / kPanel;
    return {n * per, std::min(all, (n + 1) * per)};
  }
  Range rows(const TileCoord& c) const {  // of the buffers, without padding
    const int64_t first = row_start_[c.expert] + int64_t{c.m} * sizes_.tile_m;
    return {first, first + std::min<int64_t>(sizes_.tile_m,
                                             rows_[c.expert] - int64_t{c.m} * sizes_.tile_m)};
  }

  void gate_up(uint32_t ticket, Scratch& scratch) {
    const TileCoord c = locate(ticket, template_.stage[kGateUpAct].n_blocks, prefix_.data(),
                               model_.experts, template_.raster);
    const int64_t h = model_.hidden, i = model_.intermediate, element = size_of(model_.compute);
    const int64_t panel_bytes = h * kPanel * size_of(model_.stored),
                  columns = model_.scale_columns(h);
    const Layer& layer = model_.layers[layer_];
    const char* w = layer.w13 + c.expert * (2 * i / kPanel) * panel_bytes;
    const float* scale =
        layer.scale13 ? layer.scale13 + c.expert * 2 * model_.scale_columns(i) * columns : nullptr;
    const Range r = rows(c), p = panels(kGateUpAct, c.n);
    for (int64_t panel = p.begin; panel < p.end; ++panel) {
      const void* b[2];
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t scale_row = half * model_.scale_columns(i) + panel * kPanel / kFp8Block;
        b[half] =
            panel_for(w + (half * i / kPanel + panel) * panel_bytes, model_.stored, model_.compute,
                      h, scale ? scale + scale_row * columns : nullptr, scratch.panel[half].data());
      }
      for (int64_t row = r.begin; row < r.end; row += kRows) {
        const int64_t n = std::min(kRows, r.end - row);
        float* out = scratch.products.data();
        for (int64_t half = 0; half < 2; ++half)
          products_(model_.compute, row_class(n), h, a_.get() + row * h * element, b[half],
                    out + half * kPanel, 2 * kPanel);
        for (int64_t k = 0; k < n; ++k)
          activate(out + k * 2 * kPanel, out + (k * 2 + 1) * kPanel, model_.activations,
                   model_.compute, activation_.get() + ((row + k) * i + panel * kPanel) * element);
      }
    }
  }

  void down(uint32_t ticket, Scratch& scratch) {
    const TileCoord c = locate(ticket, template_.stage[kDownRows].n_blocks, prefix_.data(),
                               model_.experts, template_.raster);
    const int64_t h = model_.hidden, i = model_.intermediate, element = size_of(model_.compute);
    const int64_t panel_bytes = i * kPanel * size_of(model_.stored),
                  columns = model_.scale_columns(i);
    const Layer& layer = model_.layers[layer_];
    const char* w = layer.w2 + c.expert * (h / kPanel) * panel_bytes;
    const float* scale =
        layer.scale2 ? layer.scale2 + c.expert * model_.scale_columns(h) * columns : nullptr;
    const Range r = rows(c), p = panels(kDownRows, c.n);
    for (int64_t panel = p.begin; panel < p.end; ++panel) {
      const void* b = panel_for(w + panel * panel_bytes, model_.stored, model_.compute, i,
                                scale ? scale + panel * kPanel / kFp8Block * columns : nullptr,
                                scratch.panel[0].data());
      for (int64_t row = r.begin; row < r.end; row += kRows) {
        const int64_t n = std::min(kRows, r.end - row);
        const float* out = scratch.products.data();
        products_(model_.compute, row_class(n), i, activation_.get() + row * i * element, b,
                  scratch.products.data(), kPanel);
        for (int64_t k = 0; k < n; ++k)  // to where the attention server sums them
          std::memcpy(target_.get()[row + k] + panel * kPanel, out + k * kPanel,
                      kPanel * sizeof(float));
      }
    }
  }

  const Model& model_;
  const Products& products_;
  TileSizes sizes_{};
  OpTemplate template_{};
  uint32_t layer_ = 0, tokens_ = 0, topk_ = 0, blocks_ = 0;
  std::vector<Member> members_;
  std::vector<uint32_t> first_token_, counts_, rows_, prefix_;
  std::vector<int64_t> row_start_;
  Buffer<char> a_, activation_;  // [rows, hidden], [rows, intermediate] in the compute dtype
  Buffer<float*> target_;        // [rows] -> the row of some member's `out`
};
}  // namespace expertplex::cpu
