"""`optimum.neuron.distributed`: parallelizers of any model, lazy loading and lazy optimizers."""

from shardwise.compat.optimum_neuron.distributed.base import *  # noqa: F403
from shardwise.compat.optimum_neuron.distributed.checkpointing import *  # noqa: F403
from shardwise.compat.optimum_neuron.distributed.parallelizers_manager import *  # noqa: F403
from shardwise.compat.optimum_neuron.distributed.utils import *  # noqa: F403
