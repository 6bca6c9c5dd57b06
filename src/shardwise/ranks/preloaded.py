"""What every rank of `spawn` finds imported: the process that ranks are forked from imports this module once."""

import gc
import importlib
import os
import signal

from shardwise.ranks.process import ENDING

__all__: list[str] = []

_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}


def _restore_handlers() -> None:
    while _handlers:
        signal.signal(*_handlers.popitem())


os.register_at_fork(after_in_child=_restore_handlers)
gc.disable()  # imports leave no garbage, and looking for it takes a sixth of their time

# torchao asks for the card's capability when it is imported. A process forked from one that has started CUDA cannot use
# CUDA, so the card is hidden during the imports.
_cards = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

for _name in (
    "encodings.idna",  # of names of hosts
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "shardwise.ranks.rank",
):
    importlib.import_module(_name)
if "COVERAGE_PROCESS_START" not in os.environ:  # what is imported before a rank measures would not be counted
    _front = importlib.import_module("shardwise")
    for _name in _front.__all__:
        getattr(_front, _name)
if _cards is None:
    del os.environ["CUDA_VISIBLE_DEVICES"]
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = _cards
gc.freeze()  # forks share these objects with this process for as long as nobody looks at them
gc.enable()
