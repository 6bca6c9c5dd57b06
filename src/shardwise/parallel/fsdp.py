"""Data parallelism: FSDP2 over the `fsdp` and `ddp` axes.

`plan/data_axes.py` has decided the units and the sharding of every parameter ([Note: units]). In a pipeline each stage
of a rank is its own FSDP2 root, because torch's runtime gathers and reduces everything below one root at a time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map

from shardwise.errors import UnsupportedError
from shardwise.mesh import Mesh
from shardwise.parameters.registry import DataHandling, Registry, attach_registry, forget_unreduced, reshard
from shardwise.plan.options import FsdpPolicy
from shardwise.plan.structure import nearest, outermost, outermost_layers, parent_of, upwards
from shardwise.runtime.fsdp_internals import (
    carry_over_changes,
    free_after_evaluation,
    keep_unused_gradients_none,
    reset_interrupted,
    run_as_root,
    units_of,
)

Unit = tuple[nn.Module, ...]
Units = Mapping[tuple[str, ...], Unit]  # modules that are gathered together, by their names


def apply_data_parallelism(model: nn.Module, registry: Registry, policy: FsdpPolicy) -> None:
    """Applies FSDP2 to a split model (real or meta), in place. Does nothing with one data rank.

    Names stay; parameters become `DTensor`s over the data axes.
    """
    mesh, registry.policy = registry.mesh, policy
    if mesh.data_mesh is None:
        return
    kept_replicated = set[nn.Parameter]()
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():  # FSDP2 takes no others
            parameter.data = parameter.data.contiguous()
        if registry.entry(name).data is DataHandling.ALL_REDUCE:
            kept_replicated.add(parameter)
            parameter.data = parameter.data if parameter.is_meta else parameter.data.to(mesh.device)
    if registry.stages is None:
        units: Units = {unit: tuple(map(model.get_submodule, unit)) for unit in registry.plan.data.units}
        own_class = type(model)
        _shard_root(model, units, registry, kept_replicated)
        # transformers looks models up by the name of their class, and exports write it down
        names = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__, "_orig_cls_mro_index": 3}
        model.__class__ = type(own_class.__name__, (type(model),), names)
        registry.data_root = model
    else:
        for stage in registry.stages.own:
            units = _units_of_stage(model, stage, registry)
            registry.stage_roots[stage] = root = StageRoot(model, stage, registry, units)
            _shard_root(root, units, registry, kept_replicated)
    model.zero_grad = MethodType(_zero_grad, model)  # type: ignore[method-assign]
    attach_registry(model, registry)


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
    """Clears the gradients of sharded and gathered parameters; see [Note: left gathered]."""
    reshard(model)
    forget_unreduced(model)
    type(model).zero_grad(model, set_to_none)


class StageRoot(nn.Module):
    """FSDP2 root of one pipeline stage: the stage's units and its other modules. Calling it runs the stage."""

    def __init__(self, model: nn.Module, stage: int, registry: Registry, units: Units) -> None:
        super().__init__()
        self._stage, self._registry = stage, registry
        rest = _rest_of_stage(model, stage, registry)
        self.held = nn.ModuleList([*(module for unit in units.values() for module in unit), *rest])
        places = (name.rpartition(".") for name in sorted(registry.plan.names_of_stage(stage)))
        self._places = [(model.get_submodule(owner), own) for owner, _, own in places]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: FBT001, FBT002 - torch's
        """Yields the stage's parameters in their current form, including those outside of FSDP2."""
        found = (module._parameters.get(own) for module, own in self._places)
        yield from {id(each): each for each in found if each is not None}.values()

    def forward(self, arguments: Mapping[str, Any], received: Sequence[Tensor]) -> Any:
        """Runs the stage with the arguments of `Stages.run`, and returns its output."""
        assert self._registry.stages is not None
        return self._registry.stages.run(self._stage, arguments, received)


def _managed(model: nn.Module, stage: int, registry: Registry) -> list[str]:
    """Returns the names of a stage's parameters that FSDP2 shards."""
    names = registry.plan.names_of_stage(stage)
    found = (name for name, _ in model.named_parameters(remove_duplicate=False) if name in names)
    return [name for name in found if registry.entry(name).data is DataHandling.FSDP]


def _units_of_stage(model: nn.Module, stage: int, registry: Registry) -> Units:
    """Returns the units of a stage: for each, its modules with parameters of the stage."""
    inside = {module for name in _managed(model, stage, registry) for module in upwards(parent_of(name))}
    units = (tuple(module for module in unit if module in inside) for unit in registry.plan.data.units)
    return {unit: tuple(map(model.get_submodule, unit)) for unit in units if unit}


