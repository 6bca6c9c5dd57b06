"""Optimizers of split models: any torch optimizer class, over this rank's parts."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import ConfigError, UnsupportedError
from shardwise.optim.elementwise import assume_elementwise, check_optimizer
from shardwise.optim.gradients import Gradients, gradients_of
from shardwise.optim.steps import check_finite_before_step, inner_of, stepping_class, with_fused
from shardwise.parameters.registry import canonical_entries, entry_of, find_parameters, registry_of, reshard
from shardwise.plan.options import check_kind
from shardwise.plan.spec import match
from shardwise.runtime.fsdp_internals import gathered_parameters

_MODEL = "_shardwise_model"
KNOWN = "_shardwise_known"
_WITHIN = "_shardwise_within"

Groups = Sequence[Mapping[str, Any]] | Callable[[str, Tensor], Mapping[str, Any]]


def build_optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    groups: Groups = (),
    elementwise: bool = False,
    **options: Any,
) -> torch.optim.Optimizer:
    """Builds an optimizer over the trained parameters of a split model.

    Elementwise optimizers (SGD, Adam and similar ones) update a part exactly like the full parameter. State is stored
    with its parameter. Optimizers with a fused implementation in torch use it, unless another is requested, and step
    over plain local tensors.

    Args:
        groups: options for some of the parameters, overriding the general ones. Either rules, of which the first that
            matches a parameter applies: `[{"max_dims": 1, "weight_decay": 0.0}, {"params": "model.layers.0.**", "lr":
            1e-5}]`, where `max_dims` 1 means vectors and scalars, and `params` is one or several patterns of names; or
            a function of name and parameter that returns the options.
        elementwise: declare that a class that is not torch's updates every element by itself, alike on ranks with equal
            copies. Default: the class is tried on tiny tensors.
        options: keyword arguments of the class (`lr`, `weight_decay`, …).

    Returns:
        The optimizer. Its `step`, after its closure if there is one, applies `Precision.nonfinite`.

    Raises:
        TypeError: `optimizer_class` is no optimizer class, or does not take the options.
        ConfigError: a rule matches no parameter, or does not say which parameters it is for.
        UnsupportedError: the class does not update parts of parameters like full ones (Muon, Adafactor), or does not
            support what FSDP2 shards (Rprop), or dense gradients (SparseAdam).
        LayoutError: the model is not split by Shardwise.

    Communicates: nothing itself; with a `Precision`, `step` all-reduces one value over all ranks, unless
    `clip_grad_norm_` has just done so.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class must be a torch.optim.Optimizer class, got {optimizer_class!r}")
    reshard(model)
    gradients_of(model).adopt_added()
    trained: dict[str, Tensor] = {name: each for name, each, _ in find_parameters(model) if each.requires_grad}
    _check_kept_wide(trained.values())
    others = {name: entry.layout.shape for name, entry in canonical_entries(model).items() if not entry.is_held}
    options = with_fused(optimizer_class, options, list(trained.values()))
    optimizer = stepping_class(optimizer_class)(_grouped(trained, groups, others), **options)
    optimizer.__dict__[_MODEL] = weakref.ref(model)
    if elementwise:
        assume_elementwise(optimizer)
    check_optimizer(optimizer, options)
    return optimizer


@functools.cache
def watch_optimizers() -> None:
    """Registers a hook on all torch optimizers: one of a split model updates like the unsplit one, or raises."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Checks before a step, after its closure (if any) has computed the gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    models = _known_models(optimizer, parameters)
    if models is None:
        models = _look_at(optimizer, parameters)
    if not models:
        return None
    step = inspect.signature(type(optimizer).step)
    given = step.bind(*args, **kwargs)
    closure = given.arguments.get("closure")
    if closure is None:
        _finish(models, optimizer)
        return None

    def with_finish() -> Any:
        loss = closure()
        _finish(models, optimizer)
        return loss

    given.arguments["closure"] = with_finish
    return given.args, given.kwargs


def _known_models(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[nn.Module] | None:
    """Returns the cached result of `_look_at` for the same parameters; None if they changed, or a model is gone."""
    known = optimizer.__dict__.get(KNOWN)
    if known is None or known[0] != _marks(parameters):
        return None
    models = [model() for model in known[1]]
    return None if None in models else models


def _marks(parameters: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """Returns what the checks of an optimizer's parameters depend on."""
    return [(id(each), each.requires_grad) for each in parameters]


