// The only file of the scheduler that knows where it runs: host threads, device warps, or a test's
// explorer.
//
// State is plain words in memory that any of them may map; every shared word is touched through the
// functions below, which name their memory order. XP_ATOMIC_STEP is called with the word before
// each access: tests interleave workers there.
#pragma once
#ifdef __CUDACC__
#include <cuda/atomic>
#include <cuda/std/cstdint>
#define XP_HD __host__ __device__ inline
#else
#include <atomic>
#include <cstdint>
#define XP_HD inline
#endif
#ifndef XP_ATOMIC_STEP
#define XP_ATOMIC_STEP(word)
#endif

namespace expertplex {
#ifdef __CUDACC__
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;
template <class T>
using Atomic = cuda::atomic_ref<T, cuda::thread_scope_device>;
using cuda::std::memory_order_acq_rel;
using cuda::std::memory_order_acquire;
using cuda::std::memory_order_relaxed;
using cuda::std::memory_order_release;
#else
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
template <class T>
using Atomic = std::atomic_ref<T>;
using std::memory_order_acq_rel;
using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
#endif

// Reads take a const word, which atomic_ref does not: the cast only drops that promise for the
// duration of a load.
template <class T>
XP_HD T load_relaxed(const T& word) {
  XP_ATOMIC_STEP(word);
  return Atomic<T>(const_cast<T&>(word)).load(memory_order_relaxed);
}
template <class T>
XP_HD T load_acquire(const T& word) {
  XP_ATOMIC_STEP(word);
  return Atomic<T>(const_cast<T&>(word)).load(memory_order_acquire);
}
template <class T>
XP_HD void store_relaxed(T& word, T value) {
  XP_ATOMIC_STEP(word);
  Atomic<T>(word).store(value, memory_order_relaxed);
}
template <class T>
XP_HD void store_release(T& word, T value) {
  XP_ATOMIC_STEP(word);
  Atomic<T>(word).store(value, memory_order_release);
}
// The read-modify-write operations return the value before.
template <class T>
XP_HD T fetch_add(T& word, T value) {
  XP_ATOMIC_STEP(word);
  return Atomic<T>(word).fetch_add(value, memory_order_acq_rel);
}
template <class T>
XP_HD T fetch_or(T& word, T value) {
  XP_ATOMIC_STEP(word);
  return Atomic<T>(word).fetch_or(value, memory_order_acq_rel);
}
template <class T>
XP_HD T fetch_and(T& word, T value) {
  XP_ATOMIC_STEP(word);
  return Atomic<T>(word).fetch_and(value, memory_order_acq_rel);
}
// Raises a word to at least `value`, so that concurrent writers can only move it forward.
template <class T>
XP_HD void raise(T& word, T value) {
  T seen = load_relaxed(word);
  while (seen < value) {
    XP_ATOMIC_STEP(word);
    if (Atomic<T>(word).compare_exchange_weak(seen, value, memory_order_release,
                                              memory_order_relaxed))
      return;
  }
}
// A counter with one writer: readers on other threads see some recent value.
XP_HD void count(uint64_t& word, uint64_t amount) {
  Atomic<uint64_t> counter(word);
  counter.store(counter.load(memory_order_relaxed) + amount, memory_order_relaxed);
}

XP_HD uint32_t lowest_bit(uint64_t mask) {  // index of the lowest set bit; mask must not be 0
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(__ffsll(static_cast<long long>(mask))) - 1;
#else
  return static_cast<uint32_t>(__builtin_ctzll(mask));
#endif
}
XP_HD uint32_t bit_count(uint64_t mask) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(__popcll(mask));
#else
  return static_cast<uint32_t>(__builtin_popcountll(mask));
#endif
}
XP_HD uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
}  // namespace expertplex
