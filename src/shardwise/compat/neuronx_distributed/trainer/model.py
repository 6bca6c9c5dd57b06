"""`NxDModel`: a split model with NxD's methods."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.run_batch import BatchRunner
from shardwise.parallel.state_dict_guard import local_state_dict
from shardwise.parameters.registry import find_parameters


def _delegated(name: str, *, to: str = "module") -> Callable[..., Any]:
    """Returns the method that calls the method of that name of the wrapped module, or of its `BatchRunner`."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__dict__[to], name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, getattr(nn.Module if to == "module" else BatchRunner, name).__doc__
    return call


class NxDModel(nn.Module):
    """Wraps a split model with NxD's methods.

    Modules and parameters keep their names, Shardwise's functions accept the wrapper, and other attributes are the
    model's. The `local_` methods equal those without the prefix.
    """

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any]) -> None:
        super().__init__()
        config = nxd_config["pipeline_config"] or {}
        runner = BatchRunner(
            module,
            num_microbatches=config.get("num_microbatches", 1),
            averages=config.get("broadcast_and_average_loss", False),
        )
        # The module is no child, so that names have no prefix.
        self.__dict__.update(module=module, runner=runner)
        self.nxd_config, self.pp_enabled = dict(nxd_config), current_mesh().size("pp") > 1
        self.train()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.__dict__["module"](*args, **kwargs)

    def local_module(self) -> nn.Module:
        """Returns the split model itself."""
        module: nn.Module = self.__dict__["module"]
        return module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters. A tied one has its first name in every stage, so stages group it alike."""
        module, prefix = self.local_module(), kwargs.get("prefix", next(iter(args), ""))
        first = {id(value): name for name, value, _ in find_parameters(module)}
        start = f"{prefix}." if prefix else ""
        names = {start + own: start + first.get(id(value), own) for own, value in module.named_parameters()}
        for name, value in module.named_parameters(*args, **kwargs):
            yield names.get(name, name), value

    named_buffers = _delegated("named_buffers")
    named_modules = _delegated("named_modules")
    named_children = _delegated("named_children")
    load_state_dict = _delegated("load_state_dict")
    run_train, run_eval = _delegated("run_train", to="runner"), _delegated("run_eval", to="runner")
    local_parameters, local_named_parameters = nn.Module.parameters, named_parameters

    @property
    def config(self) -> Any:
        """The transformers config of the split model."""
        return self.local_module().config

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter."""
        return next((each.dtype for each in self.parameters() if each.is_floating_point()), torch.get_default_dtype())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's parts, for `parallel_layers.save`."""
        return local_state_dict(self.local_module(), *args, **kwargs)

    local_state_dict = state_dict

    def apply(self, fn: Callable[[nn.Module], None]) -> "NxDModel":
        """Calls `fn` with every module of the model."""
        self.local_module().apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "NxDModel":
        self.local_module()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> "NxDModel":
        """Sets the mode of the model."""
        self.training = mode
        self.local_module().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __repr__(self) -> str:
        return f"NxDModel({self.local_module()!r})"


def unwrapped(model: Any) -> Any:
    """Returns the split model inside of an `NxDModel`; others, and None, are returned unchanged."""
    return model.local_module() if isinstance(model, NxDModel) else model
