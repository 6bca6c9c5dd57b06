"""Generalizes a tiny model's plan to the real model: rules found on a few layers, for all layers of their kind.

A plan that passes on a tiny model may not fit other sizes: a rank's share of heads that makes no complete groups,
sections of unequal length, counts that do not divide. Shapes alone show most of it. So a rank's part of the model runs
forward and backward on fake tensors before the plan is used.
"""

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedModel

from shardwise.comm.simulated import LoneGroup
from shardwise.errors import ShardwiseError
from shardwise.parallel.activation_memory import FakeTensorCorrections, fake_tensors
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.build import allocate_meta
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.parameters import check_heads
from shardwise.plan.rule import SECTIONS, InputRule, ParameterRule, Rule
from shardwise.plan.spec import Plan, match, star_numbers
from shardwise.plan.structure import ModelFacts, Shape, nearest, outermost_layers, parent_of
from shardwise.probe.trial import (
    ITEM,
    SimulatedMesh,
    Verdict,
    layer_kind,
    names_in,
    smallest_with_all_layer_kinds,
    verdict_of_exception,
)
from shardwise.sharding.placement import Split
from shardwise.tiny.inputs import MEDIA, encoder_of, loss_or_surrogate, make_medium, missing_media
from shardwise.tiny.models import make_batch
from shardwise.tiny.shrink import keep_layers
from shardwise.topology.shape import MeshShape

_Suffixed = tuple[str, Rule]  # A rule of a layer, and what follows the layer's name in its pattern


def generalize(plan: Plan, tiny: nn.Module, model: nn.Module) -> Plan:
    """Converts `plan`, found on `tiny`, to a plan for `model`: each layer gets the rules of a layer of its kind in the
    tiny model.

    This is the layer of the same name if it has the same kind, else the first of the kind. Lists inside of it (experts)
    may have other lengths. Rules that all layers of a stack share are written once, with `*` for the number. Rules
    about inputs are those of all layers of the kind: an input that only some layers receive is None in the others.
    """
    tiny_facts, facts = read_facts(tiny), read_facts(model)
    held = {layer: names_in(tiny, layer) for layer in outermost_layers(tiny_facts.stacks)}
    alike: dict[tuple[str, frozenset[str]], list[str]] = {}
    for layer, names in held.items():
        alike.setdefault(layer_kind(layer, names), []).append(layer)
    layers = {layer: names_in(model, layer) for layer in outermost_layers(facts.stacks)}
    outside = tuple(rule for rule in plan.rules if nearest(rule.pattern, held) is None)
    folded: list[Rule] = []
    for section in SECTIONS:
        inside: dict[str, list[_Suffixed]] = {layer: [] for layer in held}
        for rule in plan.section(section):
            if (owner := nearest(rule.pattern, held)) is not None:
                inside[owner].append((rule.pattern[len(owner) :], rule))
        found: list[tuple[str, _Suffixed]] = []
        for layer, names in layers.items():
            examples = alike.get(layer_kind(layer, names), [])
            if is_known := layer in examples and held[layer] == names:
                own = inside[layer]
            else:
                own = _merged([_for_any_length(inside[each], held[each] | _modules(tiny, each)) for each in examples])
            owned = frozenset[str]().union(*(held[each] for each in examples))
            own = _with_inputs(own, [inside[each] for each in examples], owned, is_known=is_known)
            example = layer if is_known else next(iter(examples), layer)
            for suffix, rule in own:
                found.append((layer, (suffix, _fitted(rule, tiny_facts, facts, example + suffix, layer + suffix))))
        folded += _folded(found, list(layers))
    return Plan(outside) | Plan(tuple(folded))


def _modules(model: nn.Module, layer: str) -> frozenset[str]:
    return frozenset(f".{name}" for name, _ in model.get_submodule(layer).named_modules(remove_duplicate=False))


def _fitted(rule: Rule, tiny: ModelFacts, model: ModelFacts, tiny_name: str, name: str) -> Rule:
    """The rule for the parameter `name`, found on the tiny model's `tiny_name`, with its number of sections (experts).

    `split(0, sections=4)` holds for any number of features, but not of sections. Two attributes of the enclosing
    modules show that the number has changed: one that counts the sections, in both models, and one that gives the
    length of each.
    """
    style = rule.split if isinstance(rule, ParameterRule) else None
    shape, tiny_shape = _shape_of(model, name), _shape_of(tiny, tiny_name)
    if style is None or style.num_sections == 1 or not shape or not tiny_shape:
        return rule
    dim = min(style.dim, len(shape) - 1)  # a bias has the output dim of its weight
    size, tiny_size = shape[dim], tiny_shape[dim]
    pairs = list(_attributes(tiny, model, tiny_name, name))
    lengths = {own for known, own in pairs if known * style.num_sections == tiny_size}
    counts = {own for known, own in pairs if known == style.num_sections}
    fitting = {number for number in counts if any(number * length == size for length in lengths)}
    if len(fitting) != 1 or any(style.num_sections * length == size for length in lengths):
        return rule
    return replace(rule, style=str(replace(style, num_sections=fitting.pop())))


