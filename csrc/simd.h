// XP_SIMD: a function of plain loops, compiled once per instruction set; the one that fits the
// processor is chosen when the module is loaded, so the build names none.
#pragma once

// The sanitizers' runtimes are not yet there when the choice is made.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define XP_SIMD \
  __attribute__((target_clones("arch=sapphirerapids", "arch=x86-64-v4", "arch=haswell", "default")))
#else
#define XP_SIMD
#endif
