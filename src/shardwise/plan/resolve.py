"""A plan applied to a model's facts: for every parameter where it lies, for every module what it does.

This is the one place where styles become placements. All problems are collected and raised once, before anything moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import LayoutError, PlanError
from shardwise.layout.placement import Placement, Replicate, Split, equal_sections, split_even
from shardwise.layout.tensor import Layout, Step
from shardwise.plan.decision import ParameterPlan, SplitPlan
from shardwise.plan.features import check_heads, feature_split, local_heads, qkv_split
from shardwise.plan.fit import check_weight
from shardwise.plan.joined import target_of, without_joins
from shardwise.plan.match import Matcher
from shardwise.plan.regions import COLUMN_STYLES, GATHERED_STYLES, ROW_STYLES, Region, find_regions
from shardwise.plan.sequence import ASIDE, STACK_STYLES, SequencePlan, find_sequence
from shardwise.plan.spec import Plan, Rule
from shardwise.plan.split_style import SplitStyle, divisor_of, is_split_style
from shardwise.plan.structure import Heads, ModelFacts, Shape, parent_of
from shardwise.plan.whole import why_whole
from shardwise.topology.shape import MeshShape

__all__ = ["resolve"]

_VOCABULARY = frozenset({"embedding_rowwise", *GATHERED_STYLES, "colwise"})
_MODULE_STYLES = frozenset(
    {"all_reduce", "embedding_colwise", "embedding_rowwise", "moe_identity_expert", "norm_split"}
    | {"rowwise", "rowwise_reenter", "rowwise_rep", "rowwise_split_input"}
)


def resolve(plan: Plan, facts: ModelFacts, *, tp_size: int, sequence_parallel: bool = False) -> SplitPlan:
    """Decides every parameter and module of the model that `facts` describe.

    Raises:
        PlanError: listing every rule that cannot be followed, with the legal sizes.
    """
    return _Resolver(plan, facts, tp_size=tp_size, sequence_parallel=sequence_parallel).result()


class _Resolver:
    def __init__(self, plan: Plan, facts: ModelFacts, *, tp_size: int, sequence_parallel: bool) -> None:
        self.facts = facts
        self.tp_size = tp_size
        self.problems: list[PlanError] = []
        self.undivided: list[str] = []  # attentions whose heads do not divide
        matcher = Matcher(facts.names())
        self.unmatched = matcher.unmatched(plan)
        governed = matcher.resolve(plan)
        self.rules, joins = without_joins(governed if tp_size > 1 else {})
        self.problems += filter(None, (check_weight(name, rule, facts) for name, rule in self.rules.items()))
        self._complete_tied_vocabulary()
        self._complete_tied_parameters()
        self.head = self._vocabulary_head()
        self.head_parameters = {
            canonical for alias, canonical in facts.tied.items() if self.head and parent_of(alias) == self.head
        }
        blocks = {name: rule for name, rule in self.rules.items() if self.head not in (name, parent_of(name))}
        self.regions = find_regions(facts, blocks)
        self.joins = self._checked_joins({name: each for name, each in joins.items() if name in facts.modules})
        self.sequence = self._find_sequence() if sequence_parallel and tp_size > 1 else None

    def result(self) -> SplitPlan:
        self._check_size()
        heads = self._checked_heads()
        parameters = {
            fqn: self._parameter(fqn, module, name, shape)
            for fqn, module, name, shape in self.facts.parameters()
            if fqn not in self.facts.tied
        }
        self._check_ties(parameters)
        attributes, inputs = self._divided(), self._sliced_inputs()
        if self.problems:
            raise _all_problems(self.problems)
        return SplitPlan(
            shape=MeshShape(tp_size=self.tp_size),
            parameters=parameters,
            regions=self.regions,
            modules={
                name: rule.style
                for name, rule in self.rules.items()
                if name in self.facts.modules and name != self.head and rule.style in _MODULE_STYLES
            },
            heads=heads,
            head=self.head,
            sequence=self.sequence,
            attributes=attributes,
            inputs=inputs,
            asides=frozenset(name for name, rule in self.rules.items() if rule.style == ASIDE),
            told=frozenset(name for name, rule in self.rules.items() if rule.style == "local_size"),
            joins=self.joins,
            added=tuple(fqn for fqn, planned in parameters.items() if planned.rule.style == "added_once"),
            unmatched=self.unmatched,
            tied=self.facts.tied,
            embedding=self.facts.embedding,
        )

    def _check_size(self) -> None:
        """Refuses more ranks than any parameter has rows or columns, before every one of them is laid out."""
        longest, fqn = max(
            ((max(shape, default=1), fqn) for fqn, _, _, shape in self.facts.parameters()), default=(1, "")
        )
        if self.tp_size > longest:
            raise PlanError(
                f"no parameter can be split over tp={self.tp_size}",
                why=f"the longest dim of any is {longest}, in {fqn}",
                fix="use a smaller tp, and fsdp or ddp for further ranks",
            )

    def _parameter(self, fqn: str, module: str, name: str, shape: Shape) -> ParameterPlan:
        rule = self.rules.get(fqn) or self.rules.get(module)
        if rule is None or rule.style in ("region", "region_output"):
            rule = Rule(fqn, "replicate", source="facts", reason=self._why_whole(module, shape))
        placement: Placement = Replicate()
        try:
            placement = self._placement(rule, fqn, shape)
        except (PlanError, LayoutError) as error:
            problem = error if isinstance(error, PlanError) else PlanError(error.summary, why=error.why, fix=error.fix)
            problem.at = f'rule "{rule.pattern}: {rule.style}" ({rule.source}) on {fqn} {list(shape)}'
            problem.summary = f"cannot split {fqn} over tp={self.tp_size}: {problem.summary}"
            if not any(module.startswith(f"{attention}.") for attention in self.undivided):  # that says it all
                self.problems.append(problem)
        steps = (Step("tp", self.tp_size, placement),) if self.tp_size > 1 else ()
        gradient = self._gradient(rule, fqn, placement)
        return ParameterPlan(fqn=fqn, layout=Layout(shape, steps), rule=rule, gradient=gradient)

    def _why_whole(self, module: str, shape: Shape) -> str:
        if self.tp_size == 1:
            return "there is one rank"
        return why_whole(self.facts, self._region_of(module), module, shape)

    def _placement(self, rule: Rule, fqn: str, shape: Shape) -> Placement:
        style, tp = rule.style, self.tp_size
        module, _, name = fqn.rpartition(".")
        kind = self.facts.modules[module].kind
        last = len(shape) - 1
        out_dim = last if kind == "transposed" else max(0, last - 1)
        in_dim = out_dim - 1 if kind == "transposed" else last
        if module == self.head or fqn in self.head_parameters:
            return split_even(0, shape[0], parts=tp)
        if style == "embedding_rowwise":
            return split_even(0, shape[0], parts=tp)
        if style == "embedding_colwise":
            return feature_split(last, shape[last], heads=None, tp_size=tp)
        heads = self._heads_around(module)
        if is_split_style(style):
            return self._spelled(SplitStyle.parse(style), name, shape, heads)
        if style == "packed_colwise":
            return equal_sections(out_dim, shape[out_dim], num_sections=2, parts=tp)
        if style == "qkv_colwise":
            return qkv_split(out_dim, shape[out_dim], heads=heads, tp_size=tp)
        if style in COLUMN_STYLES or style in GATHERED_STYLES or style == "norm_split":
            return feature_split(out_dim, shape[out_dim], heads=heads, tp_size=tp)
        if (len(shape) == 1 or name == "bias") and style.startswith(("rowwise", "packed_rowwise")):
            return Replicate()
        if style == "packed_rowwise":
            return equal_sections(in_dim, shape[in_dim], num_sections=2, parts=tp)
        if style in ROW_STYLES or style in ("rowwise_rep", "rowwise_split_input"):
            return feature_split(in_dim, shape[in_dim], heads=heads, tp_size=tp)
        return Replicate()

    def _spelled(self, style: SplitStyle, name: str, shape: Shape, heads: Heads | None) -> Placement:
        """The placement of a `split(...)`; a bias lies along the output dim of its weight."""
        if style.dim >= len(shape):
            if name != "bias":
                raise PlanError(f"it has no dim {style.dim}", why=f"its shape is {list(shape)}")
            style = SplitStyle(0, style.num_sections, style.pieces)
        size = shape[style.dim]
        if style.pieces is not None:
            if len(style.pieces) != self.tp_size:
                raise PlanError(f"the rule spells out {len(style.pieces)} ranks", why=f"tp is {self.tp_size}")
            return Split(style.dim, style.pieces)
        if style.num_sections > 1:
            return equal_sections(style.dim, size, num_sections=style.num_sections, parts=self.tp_size)
        return feature_split(style.dim, size, heads=heads, tp_size=self.tp_size)

    def _gradient(self, rule: Rule, fqn: str, placement: Placement) -> str:
        """Whether a parameter's gradients differ between ranks. A split one's are complete (its replicas' aside)."""
        if self.tp_size == 1 or isinstance(placement, Split):
            return "whole"
        module, _, name = fqn.rpartition(".")
        region = self._region_of(module)
        leaves = rule.style in ROW_STYLES and rule.style != "rowwise_reenter"
        after_reduce = name == "bias" and leaves and region is not None and region.edge == "row"
        if rule.style in ("replicated_with_grad_allreduce", "added_once") or (region is not None and not after_reduce):
            return "partial"
        return "partial" if self.sequence is not None and self.sequence.sees_a_part(fqn, module) else "whole"

    def _heads_around(self, module: str) -> Heads | None:
        region = self._region_of(module)
        while module:
            heads = self.facts.modules[module].heads
            if heads is not None:
                return heads
            if region is not None and module == region.fqn:
                return None
            module = parent_of(module)
        return None

    def _region_of(self, module: str) -> Region | None:
        for region in self.regions:
            if module == region.fqn or module.startswith(f"{region.fqn}."):
                return region
        return None

    def _checked_heads(self) -> dict[str, tuple[Heads, Heads]]:
        found: dict[str, tuple[Heads, Heads]] = {}
        for region in self.regions:
            for module in (region.fqn, *self.facts.inside(region.fqn)):
                heads = self.facts.modules[module].heads
                if heads is None or module not in self._split_attention(module):
                    continue
                problem = check_heads(heads, self.tp_size)
                if problem:
                    why, fix = problem
                    self.undivided.append(module)
                    self.problems.append(
                        PlanError(f"cannot split the heads of {module} over tp={self.tp_size}", why=why, fix=fix)
                    )
                else:
                    found[module] = (heads, local_heads(heads, self.tp_size))
        return found

    def _split_attention(self, module: str) -> tuple[str, ...]:
        """`module` if one of the projections inside it is column split."""
        below = [name for name in self.rules if name.startswith(f"{module}.")]
        return (module,) if any(self.rules[name].style in COLUMN_STYLES for name in below) else ()

    def _vocabulary_head(self) -> str | None:
        head = self.facts.head
        rule = self.rules.get(head) if head else None
        return head if rule is not None and rule.style in _VOCABULARY else None

    def _complete_tied_vocabulary(self) -> None:
        """Embeddings and heads that share one weight are split alike: a rule for one of them is a rule for all."""
        if self.tp_size == 1:
            return
        tied: dict[str, set[str]] = {}
        for alias, canonical in self.facts.tied.items():
            if alias.endswith(".weight") and canonical.endswith(".weight"):
                tied.setdefault(canonical, {parent_of(canonical)}).add(parent_of(alias))
        for modules in tied.values():
            given = next((name for name in sorted(modules) if self._splits_vocabulary(name)), None)
            if given is None:
                continue
            for name in modules:
                if name not in self.rules:
                    is_embedding = self.facts.modules[name].kind == "embedding"
                    style = "embedding_rowwise" if is_embedding else "colwise_gather_output"
                    self.rules[name] = Rule(name, style, source="structure", reason=f"tied to {given}")

    def _complete_tied_parameters(self) -> None:
        """A parameter that one of its modules splits is split for those that never use it, and so have no rule."""
        for alias, canonical in self.facts.tied.items() if self.tp_size > 1 else ():
            ours, theirs = self.rules.get(alias), self.rules.get(canonical)
            if ours is None and theirs is not None and is_split_style(theirs.style):
                self.rules[alias] = Rule(alias, theirs.style, source="structure", reason=f"tied to {canonical}")
            if theirs is None and ours is not None and is_split_style(ours.style):
                self.rules[canonical] = Rule(canonical, ours.style, source="structure", reason=f"tied to {alias}")

    def _splits_vocabulary(self, module: str) -> bool:
        return module in self.rules and self.rules[module].style in _VOCABULARY

    def _divided(self) -> dict[str, int]:
        """This rank's values of the attributes that the plan divides."""
        values = self.facts.attributes()
        divided = {}
        for name, rule in self.rules.items():
            divisor = divisor_of(rule.style, self.tp_size)
            if divisor is None:
                continue
            if name not in values or values[name] % divisor:
                self.problems.append(
                    PlanError(
                        f"cannot divide {name} by {divisor}",
                        at=f'rule "{rule.pattern}: {rule.style}" ({rule.source})',
                        why=f"its value is {values[name]}" if name in values else "it is no integer attribute",
                    )
                )
                continue
            divided[name] = int(values[name] / divisor)
        return divided

    def _sliced_inputs(self) -> dict[str, tuple[int, int]]:
        """The inputs that rules split: which dim, and how many heads there are in all if it is not the last."""
        inputs = self.facts.inputs()
        found = {}
        for name, rule in self.rules.items():
            if name not in inputs or rule.style in ("replicate", "local_size", ASIDE, *STACK_STYLES):
                continue  # whole is what an input is without a rule
            heads = self.facts.heads_around(inputs[name])
            if not is_split_style(rule.style) or (heads is not None and heads.num_heads % self.tp_size):
                self.problems.append(
                    PlanError(
                        f"cannot split the input {name} over tp={self.tp_size}",
                        at=f'rule "{rule.pattern}: {rule.style}" ({rule.source})',
                        why=f"there are {heads.num_heads} heads" if heads else "an input is split by split(DIM)",
                    )
                )
                continue
            found[name] = (SplitStyle.parse(rule.style).dim, heads.num_heads if heads is not None else 1)
        return found

    def _check_ties(self, parameters: Mapping[str, ParameterPlan]) -> None:
        for alias, canonical in self.facts.tied.items():
            module, _, name = alias.rpartition(".")
            there = self._parameter(alias, module, name, parameters[canonical].shape)
            if there.placement != parameters[canonical].placement:
                self.problems.append(
                    PlanError(
                        f"{alias} and {canonical} are one tied parameter, but the plan splits them differently",
                        why=f"{alias}: {there.placement}; {canonical}: {parameters[canonical].placement}",
                        fix="give both vocabulary styles (colwise_gather_output, embedding_rowwise), or replicate both",
                    )
                )

    def _checked_joins(self, joins: Mapping[str, tuple[str, Rule]]) -> dict[str, str]:
        """FQNs of modules to those of the modules that sum for them: regions are left at both."""
        found = {}
        for module, (name, rule) in joins.items():
            try:
                found[module] = target_of(module, name, self.facts.modules)
                if not all(map(self._is_left_at, (module, found[module]))):
                    raise PlanError(f"{module} cannot be summed with {name}", why="no region is left there by a sum")
            except PlanError as problem:
                problem.at = f'rule "{rule.pattern}: {rule.style}" ({rule.source})'
                self.problems.append(problem)
        return found

    def _is_left_at(self, module: str) -> bool:
        region = self._region_of(module)
        if region is not None and region.edge == "output":
            return module == region.fqn
        return module in self.rules and self.rules[module].style == "rowwise"

    def _find_sequence(self) -> SequencePlan | None:
        try:
            return find_sequence(self.facts, self.rules, self.regions, head=self.head)
        except PlanError as problem:
            self.problems.append(problem)
            return None


def _all_problems(problems: list[PlanError]) -> PlanError:
    seen: dict[str, PlanError] = {}
    for problem in problems:
        # The same complaint about every layer is one complaint.
        seen.setdefault("".join("*" if letter.isdigit() else letter for letter in problem.summary), problem)
    first, *others = seen.values()
    if not others:
        first.summary += f", nor {len(problems) - 1} more alike" if len(problems) > 1 else ""
        return first
    return PlanError(
        f"the plan cannot be followed: {len(problems)} problems, {len(seen)} distinct",
        why="\n".join(map(str, seen.values())),
    )
