"""The same decisions on every rank, over torch.distributed."""

from .consensus import RankConsensus as RankConsensus
from .ddp import comm_stats as comm_stats
from .ddp import connect as connect
from .fsdp import fully_shard as fully_shard
from .reducer import CommStats as CommStats
from .shard_plan import ShardPlan as ShardPlan
from .shard_plan import plan_shards as plan_shards
from .sharded_checkpoint import load_checkpoint as load_checkpoint
from .sharded_checkpoint import save_checkpoint as save_checkpoint
