"""Parts of decoder layers in C++, for CPUs with AVX-512. Knows tensors and modules, no adapters."""
