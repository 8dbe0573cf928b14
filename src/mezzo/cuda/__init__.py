"""The place where programs written for `torch.cuda.amp` look."""

from . import amp as amp
