// The one assertion of the host tests.
#pragma once
#include <cstdio>
#include <cstdlib>

inline unsigned current_seed = 0;  // printed with a failure; 0: none

#define CHECK(condition, ...)                                                          \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "%s:%d: not true: %s\n  ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, "" __VA_ARGS__);                                            \
      std::fprintf(stderr, current_seed ? " (seed %u)\n" : "\n", current_seed);        \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (0)
