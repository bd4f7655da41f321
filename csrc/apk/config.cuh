// Compile-time constants of one kernel: the model's shapes and the tile geometry, given by the JIT
// as macros.
#pragma once

#include <cstdint>

namespace expertplex::apk {

#ifndef APK_HIDDEN
#error "APK_HIDDEN, APK_INTERMEDIATE, APK_EXPERTS and APK_TOP_K must be defined by the build"
#endif

constexpr uint32_t kHidden = APK_HIDDEN;              // H: columns of a token
constexpr uint32_t kIntermediate = APK_INTERMEDIATE;  // I: columns of an expert's hidden activation
constexpr uint32_t kExperts = APK_EXPERTS;            // experts held by this GPU
constexpr uint32_t kTopK = APK_TOP_K;
#ifdef APK_BF16
constexpr bool kFp8 = false;
#else
constexpr bool kFp8 = true;
#endif
static_assert(kHidden % 128 == 0 && kIntermediate % 128 == 0,
              "hidden and intermediate sizes must be multiples of 128");
static_assert(kExperts >= 1 && kExperts <= 256 && kTopK >= 1 && kTopK <= 16,
              "1-256 experts, top-k 1-16");

// One K block is 128 bytes of a row: 128 FP8 or 64 BF16 values, the width of one swizzle atom.
constexpr uint32_t kElementBytes = kFp8 ? 1 : 2;
constexpr uint32_t kBlockK = 128 / kElementBytes;

constexpr uint32_t kCluster = 2;
constexpr uint32_t kMathThreads = 256, kThreads = 384;
constexpr uint32_t kProducerRegisters = 40, kMathRegisters = 232;

// A stage holds 128x128 B of activations and 192x128 B of weights (prefill), or 64x128 B and up to
// 256x128 B (decode).
constexpr uint32_t kStages = 4, kStageBytes = 40960, kStageRowsA = 128;
constexpr uint32_t kWideN = 192, kNarrowN = 128;  // columns of one warpgroup's tile
#ifndef APK_DECODE_N
#define APK_DECODE_N 128
#endif
constexpr uint32_t kDecodeN =
    APK_DECODE_N;                  // the same where an expert has at most 64 rows: 64 or 128
constexpr uint32_t kFewRows = 16;  // where an expert has no more, no others are loaded
constexpr uint32_t kRowBoxes = 3;
constexpr uint32_t kOutputBytes = 64 * kWideN * 2;  // bf16 output tile of one warpgroup
#ifndef APK_CLAIM_AHEAD
#define APK_CLAIM_AHEAD 6
#endif
constexpr uint32_t kClaimAhead =
    APK_CLAIM_AHEAD;  // K blocks left to load when the next tile is claimed
#ifndef APK_MULTICAST
#define APK_MULTICAST 2
#endif
constexpr uint32_t kMulticast =
    APK_MULTICAST;  // weights: 0 each CTA loads all, 1 rank 0 sends, 2 each sends half
#ifndef APK_RASTER
#define APK_RASTER 8
#endif
constexpr uint32_t kRaster = APK_RASTER;  // row-block pairs walked before the next column block

#ifndef APK_UNROLL
#define APK_UNROLL 4
#endif
constexpr int kUnroll = APK_UNROLL;  // K blocks; more is faster until the registers are spilled

constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The two GEMMs: [rows, k] x [n, k]^T.
enum Gemm : uint32_t { kGateUp = 0, kDown = 1 };
__host__ __device__ constexpr uint32_t gemm_n(uint32_t g) {
  return g == kGateUp ? 2 * kIntermediate : kHidden;
}
__host__ __device__ constexpr uint32_t gemm_k(uint32_t g) {
  return g == kGateUp ? kHidden : kIntermediate;
}
__host__ __device__ constexpr uint32_t gemm_k_blocks(uint32_t g) { return gemm_k(g) / kBlockK; }
constexpr uint32_t kMaxKBlocks = gemm_k_blocks(kGateUp) > gemm_k_blocks(kDown)
                                     ? gemm_k_blocks(kGateUp)
                                     : gemm_k_blocks(kDown);

}  // namespace expertplex::apk
