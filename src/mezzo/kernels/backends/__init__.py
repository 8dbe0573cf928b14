"""How a kernel is built and launched: compiled C++ on CPUs, Triton on accelerators."""
