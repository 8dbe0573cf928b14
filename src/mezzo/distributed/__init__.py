"""The same decisions on every rank, over torch.distributed."""

from .consensus import RankConsensus as RankConsensus
from .ddp import around as around
from .ddp import comm_stats as comm_stats
from .ddp import comm_stats_around as comm_stats_around
from .ddp import connect as connect
from .ddp import holding as holding
from .fsdp import ShardWrapper as ShardWrapper
from .fsdp import check_sharded as check_sharded
from .fsdp import check_storage as check_storage
from .fsdp import fully_shard as fully_shard
from .fsdp import reduced_dtypes as reduced_dtypes
from .fsdp import sharded_modules as sharded_modules
from .group import TIMEOUT as TIMEOUT
from .group import Group as Group
from .group import is_running as is_running
from .rank_consistency import RankSetup as RankSetup
from .rank_consistency import Signals as Signals
from .rank_consistency import checksum as checksum
from .reducer import CommStats as CommStats
from .reducer import is_summed_apart as is_summed_apart
from .shard_plan import ShardPlan as ShardPlan
from .shard_plan import class_names as class_names
from .shard_plan import plan_shards as plan_shards
from .sharded_checkpoint import load_checkpoint as load_checkpoint
from .sharded_checkpoint import save_checkpoint as save_checkpoint
from .wrapper import Wrapper as Wrapper
