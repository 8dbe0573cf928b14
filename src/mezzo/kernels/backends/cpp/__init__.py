"""Kernels in C++ for the CPU: compiled on first use, kept in a cache, called without a copy."""
