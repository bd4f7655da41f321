// nanobind ships its runtime as one source file that every project compiles for itself.
#include "nb_combined.cpp"
