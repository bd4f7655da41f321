// What the host and the kernel agree on: operation templates, layers, the launch arguments, the
// tile message.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "config.cuh"
#include "scheduler/scheduler.h"

namespace expertplex::apk {

// The six stages of a MoE operation, ExpertPlex section 4.
enum Stage : uint32_t {
  kCount = 0,
  kCopy = 1,
  kStageGateUp = 2,
  kActivate = 3,
  kStageDown = 4,
  kGather = 5,
  kStages6 = 6
};
constexpr uint32_t kStop = 0xff,
                   kHang = 7;  // kHang: a tile that never ends, for testing the watchdog

// How the two CTAs of a cluster, and the two math warpgroups of a CTA, share a GEMM tile.
enum Shape : uint32_t {
  kPairRows = 0,   // 128x192 per CTA, row blocks differ, weights multicast
  kPairCols = 1,   // 128x192 per CTA, column blocks differ
  kStackRows = 2,  // 128x128 per CTA, column blocks differ
  kStackCols = 3,  // 64 x 2 kDecodeN per CTA, column blocks differ
};

// Where each expert's rows and tiles are; written by the last kCount tile of an operation.
struct Groups {
  uint32_t counting[kExperts];  // rows seen so far by kCount tiles; zero between operations
  uint32_t counted;             // CTAs that have counted; zero between operations
  uint32_t rows[kExperts];
  uint32_t row0[kExperts + 1];      // first row; multiples of 64
  uint32_t tiles[2][kExperts + 1];  // cluster tiles of GateUp and Down before this expert
  uint32_t activate_items;          // pairs that a warp takes of the activation's tiles
};

// Buffers and descriptors of one operation in flight, made before launch and never changed. T
// tokens at most, R rows (R a multiple of 64).
struct alignas(128) Template {
  cute::TmaDescriptor a[2][kRowBoxes];    // [gemm][box of 128, 64 or kFewRows rows], [R, k]
  cute::TmaDescriptor sfa[2][kRowBoxes];  // fp32 [k/128, R]
  cute::TmaDescriptor out[2][2];          // bf16 [R, n]: box of 64 or kFewRows rows
  const uint8_t* tokens;                  // [T, H], FP8 or BF16
  const float* token_scales;              // [T, H/128]; FP8 only
  const int32_t* expert_ids;              // [T, k]: local expert, or negative for "not here"
  const float* expert_weights;            // [T, k]
  void* result;                           // bf16 [T, H]: sum over the experts held here
  uint32_t* position;                     // [T, k]: place among the expert's rows
  uint32_t* row_of;                       // [T, k]: row, or ~0
  uint8_t* rows;                          // [R, H]
  float* row_scales;                      // [H/128, R]
  const void* hidden;                     // bf16 [R, 2I]
  uint8_t* act;                           // [R, I]
  float* act_scales;                      // [I/128, R]
  const void* down;                       // bf16 [R, H]
  Groups* groups;
  uint32_t row_capacity;  // R
};

struct alignas(128) Layer {
  cute::TmaDescriptor wide[2];    // [experts * n, k], box of 96 or 192 rows
  cute::TmaDescriptor narrow[2];  // box of 128 rows
  const float* scales[2];         // [experts * n / 128, k / 128]
};

// One tile as the cluster's leader hands it to every warp of both CTAs: 32 bytes.
struct alignas(16) TileMessage {
  Tile tile;
  uint32_t row;     // this CTA's first row of a GEMM tile; else a warp's items
  uint32_t col;     // this CTA's first column of a GEMM tile
  uint32_t packed;  // of a GEMM tile: valid rows | expert << 8 | shape << 24; else tokens
  uint32_t where;   // template:10 | merged:1 | wide:1 | layer << 16

