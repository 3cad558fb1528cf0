"""Table of the strategies of --parallel."""

from trainer.distributed.data_parallel import Ddp, Dp
from trainer.distributed.fsdp import Fsdp
from trainer.distributed.pipeline import Pipeline
from trainer.distributed.strategy import Strategy

# Each constructor raises TrainerError if another option does not work with the strategy.
STRATEGIES: dict[str, type[Strategy]] = {"ddp": Ddp, "dp": Dp, "fsdp": Fsdp, "pipeline": Pipeline}
