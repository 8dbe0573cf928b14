"""The same decisions on every rank, over torch.distributed."""

from .agree import Agreement as Agreement