  __device__ uint32_t rows() const { return packed & 0xff; }
  __device__ uint32_t expert() const { return packed >> 8 & 0xffff; }
  __device__ uint32_t shape() const { return packed >> 24; }
  __device__ uint32_t tokens() const { return packed; }
  __device__ uint32_t items() const { return row; }
  __device__ uint32_t operation() const { return where & 0x3ff; }
  __device__ bool merged() const { return where >> 10 & 1; }
  __device__ bool wide() const { return where >> 11 & 1; }
  __device__ uint32_t layer() const { return where >> 16; }
};
static_assert(sizeof(TileMessage) == 32);

// An operation of a finite run: submitted `at_ns` after the kernel has started and after another
// has ended.
struct Arrival {
  Operation op;  // n_stages 0: all six, as set_stages() makes them
  uint64_t at_ns;
  uint32_t phase;
  uint32_t after;  // identity of the other; ~0: none
};

// An attention server's slot, served by a resident run: template i is slot i's.
struct ServedSlot {
  const uint64_t* ready;  // in this GPU: seq:32 | prefill:1 | layer:11 | tokens:20; a new seq is an
                          // operation, which the inputs' release precedes
  uint64_t* done;         // in the attention server's GPU: seq of the latest finished operation
  uint32_t source;        // the scheduler's
  uint32_t max_tokens;
  uint32_t seen;  // the controller's: seq of the latest operation it took, across launches
  uint32_t reserved;
};

// Operations of several slots that run as one, in the buffers of the first: each member's tokens
// follow those of the one before.
constexpr uint32_t kMaxSlots = 32;  // one per lane of the controller
struct Members {
  uint32_t count;
  uint32_t first[kMaxSlots];  // token
  uint32_t slot[kMaxSlots], seq[kMaxSlots];
};

// What the controller has submitted, for the host: the row after the clusters' in Launch::tallies.
struct Served {
  uint64_t operations[kPhases], tokens[kPhases];
  uint64_t coalesced;  // decode operations that ran as part of another
};

// What one cluster has done, beside the scheduler's own Counters. Each word has one writer.
struct Tally {
  uint64_t idle_ns, busy_ns[kPhases], weight_bytes;
};
// Of each cluster in Launch::tallies: Counters, Tally, its p_i.
constexpr uint32_t kTallyWords = (sizeof(Counters) + sizeof(Tally)) / 8 + 1;
constexpr uint32_t kTallyStride = 16;
static_assert(kTallyWords <= kTallyStride && sizeof(Served) <= 8 * kTallyStride);

// Of one operation, indexed by its identity. %globaltimer, ns.
struct Times {
  uint64_t submitted, first_tile, done;
};

// Of one tile of one cluster; kept when a trace buffer is given.
struct TileTime {
  uint64_t began, ended;
  uint32_t phase, stage, identity, ticket;
};

// What went wrong. Host memory; zero while all is well.
enum Reason : uint32_t {
  kAllWell,
  kOutOfTime,  // of the launch
  kTileTooLong,
  kOverdue,        // an operation; ticket: tiles claimed of its stage
  kNotAnOperation  // a ready word that cannot be served: ignored, the kernel goes on
};
struct Report {
  uint32_t taken;   // 1: somebody is writing or has written the rest
  uint32_t reason;  // written last
  uint32_t cluster, phase, stage, layer, ticket, slot;
  uint32_t count;  // kOverdue: unfinished tiles; kNotAnOperation: tokens
};

struct Launch {
  State* state;
  const Template* templates;
  const Layer* layers;
  const Arrival* arrivals;  // a finite run's
  Times* times;             // the same
  ServedSlot* slots;        // a resident run's; null: finite
  Members* members;         // [n_slots]: of the operation in flight whose first slot it is
  uint64_t* tallies;        // host memory, [clusters + 1, kTallyStride]; or null
  uint32_t* request;        // StopRequest that the controller is to follow
  TileTime* trace;          // [clusters, trace_capacity], or null
  uint32_t* trace_count;    // [clusters]
  Report* report;
  uint64_t* heartbeat;   // host memory: %globaltimer of the controller's latest round
  const uint32_t* stop;  // host memory: StopRequest
  // Limits; 0: none.
  uint64_t max_ns;        // the launch ends after this time whatever happens
  uint64_t tile_ns;       // a tile that takes longer is reported and ends the launch
  uint64_t operation_ns;  // the same for an operation
  uint32_t n_arrivals, trace_capacity;
  uint32_t n_slots, n_layers;
  // Of a resident run. `fifo`: operations are served one after the other, in order of arrival.
  // `coalescing`: decode operations of one layer run as one, see scheduler/coalesce.h; not if fifo.
  uint32_t fifo, coalescing;
  uint64_t window_ns, stale_ns;  // of coalescing
};

}  // namespace expertplex::apk