def _rest_of_stage(model: nn.Module, stage: int, registry: Registry) -> list[nn.Module]:
    """Outermost modules with the stage's parameters outside of units; they hold no parameter of another stage."""
    units = {module for unit in registry.plan.data.units for module in unit}
    owners = dict.fromkeys(map(parent_of, _managed(model, stage, registry)))
    loose = [owner for owner in owners if nearest(owner, units) is None]
    return list(map(model.get_submodule, outermost(loose)))


def _shard_root(root: nn.Module, units: Units, registry: Registry, kept_replicated: set[nn.Parameter]) -> None:
    """Makes `root` an FSDP2 root with these units."""
    for module in (module for unit in units.values() for module in unit):
        module.register_forward_hook(_own_output)
    root.register_forward_hook(_own_output)
    for names, unit in units.items():
        # A unit of which other stages have modules (tied embeddings) is read between these, as where one rank has all.
        _shard(
            unit, registry, kept_replicated, frees=registry.policy.zero_stage == 3 and names in registry.plan.data.units
        )
    _shard((root,), registry, kept_replicated, frees=False)
    sharded = units_of(root)
    root.register_forward_pre_hook(lambda root, _: carry_over_changes(root, sharded), prepend=True)
    root.register_forward_pre_hook(_drop_casts)
    if registry.stages is None:  # a stage is a root that computes several microbatches
        root.register_forward_pre_hook(lambda root, _: reset_interrupted(root), prepend=True)
        root.register_forward_hook(free_after_evaluation, always_call=True)
        run_as_root(root, _parts(root, units, registry))
    _tune(root, units, registry)


def _parts(root: nn.Module, units: Units, registry: Registry) -> Iterator[nn.Module]:
    """Yields the modules that callers may run directly: modules with parameters outside of units, except layers."""
    own = {module for unit in units.values() for module in unit}
    layers = set(map(root.get_submodule, outermost_layers(registry.plan.stacks)))
    inside = {each for module in own | layers for each in module.modules() if each is not module} | layers | {root}
    for module in root.modules():
        if module not in inside and next(module.parameters(), None) is not None:
            module.register_forward_hook(_own_output)
            module.register_forward_pre_hook(_drop_casts)
            yield module


def _shard(unit: Unit, registry: Registry, kept_replicated: set[nn.Parameter], *, frees: bool) -> None:
    mesh, policy, precision = registry.mesh, registry.policy, registry.precision
    options: dict[str, Any] = {"mesh": mesh.data_mesh, "ignored_params": kept_replicated}
    if policy.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    if precision is not None:
        compute = getattr(torch, precision.compute) if precision.compute != precision.params else None
        options["mp_policy"] = MixedPrecisionPolicy(compute, getattr(torch, precision.reduce))
    modules: Any = unit[0] if len(unit) == 1 else list(unit)
    if mesh.size("fsdp") > 1:
        fully_shard(modules, reshard_after_forward=frees, **options)
    else:
        replicate(modules, **options)


def _drop_casts(module: nn.Module, args: Any) -> None:
    """Clears autocast's cache before a forward: the gradient of an earlier cast would come after FSDP2's reduction."""
    if not torch.compiler.is_compiling():
        torch.clear_autocast_cache()


def _own_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Makes a unit return no view: a write into it would bypass FSDP2's hook that gathers the unit in backward."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or not value._is_view():
            return value
        # Nothing else refers to what a linear's output is a view of, so logits need not be copied.
        return torch.ops.aten._unsafe_view(value, value.shape) if isinstance(module, nn.Linear) else value.clone()

    return output if torch.compiler.is_compiling() else tree_map(own, output)  # a graph's outputs are its own