def _attributes(tiny: ModelFacts, model: ModelFacts, tiny_name: str, name: str) -> Iterator[tuple[int, int]]:
    """Yields the values, in both models, of the attributes of the modules that contain a parameter."""
    while name:
        tiny_name, name = parent_of(tiny_name), parent_of(name)
        module, own = tiny.modules.get(_first(tiny_name)), model.modules.get(_first(name))
        if module is not None and own is not None:
            for key in module.attributes.keys() & own.attributes.keys():
                yield module.attributes[key], own.attributes[key]


def _shape_of(facts: ModelFacts, name: str) -> Shape | None:
    owner, _, own = _first(name).rpartition(".")
    return facts.modules[owner].parameters.get(own) if owner in facts.modules else None


def _first(name: str) -> str:
    """`name` with 0 for `*`."""
    return name.replace(".*", ".0")


def _for_any_length(rules: list[_Suffixed], names: frozenset[str]) -> list[_Suffixed]:
    """Returns the rules of a layer, with `*` for the number in a list all of whose items have the same rule."""
    arguments = {suffix.rpartition(".")[2] for suffix, rule in rules if isinstance(rule, InputRule)}
    held = names | {f"{name}.{argument}" for name in names for argument in arguments}
    without_rule = held.difference(suffix for suffix, _ in rules)
    for position in range(max((suffix.count(".") for suffix, _ in rules), default=0) + 1):
        styles = {suffix: rule.style for suffix, rule in rules}
        folded: dict[str, Rule] = {}
        for suffix, rule in rules:
            wild = _starred(suffix, position)
            items = [name for name in (*without_rule, *styles) if match(wild, name)]
            same = wild != suffix and all(styles.get(item) == rule.style for item in items)
            folded.setdefault(wild if same else suffix, rule)
        rules = list(folded.items())
    return rules


def _starred(suffix: str, position: int) -> str:
    """`suffix` with `*` for the component at `position`, if it is a number."""
    parts = suffix.split(".")
    if position < len(parts) and ITEM.fullmatch(parts[position]):
        parts[position] = "*"
    return ".".join(parts)


def _merged(alike: list[list[_Suffixed]]) -> list[_Suffixed]:
    """The first layer's rules, with `*` for a number that differs from the other layers' rules of the same style.

    Layers that share their weights may use different items of one list (adapters): then any layer may use any item.
    """
    first, others = (alike or [[]])[0], alike[1:]
    return [(reduce(_generic, _numbered_otherwise(suffix, rule, others), suffix), rule) for suffix, rule in first]


def _with_inputs(
    rules: list[_Suffixed], others: list[list[_Suffixed]], own: frozenset[str], *, is_known: bool
) -> list[_Suffixed]:
    """`rules`, with the input rules of other layers of the kind.

    A layer whose rules are known lacks only inputs that it does not always receive: of modules with parameters (`own`).
    """
    found = dict(rules)
    for suffix, rule in itertools.chain.from_iterable(others):
        is_always_given = suffix.rpartition(".")[0] not in {"", *own}
        if isinstance(rule, InputRule) and not (is_known and is_always_given and rule.dim is not None):
            found.setdefault(suffix, rule)
    return list(found.items())


def _numbered_otherwise(suffix: str, rule: Rule, others: list[list[_Suffixed]]) -> list[str]:
    """Suffixes in other layers that differ from the rule's only in numbers, if those layers lack the rule itself."""
    kind = star_numbers(suffix)
    return [
        other
        for rules in others
        if all(suffix != other for other, _ in rules)
        for other, each in rules
        if each.style == rule.style and star_numbers(other) == kind
    ]


def _generic(pattern: str, other: str) -> str:
    parts = zip(pattern.split("."), other.split("."), strict=True)
    return ".".join(mine if mine == theirs else "*" for mine, theirs in parts)


