"""The former name of `mezzo.loss_scale`."""

raise ImportError("mezzo.scaling is now called mezzo.loss_scale: write `from mezzo.loss_scale import ...`.")