def _look_at(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Returns the split models whose parameters an optimizer holds.

    Raises if it would update them differently from full ones.
    """
    entries = {id(entry.registry): entry for parameter in parameters if (entry := entry_of(parameter)) is not None}
    # A stage of a pipeline may have nothing to train, and takes part in what all ranks decide.
    idle = optimizer.__dict__[_MODEL]() if not parameters and _MODEL in optimizer.__dict__ else None
    if not entries and idle is None:
        return []
    inner = inner_of(optimizer)
    if inner is not optimizer:  # ZeRO around another, which may have nothing to update on this rank
        inner.__dict__[_WITHIN] = True
    check_optimizer(inner)
    _check_kept_wide(parameters)
    known = [entry for parameter in parameters if (entry := entry_of(parameter)) is not None]
    hooks = optimizer._optimizer_state_dict_pre_hooks  # from the first step on: before it there is no state
    if any(entry.split is not None and not entry.registry.local_state for entry in known) and (
        _refuse_state not in hooks.values()
    ):
        optimizer.register_state_dict_pre_hook(_refuse_state)
    models = [model for entry in entries.values() if (model := entry.registry.model()) is not None]
    models += [idle] if idle is not None else []
    _check_known(parameters, models)
    _check_at_rest(parameters, models)
    if len(known) == len(parameters):
        optimizer.__dict__[KNOWN] = _marks(parameters), list(map(weakref.ref, models))
    return models


def local_state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Returns an optimizer's `state_dict()` with this rank's parts, for code that saves and loads per rank."""
    hooks = optimizer._optimizer_state_dict_pre_hooks
    guards = {key: hooks.pop(key) for key in [key for key, hook in hooks.items() if hook is _refuse_state]}
    try:
        return optimizer.state_dict()
    finally:
        hooks.update(guards)


def _refuse_state(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise UnsupportedError(
        f"state_dict() of {type(optimizer).__name__} over parameters that are split over tp",
        why="this rank holds the state of its parts, which would be taken for that of full parameters",
        fix="use shardwise.save_checkpoint, or read this rank's parts from optimizer.state",
    )


def _finish(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    for model in models if _WITHIN not in optimizer.__dict__ else ():
        gradients = gradients_of(model)
        _note_written(optimizer, gradients)
        check_finite_before_step(model, gradients, optimizer)
        gradients.registry.context.steps.add(_describe(optimizer))


def _note_written(optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
    """Records that parameters lose their source's values (fused steps count no writes); raises inside of backward."""
    states = gradients.registry.source.states
    is_early = gradients.is_partial and torch._C._current_graph_task_id() != -1
    for group in optimizer.param_groups if states or is_early else ():
        for entry in (entry_of(each) for each in group["params"] if each.grad is not None):
            if entry is not None and is_early and entry.needs_sum:
                raise UnsupportedError(
                    f"a step of {type(optimizer).__name__} inside of backward, for {entry.fqn}",
                    why="ranks sum the gradient when backward has ended",
                    fix="step after backward",
                )
            if entry is not None:
                states.pop(entry.fqn, None)


def _describe(optimizer: torch.optim.Optimizer) -> str:
    """Class and options as text, equal for equal updates. Tensors are not read, and other objects are left out."""
    options = [
        {name: group[name] for name in optimizer.defaults if _is_plain(group.get(name))}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} with {', '.join(sorted({*map(repr, options)}))}"


def _is_plain(option: Any) -> bool:
    if isinstance(option, tuple | list):
        return all(map(_is_plain, option))
    return option is None or isinstance(option, bool | int | float | str)


def _check_kept_wide(parameters: Iterable[Tensor]) -> None:
    """Raises if a parameter is trained that was frozen when the model was split."""
    entries = (entry for each in parameters if each.requires_grad and (entry := entry_of(each)) is not None)
    for entry in entries:
        if (dtype := entry.registry.frozen.get(entry.fqn)) is not None:
            raise UnsupportedError(
                f"training of {entry.fqn}, which was frozen when the model was split",
                why=f"frozen parameters are stored in the dtype of computation ({dtype}), where updates are lost",
                fix="set requires_grad before the model is split, or split it without a Precision",
            )


def _check_known(parameters: Iterable[Tensor], models: Sequence[nn.Module]) -> None:
    """Raises if parameters are in no split model, and there are several data ranks."""
    untracked = [tuple(each.shape) for each in parameters if each.requires_grad and entry_of(each) is None]
    if untracked and any(gradients_of(model).registry.mesh.data_size > 1 for model in models):
        raise UnsupportedError(
            f"these parameters are not part of the split model: shapes {', '.join(map(str, untracked[:3]))}",
            why="their gradients would not be averaged over the data ranks",
            fix="pass the module that holds both to shardwise.build_optimizer or shardwise.TrainStep, or give them an "
            "optimizer of their own",
        )


def _check_at_rest(parameters: Iterable[Tensor], models: Iterable[nn.Module]) -> None:
    """Raises if parameters were gathered when the optimizer was built."""
    roots = [root for model in models for root in (model, *registry_of(model).stage_roots.values())]
    gathered = {parameter for root in roots for parameter in gathered_parameters(root)}
    found = [entry.fqn for each in parameters if each in gathered and (entry := entry_of(each)) is not None]
    if found:
        raise UnsupportedError(
            f"an optimizer over {found[0]} as FSDP2 has gathered it (and {len(found) - 1} more)",
            why="it was built after a forward without backward; it would update copies that are thrown away",
            fix="build it before, or with shardwise.build_optimizer",
        )


def _grouped(
    trained: Mapping[str, Tensor], groups: Groups, others: Mapping[str, tuple[int, ...]]
) -> list[dict[str, Any]]:
    """Returns the parameter groups by options, apart in and outside of FSDP2: foreach optimizers cannot mix them."""
    choose = groups if callable(groups) else _Rules(groups, trained, others)
    found: dict[Any, dict[str, Any]] = {}
    for name, parameter in trained.items():
        chosen = dict(choose(name, parameter))
        key = (isinstance(parameter, DTensor), *sorted((option, repr(value)) for option, value in chosen.items()))
        found.setdefault(key, {"params": [], **chosen})["params"].append(parameter)
    return list(found.values()) or [{"params": []}]


def groups_of(parameters: Any) -> list[dict[str, Any]]:
    """Converts the parameters argument of torch's optimizers to groups, each with a list of parameters."""
    given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups: list[Any] = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    listed = ([each["params"]] if isinstance(each["params"], Tensor) else list(each["params"]) for each in groups)
    return [{**group, "params": own} for group, own in zip(groups, listed, strict=True)]


def model_under(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """Returns the split model whose parameters an optimizer updates, also on a stage that trains nothing; else None."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    entry = next((entry for each in parameters if (entry := entry_of(each)) is not None), None)
    built_for: Callable[[], nn.Module | None] = optimizer.__dict__.get(_MODEL, lambda: None)
    return built_for() if entry is None else entry.registry.model()


def divided_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns `groups_of` with only the trained parameters. Parameters in and outside of FSDP2 get separate groups.

    Args:
        parameters: may be pairs with names (`named_parameters()`); names are dropped.

    Raises:
        ConfigError: the argument holds no parameters.
    """
    check_kind("the parameters of an optimizer", parameters, Iterable, fix="pass model.parameters(), or groups of them")
    found = []
    for group in groups_of(parameters):
        listed = [each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in group["params"]]
        for each in listed:
            check_kind("a parameter of an optimizer", each, Tensor, fix="pass model.parameters(), or groups of them")
        for kind in (True, False):
            own = [each for each in listed if each.requires_grad and isinstance(each, DTensor) is kind]
            found += [{**group, "params": own}] if own else []
    return found


def check_class(given: Any) -> None:
    """Raises `ConfigError` if `given` is no optimizer class: an instance, a name, or what cannot be called."""
    check_kind("the class of an optimizer", given, Callable, fix="pass it as torch.optim.AdamW, its options by name")


class _Rules:
    """Returns the options of the first rule that matches a parameter."""

    def __init__(
        self, rules: Sequence[Mapping[str, Any]], trained: Mapping[str, Tensor], others: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._rules = [_read_rule(rule) for rule in rules]
        known = {name: len(shape) for name, shape in others.items()}
        known |= {name: parameter.ndim for name, parameter in trained.items()}
        for rule, (fits, _) in zip(rules, self._rules, strict=True):
            if not any(fits(name, num_dims) for name, num_dims in known.items()):
                raise ConfigError(f"the parameter group {dict(rule)} fits no parameter that is trained")

    def __call__(self, name: str, parameter: Tensor) -> Mapping[str, Any]:
        return next((options for fits, options in self._rules if fits(name, parameter.ndim)), {})


def _read_rule(rule: Mapping[str, Any]) -> tuple[Callable[[str, int], bool], dict[str, Any]]:
    options = dict(rule)
    patterns, most = options.pop("params", None), options.pop("max_dims", None)
    if patterns is None and most is None:
        raise ConfigError(
            f"the parameter group {options} does not say which parameters it is for",
            fix='add "params": a pattern of names or a list of them, or "max_dims": 1 for vectors and scalars',
        )
    named = [patterns] if isinstance(patterns, str) else patterns

    def fits(name: str, num_dims: int) -> bool:
        return (named is None or any(match(pattern, name) for pattern in named)) and (most is None or num_dims <= most)

    return fits, options
