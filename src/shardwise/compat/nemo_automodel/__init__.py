"""NeMo Automodel's parallelizer (`nemo_automodel.distributed.parallelizer`) over ours; see docs/migrate."""

from shardwise.compat.nemo_automodel.distributed.parallelizer import *  # noqa: F403
