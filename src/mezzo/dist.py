"""The former name of `mezzo.distributed`."""

raise ImportError("mezzo.dist is now called mezzo.distributed: write `from mezzo.distributed import ...`.")
