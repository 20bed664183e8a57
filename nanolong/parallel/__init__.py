"""Several processes: what they agree on, and how they shard a model or share sequences."""

from nanolong.parallel.processes import check_same_everywhere, join_processes, rank_and_world
from nanolong.parallel.sequence import (
    any_process,
    data_rank_and_world,
    gather_tokens,
    own_part,
    sequence_rank_and_size,
    share_sequences,
)
from nanolong.parallel.sharding import (
    distribute,
    free_gathered,
    gather,
    is_sharded,
    set_gradient_sync,
)
