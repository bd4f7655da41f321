// One phase's operations in flight: submit, claim a tile, finish a tile.
//
// An operation is a list of stages (scatter, GateUp, activation, Down, gather: see template.h); a
// stage is a number of equal tiles with tickets 0..limit-1. A stage opens for claims only when
// every tile before it has finished: inputs are checked before the claim, so a claimed tile never
// waits on an unclaimed one.
//
// The ticket word {last:1 | stage:3 | seq:12 | limit:24 | next:24} carries all that a claim depends
// on, so one fetch_add both takes a ticket and tells whether it exists. A worker that was delayed
// between looking and adding may hit a later stage, or a later operation in the same slot: the
// ticket it gets is then simply one of that stage, and whatever it reads of the slot afterwards is
// that stage's, because a stage cannot end while a ticket is out. That is why ABA does no harm.
// Tickets at or above the limit do not exist; at most one per worker and stage is drawn.
#pragma once
#include "platform.h"

namespace expertplex {
constexpr uint32_t kMaxSources = 32;  // attention servers of one phase
constexpr uint32_t kDepth = 2;        // operations in flight per source (two-batch overlap)
constexpr uint32_t kSlots = kMaxSources * kDepth;
constexpr uint32_t kMaxStages = 8;
constexpr uint32_t kMaxTiles =
    (1u << 24) - (1u << 12);  // per stage; leaves room for tickets drawn in vain
static_assert(kSlots == 64, "a queue's busy slots are one 64-bit word");

struct Operation {
  uint64_t sources;  // bit s: source s takes part (several when coalesced)
  uint64_t user;     // the caller's handle, given back when the operation is done
  uint32_t layer;
  uint32_t x_moe;  // eq. (3), for decode's share of the workers
  uint32_t n_stages;
  uint32_t tiles[kMaxStages];  // a stage of 0 tiles is skipped; a tile may set those of later
                               // stages (set_tiles)
};

struct alignas(128) Slot {
  uint64_t ticket;       // shared: see above
  uint32_t unfinished;   // shared: tiles of the open stage that have not finished
  uint32_t seq;          // written only while the slot's stage changes
  Operation op;          // stable while the open stage has an unfinished tile
  uint64_t deadline_ns;  // of the whole operation; written and read by the submitter
};

struct alignas(128) Queue {
  uint64_t busy;  // shared: bit `source * kDepth + d` of every slot in use
  alignas(128) Slot slot[kSlots];
};

// One claimed tile: 16 bytes, so that a cluster's leader can send it to its peers in one piece.
struct alignas(16) Tile {
  uint32_t ticket;
  uint16_t seq;
  uint8_t slot, stage;
  uint8_t phase, reserved[3];
  uint32_t epoch;  // low bits of the check epoch it was claimed in
};

// Where one worker looks next in one queue: sources in turn, `quantum` tiles each.
struct Cursor {
  uint32_t source, taken;
};

struct Ticket {
  uint32_t next, limit, seq, stage;
  bool last;
};
XP_HD uint64_t pack(const Ticket& t) {
  return static_cast<uint64_t>(t.last) << 63 | static_cast<uint64_t>(t.stage) << 60 |
         static_cast<uint64_t>(t.seq & 0xfffu) << 48 | static_cast<uint64_t>(t.limit) << 24 |
         t.next;
}
XP_HD Ticket unpack(uint64_t word) {
  return {static_cast<uint32_t>(word & 0xffffffu), static_cast<uint32_t>(word >> 24 & 0xffffffu),
          static_cast<uint32_t>(word >> 48 & 0xfffu), static_cast<uint32_t>(word >> 60 & 7u),
          word >> 63 != 0};
}

XP_HD uint32_t next_stage(const Operation& op, uint32_t stage) {
  while (stage < op.n_stages && op.tiles[stage] == 0) ++stage;
  return stage;
}

// Opens a stage for claims. The caller is the only one that may: it submitted the operation or
// finished the last tile.
XP_HD void open_stage(Slot& slot, uint32_t stage) {
  const uint32_t tiles = slot.op.tiles[stage];
  slot.seq = (slot.seq + 1) & 0xfffu;
  store_relaxed(slot.unfinished, tiles);
  store_release(slot.ticket, pack({0, tiles, slot.seq, stage, stage + 1 == slot.op.n_stages}));
}

enum class Submit { kQueued, kNothingToDo, kFull };

// Puts an operation into a free slot of its first source. One thread submits to a queue.
XP_HD Submit submit(Queue& queue, const Operation& op, uint64_t deadline_ns) {
  const uint32_t first = next_stage(op, 0);
  if (first == op.n_stages) return Submit::kNothingToDo;
  const uint32_t base = lowest_bit(op.sources) * kDepth;
  const uint64_t busy = load_acquire(queue.busy);
  for (uint32_t i = base; i < base + kDepth; ++i) {
    if (busy >> i & 1) continue;
    Slot& slot = queue.slot[i];
    slot.op = op;
    slot.deadline_ns = deadline_ns;
    // Busy before open: a worker that still holds an old busy word could otherwise finish the
    // operation, and free the slot, before its bit is set.
    fetch_or(queue.busy, uint64_t{1} << i);
    open_stage(slot, first);
    return Submit::kQueued;
  }
  return Submit::kFull;
}

enum class Claim { kTile, kBetweenStages, kNothing };

XP_HD Claim claim_from(Slot& slot, Tile& tile) {
  Ticket t = unpack(load_relaxed(slot.ticket));
  if (t.next >= t.limit) return t.last ? Claim::kNothing : Claim::kBetweenStages;
  t = unpack(fetch_add(slot.ticket, uint64_t{1}));  // acquires what the stages before have written
  if (t.next >= t.limit) return t.last ? Claim::kNothing : Claim::kBetweenStages;
  tile.ticket = t.next;
  tile.seq = static_cast<uint16_t>(t.seq);
  tile.stage = static_cast<uint8_t>(t.stage);
  return Claim::kTile;
}

// Takes a tile from the next source in turn that has one. kBetweenStages: none to be had now, but
// an operation has all tiles of its stage claimed and more stages to come.
XP_HD Claim claim(Queue& queue, Cursor& cursor, uint32_t quantum, Tile& tile) {
  Claim best = Claim::kNothing;
  const uint64_t busy = load_acquire(queue.busy);
  const uint32_t shift = cursor.source * kDepth;
  uint64_t turn =
      shift ? busy >> shift | busy << (kSlots - shift) : busy;  // bit 0: the cursor's source
  while (turn) {
    const uint32_t i = (lowest_bit(turn) + shift) % kSlots;
    const Claim got = claim_from(queue.slot[i], tile);
    if (got == Claim::kTile) {
      const uint32_t source = i / kDepth;
      cursor.taken = source == cursor.source ? cursor.taken + 1 : 1;
      cursor.source = source;
      if (cursor.taken >= quantum) cursor = {(source + 1) % kMaxSources, 0};
      tile.slot = static_cast<uint8_t>(i);
      return got;
    }
    if (got == Claim::kBetweenStages) best = got;
    turn &= turn - 1;
  }
  return best;
}

// For a tile of an earlier stage: says how many tiles a later stage has (scatter counts rows,
// GateUp's tiles follow).
XP_HD void set_tiles(Slot& slot, uint32_t stage, uint32_t tiles) { slot.op.tiles[stage] = tiles; }

enum class Finish { kRunning, kStageOpened, kDone };

// Reports a claimed tile as executed, its results written. On kDone `op` is the operation and its
// slot is free again.
XP_HD Finish finish(Queue& queue, const Tile& tile, Operation& op) {
  Slot& slot = queue.slot[tile.slot];
  if (fetch_add(slot.unfinished, ~uint32_t{0}) != 1) return Finish::kRunning;
  const uint32_t stage = next_stage(slot.op, tile.stage + 1u);
  if (stage < slot.op.n_stages) {
    open_stage(slot, stage);
    return Finish::kStageOpened;
  }
  op = slot.op;
  fetch_and(queue.busy, ~(uint64_t{1} << tile.slot));
  return Finish::kDone;
}
}  // namespace expertplex
