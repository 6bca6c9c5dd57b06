"""Splits the adapters of a split model, including adapters that are added later.

# [Note: merged and back]
PEFT merges adapters by addition and unmerges them by subtraction, which leaves rounding errors. Here the original
weight is kept and restored. It costs no memory while it is still mapped from its file.
"""

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import broadcast_object
from shardwise.errors import UnsupportedError
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import DataHandling, ParameterEntry, Registry, attach_entry, axes_of
from shardwise.plan.adapters import plan_adapter
from shardwise.plan.decision import ParameterPlan
from shardwise.runtime.adapter_facts import describe_adapter, is_adapter, unwrapped
from shardwise.runtime.context import SplitContext
from shardwise.runtime.linear import RowSplit, apply_mixin
from shardwise.runtime.modes import has_dropout
from shardwise.sharding.layout import Layout, steps_along
from shardwise.sharding.placement import Split
from shardwise.topology.shape import FSDP_AXES


def apply_adapters(model: nn.Module, registry: Registry) -> None:
    """Converts the adapters of a model whose parameters are already split. Communicates nothing."""
    for fqn, module in list(model.named_modules()):
        if not is_adapter(module) or not hasattr(module, "lora_A"):
            continue
        wrapper: Any = module
        for adapter in dict.fromkeys((*wrapper.lora_A, *wrapper.lora_embedding_A)):
            _apply_adapter(wrapper, fqn, adapter, registry.plan.parameters, registry.context)
        apply_mixin(wrapper, SplitAdapter, _fqn=fqn, _registry=registry, _unmerged={})


class SplitAdapter:
    """Mixin for PEFT layers of a split model: splits each adapter that is added later."""

    _fqn: str
    _registry: Registry
    _unmerged: dict[str, torch.Tensor]

    def update_layer(self, adapter_name: str, *args: Any, **options: Any) -> None:
        """Adds an adapter: PEFT makes it in full from rank 0's random numbers, and this rank keeps its part.

        Communicates: over all ranks, one broadcast of the state of rank 0's generator.
        """
        if self._registry.stages is not None:
            raise UnsupportedError(
                f"an adapter that comes to {self._fqn} after the model was cut into stages",
                why="its stages are unknown",
                fix="give shardwise.parallelize a model that has all of its adapters",
            )
        state = torch.get_rng_state()
        of_rank_0 = broadcast_object(state, self._registry.mesh.group())
        torch.set_rng_state(of_rank_0)
        super().update_layer(adapter_name, *args, **options)  # type: ignore[misc]
        if not torch.equal(state, of_rank_0):
            torch.set_rng_state(state)
        _split_later(self, self._fqn, adapter_name, self._registry)

    def merge(self, *args: Any, **options: Any) -> None:
        """Adds the adapters to this rank's part of the weight. `unmerge` restores the weight.

        If another stage holds the weight, only records the merge.
        """
        base, wrapper = unwrapped(self), cast("Any", self)  # type: ignore[arg-type]
        if self._is_foreign(base):
            names = options.get("adapter_names") or wrapper.active_adapters
            wrapper.merged_adapters += [name for name in names if name not in wrapper.merged_adapters]
            return
        if any(isinstance(value, DTensor) for value in base._parameters.values()):
            raise UnsupportedError(
                f"merging adapters into the weight of {self._fqn} that FSDP2 holds",
                why="a rank has some of its rows, and the adapters are gathered for their forward only",
                fix='write the merged model with shardwise.export_pretrained(model, directory, adapter="merged")',
            )
        if not self._unmerged:
            for name, value in base._parameters.items():
                if value is not None:
                    self._unmerged[name] = value.data
                    value.data = value.data.clone()
        super().merge(*args, **options)  # type: ignore[misc]

    def unmerge(self) -> None:
        """Restores the weight from before `merge`."""
        base = unwrapped(self)  # type: ignore[arg-type]
        if self._is_foreign(base):
            cast("Any", self).merged_adapters.clear()
            return
        super().unmerge()  # type: ignore[misc]
        for name, value in self._unmerged.items():
            base._parameters[name].data = value  # type: ignore[union-attr]
        self._unmerged.clear()

    def _is_foreign(self, base: nn.Module) -> bool:
        """Returns whether another pipeline stage holds the adapted weight."""
        return getattr(self, "parameter_name", "weight") not in base._parameters

    def unload_and_optionally_merge_module(self, *args: Any, **options: Any) -> NoReturn:
        """Raises `UnsupportedError`: the module that PEFT would leave computes with a part and sums nothing."""
        raise UnsupportedError(
            f"taking the adapters away from {self._fqn} of a split model",
            why="the module around both is the one that is split",
            fix="call merge_adapter() and unmerge_adapter(), or write the merged model with\n"
            'shardwise.export_pretrained(model, directory, adapter="merged")',
        )


def _split_later(wrapper: Any, fqn: str, adapter: str, registry: Registry) -> None:
    adapted, mesh = describe_adapter(fqn, wrapper, adapter), registry.mesh
    planned = plan_adapter(adapted, registry.plan.parameters[adapted.weight], num_parts=registry.plan.num_parts)
    over_data = steps_along(FSDP_AXES[::-1], mesh.shape)
    for name, each in planned.items():
        inner, _, own = name.removeprefix(f"{fqn}.").rpartition(".")
        owner = wrapper.get_submodule(inner)
        value = owner._parameters[own]
        value.data = local_tensor(value.data, each.layout, mesh.coords)
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape
        entry = ParameterEntry(
            fqn=name,
            layout=Layout(each.layout.shape, (*each.layout.steps, *over_data)),
            partial_over=axes_of(each.gradient),
            data=DataHandling.ALL_REDUCE if mesh.data_size > 1 else DataHandling.NONE,
            registry=registry,
        )
        registry.entries[name] = entry
        attach_entry(owner, own, entry)
    registry.__dict__.pop("needs_sums", None)
    registry.context.has_dropout |= has_dropout(wrapper)
    _apply_adapter(wrapper, fqn, adapter, planned, registry.context)


def _apply_adapter(
    wrapper: Any, fqn: str, adapter: str, parameters: Mapping[str, ParameterPlan], context: SplitContext
) -> None:
    planned = parameters.get(f"{fqn}.lora_A.{adapter}.weight")
    if context.tp.size == 1 or planned is None:
        return
    if not isinstance(planned.placement, Split):
        _drop_alike(wrapper.lora_dropout[adapter], f"{fqn}.lora_dropout.{adapter}", context)
    elif f"{fqn}.lora_B.{adapter}.bias" in parameters:
        apply_mixin(wrapper.lora_B[adapter], RowSplit, _axis=context.tp, _split=context, _reduces=False)


def _drop_alike(dropout: nn.Module, name: str, context: SplitContext) -> None:
    """Makes all ranks drop the same elements of an input that every rank has in full."""
    if not has_dropout(dropout):
        return  # hooks that must run tell blocks apart for torch.compile
    dropout.register_forward_pre_hook(lambda module, _: context.fork_rng("adapter", module, replicated=name))
    dropout.register_forward_hook(lambda *_: context.restore_rng("adapter"), always_call=True)
