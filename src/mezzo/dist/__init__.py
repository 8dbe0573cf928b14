"""The same decisions on every rank, over torch.distributed."""

from .agree import Agreement as Agreement
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .ddp import connect as connect
from .ddp import traffic as traffic
from .fsdp import fully_shard as fully_shard
from .plan import ShardPlan as ShardPlan
from .plan import plan_shards as plan_shards
from .reducer import Traffic as Traffic