def _tune(root: nn.Module, units: Units, registry: Registry) -> None:
    """Applies the settings that FSDP2 takes after `fully_shard`."""
    policy, plan = registry.policy, registry.plan
    layers = set(outermost_layers(plan.stacks))
    roots: dict[tuple[str, ...], Any] = {names: unit[0] for names, unit in units.items()}
    in_stack = [each for names, each in roots.items() if layers.intersection(names)]
    keeps_last = False
    if policy.zero_stage == 3 and registry.mesh.size("fsdp") > 1:
        embedding = roots.get((plan.embedding or "",))
        if policy.units is None and plan.pipeline is None:
            for unit in (each for each in roots.values() if each not in in_stack and each is not embedding):
                unit.set_reshard_after_forward(False, recurse=False)  # the head's: backward follows forward at once
        if embedding is not None and _is_plain_embedding(embedding):
            embedding.set_unshard_in_backward(False)
        keeps_last = policy.keep_last_block and plan.pipeline is None
    for number, unit in enumerate(in_stack):
        if policy.prefetch > 1:
            unit.set_modules_to_forward_prefetch(in_stack[number + 1 : number + 1 + policy.prefetch])
            unit.set_modules_to_backward_prefetch(in_stack[max(0, number - policy.prefetch) : number][::-1])
        if keeps_last:
            unit.set_reshard_after_forward(unit is not in_stack[-1], recurse=False)
    inside = {each for unit in units.values() for module in unit for each in module.modules()}
    inside.update([root.held] if isinstance(root, StageRoot) else ())
    in_units = {name for unit in plan.data.units for name in unit}
    has_layers = any(nearest(layer, in_units) is None for layer in layers)  # which not every batch may run
    for modules in (*units.values(), (root,)):
        chooses = (_chooses_modules(module, besides=inside if module is root else ()) for module in modules)
        if any(chooses) or (modules[0] is root and has_layers):
            registry.uses.watch(modules[0])  # type: ignore[arg-type]  # sharded above
    for module in root.modules():
        if isinstance(module, FSDPModule):
            keep_unused_gradients_none(module)
            if policy.gradient_divide_factor is not None:
                module.set_gradient_divide_factor(policy.gradient_divide_factor)
                # gloo only sums. Where nothing is scattered it sums anyway, and torch would divide twice.
                only_sums = registry.mesh.device.type != "cuda" and registry.mesh.size("fsdp") > 1
                module.set_force_sum_reduction_for_comms(only_sums)
            if policy.symmetric_memory:
                module.set_symm_mem_for_comm()


def _chooses_modules(unit: nn.Module, *, besides: Collection[nn.Module]) -> bool:
    """Whether a unit (without the modules `besides`) may use other parameters for other rows, such as experts.

    Then a rank must reduce zeros for unused ones.
    """
    for module in unit.modules():
        if module in besides:
            continue
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_list and any(each._parameters and each not in besides for each in module.modules()):
            return True
        is_of_torch = type(module).__module__.startswith("torch.")
        if not is_of_torch and any(each is not None and each.ndim > 2 for each in module._parameters.values()):
            return True
    return False


def _is_plain_embedding(module: nn.Module) -> bool:
    """Returns whether the module is a plain lookup, whose gradient does not depend on its weight."""
    forwards = {each.__name__ for each in type(module).__mro__ if "forward" in vars(each) and each is not nn.Module}
    return (
        isinstance(module, nn.Embedding)
        and not list(module.children())
        and not forwards - {"Embedding", "SplitEmbedding"}
    )


def check_data_parallelism(model: nn.Module, policy: FsdpPolicy, mesh: Mesh, *, reduce: str = "float32") -> None:
    """Checks that FSDP2 can shard a model by this policy. `reduce`: the dtype in which gradients are summed."""
    if mesh.data_mesh is None:
        return
    if policy.symmetric_memory and mesh.device.type != "cuda":
        raise UnsupportedError(f"symmetric memory on {mesh.device}", why="it is NCCL's", fix="leave it out on CPUs")
    if reduce == "float16" and policy.gradient_divide_factor not in (None, 1.0) and mesh.size("fsdp") == 1:
        raise UnsupportedError(
            f"gradient_divide_factor={policy.gradient_divide_factor} with gradients in float16 over {mesh.shape}",
            why="FSDP2 divides them twice where no parameter is sharded",
            fix="use fsdp ranks, another Precision(reduce=...), or leave it out for the mean",
        )
    methods = {
        "set_separate_reduce_scatter_group": policy.separate_reduce_group,
        "set_symm_mem_for_comm": policy.symmetric_memory,
    }
    for method, wanted in methods.items():
        if wanted and not hasattr(FSDPModule, method):
            raise UnsupportedError(
                f"torch {torch.__version__} has no FSDPModule.{method}", fix="use torch 2.13 or newer"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise UnsupportedError(
                f"register_hook on {name}, which data ranks share",
                why="FSDP2 reduces the gradient and puts it in place itself: such a hook would never run",
                fix="change parameter.grad after backward(), or use parameter.register_post_accumulate_grad_hook",
            )
