"""The same decisions on every rank, over torch.distributed."""

from .agree import Agreement as Agreement
from .ddp import connect as connect
from .ddp import traffic as traffic
from .reducer import Traffic as Traffic
