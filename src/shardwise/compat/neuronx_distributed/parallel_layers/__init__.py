"""NxD's `parallel_layers`."""

from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state as parallel_state
from shardwise.compat.neuronx_distributed.parallel_layers import random as random
from shardwise.compat.neuronx_distributed.parallel_layers import utils as utils
from shardwise.compat.neuronx_distributed.parallel_layers.checkpointing import *  # noqa: F403
from shardwise.compat.neuronx_distributed.parallel_layers.grads import *  # noqa: F403
from shardwise.compat.neuronx_distributed.parallel_layers.layers import *  # noqa: F403
from shardwise.compat.neuronx_distributed.parallel_layers.loss_functions import *  # noqa: F403
from shardwise.compat.neuronx_distributed.parallel_layers.mappings import *  # noqa: F403
from shardwise.compat.neuronx_distributed.parallel_layers.pad import *  # noqa: F403
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import *  # noqa: F403
from shardwise.compat.neuronx_distributed.parallel_layers.utils import *  # noqa: F403
