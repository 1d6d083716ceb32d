"""Kernels in C++ for CPUs with AVX-512, compiled where they run. Knows tensors and slots only."""