def _folded(found: list[tuple[str, _Suffixed]], layers: list[str]) -> Iterator[Rule]:
    """Yields each rule that every layer of a stack has once, in the order of the first layer."""
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        stacks.setdefault(layer.rpartition(".")[0], []).append(layer)
    alike: dict[tuple[str, str, str], dict[str, Rule]] = {}
    for layer, (suffix, rule) in found:
        stack = layer.rpartition(".")[0]
        alike.setdefault((stack, suffix, rule.style), {})[layer] = rule
    for (stack, suffix, _), same in alike.items():
        if len(same) == len(stacks[stack]) > 1:
            yield replace(next(iter(same.values())), pattern=f"{stack}.*{suffix}")
        else:
            yield from (replace(rule, pattern=layer + suffix) for layer, rule in same.items())


logger = logging.getLogger("shardwise.plan")


class RealSizes:
    """A few layers of every kind of a model, at its own sizes; all layers if none can be removed."""

    def __init__(self, model: PreTrainedModel, *, num_parts: int) -> None:
        self._num_parts, self.model, self._media = num_parts, model, {*MEDIA}
        unsplit: Verdict | None
        try:
            with torch.device("meta"):
                self.model = smallest_with_all_layer_kinds(
                    lambda number: type(model)(keep_layers(model.config, num_layers=number)).train(model.training),
                    model,
                )
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way where layers are left out
            unsplit = verdict_of_exception(error)
        else:
            unsplit = self._verdict(None)
        self.runs = unsplit is not None and unsplit.passed
        if not self.runs:
            why = unsplit.reason if unsplit is not None else "its code asks for values"
            logger.info("%s cannot be tried at its own sizes without values: %s", type(model).__name__, why)

    def run(self, plan: Plan, *, tiny: nn.Module, sequence_parallel: bool = False) -> Verdict:
        """Returns whether each rank's part runs, split by a plan that was found on `tiny`.

        If that cannot be determined, the plan passes if ranks hold equal parts of every layer, and whole heads. Else
        heads and features may disagree.
        """
        try:
            own, facts = generalize(plan, tiny, self.model), read_facts(self.model)
            spec = ParallelSpec(sequence_parallel=sequence_parallel)
            decided = decide_split(own, self.model, facts, MeshShape(tp_size=self._num_parts), spec)
        except ShardwiseError as error:
            return verdict_of_exception(error)
        found = self._verdict(decided) if self.runs else None
        if found is not None:
            return found
        alone = {each.fqn for each in decided.tensor.regions if each.edge == "gather"}  # whose outputs are full again
        uneven = [fqn for fqn in _uneven(decided) if facts.layer_of(fqn) and parent_of(fqn) not in alone]
        heads = {each.fqn: facts.heads_around(each.fqn) for each in decided.tensor.regions if each.fqn not in alone}
        uneven += [fqn for fqn, each in heads.items() if each is not None and check_heads(each, self._num_parts)]
        if not uneven:
            return Verdict(passed=True)
        why = "only values would show whether they fit, and none can be tried"
        return Verdict(passed=False, reason=f"ranks hold unequal parts of {uneven[0]}; {why}")

    def _verdict(self, decided: SplitPlan | None) -> Verdict | None:
        """Runs the ranks that hold most and least, or the unsplit model; None if the result depends on values."""
        for rank in (0, self._num_parts - 1) if decided is not None and _uneven(decided) else (0,):
            # Copies share the model's memory; nothing writes to it.
            shared = {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in self.model.parameters()}
            model, mesh = copy.deepcopy(self.model, shared), SimulatedMesh(LoneGroup(rank, self._num_parts))
            try:
                with fake_tensors():
                    allocate_meta(model)
                    if decided is not None:
                        apply_plan(model, mesh, decided, ParallelSpec())
                    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
                    batch = make_batch(model, seed=0)
                    batch.pop("attention_mask", None)  # full rows need none, but only values could tell that they are
                    with FakeTensorCorrections():
                        loss_or_surrogate(model(**batch)).backward()
                    self._encode(model, missing_media(model, batch), is_split=decided is not None)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return None
            except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong split
                return verdict_of_exception(error)
        return Verdict(passed=True)

    def _encode(self, model: PreTrainedModel, missing: Sequence[str], *, is_split: bool) -> None:
        """Runs what encodes images and sound beside tokens, as far as the unsplit model runs on fake tensors."""
        for name in [name for name in missing if name in self._media]:
            try:
                with FakeTensorCorrections(makes_integers=True):
                    medium = make_medium(model, name, generator=torch.Generator())
                    loss_or_surrogate(encoder_of(model, name)(**medium)).backward()
            except Exception:
                if is_split:
                    raise
                self._media.remove(name)


def _uneven(decided: SplitPlan) -> list[str]:
    """Returns the FQNs of parameters of which ranks hold different numbers of elements."""
    placements = {fqn: each.placement for fqn, each in decided.parameters.items()}
    return [fqn for fqn, each in placements.items() if isinstance(each, Split) and len(set(each.local_sizes)) > 1]
