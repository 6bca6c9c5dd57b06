"""NeMo Automodel's parallelizer (`nemo_automodel.distributed.parallelizer`) on top of ours; see docs/migrate."""

from shardwise.compat.nemo_automodel.distributed.parallelizer import *  # noqa: F403
