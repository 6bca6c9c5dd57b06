"""Lightning: `ShardwiseStrategy` trains a LightningModule that holds a transformers model under any layout.

Needs the extra `lightning` (`pip install -e '.[lightning]' in a clone`). See docs/lightning.md.
"""

from shardwise.lightning.models import ShardwiseRichProgressBar, ShardwiseTensorBoardLogger, ShardwiseTQDMProgressBar
from shardwise.lightning.precision import ShardwisePrecision
from shardwise.lightning.strategy import ShardwiseStrategy

__all__ = [
    "ShardwisePrecision",
    "ShardwiseRichProgressBar",
    "ShardwiseStrategy",
    "ShardwiseTQDMProgressBar",
    "ShardwiseTensorBoardLogger",
]
