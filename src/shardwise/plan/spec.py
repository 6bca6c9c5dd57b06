"""`Plan` and `Rule`: what a model is split by, as frozen values that print and read back.

A plan as text has one rule per line, and says in a comment where a rule comes from:

    model.layers.*.self_attn.q_proj: colwise
    model.layers.*.self_attn.o_proj: rowwise  # derived: writes to the residual
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import PlanError, did_you_mean
from shardwise.plan.joined import joined_style
from shardwise.plan.split_style import SplitStyle, divisor_of, is_split_style

__all__ = ["PARAMETRIC_STYLES", "STYLES", "Plan", "Rule"]

STYLES: dict[str, str] = {
    # transformers' styles, in the order in which it registers them
    "embedding_rowwise": "embedding split by vocabulary rows; outputs summed over ranks",
    "embedding_colwise": "embedding split by columns; outputs gathered",
    "colwise_gather_output": "linear split by output features; outputs gathered",
    "colwise_rep": "older name of colwise_gather_output",
    "colwise": "linear split by output features; outputs stay split",
    "rowwise": "linear split by input features, inputs arrive split; outputs summed over ranks",
    "rowwise_split_input": "linear split by input features, whole inputs are split first; outputs summed over ranks",
    "rowwise_rep": "older name of rowwise_split_input",
    "packed_colwise": "fused linear (gate|up) split by output features, each section on its own",
    "packed_rowwise": "fused weight packed along its last dim, each section split on its own",
    "replicated_with_grad_allreduce": "weights replicated and used on local heads or features; their gradients summed",
    "mla_kv_a_proj": "latent key/value projection: latent part and rotary key kept whole, their gradients summed",
    "all_reduce": "outputs are partial and are summed over ranks",
    "moe_tp_experts": "every rank runs its slice of every expert; outputs summed over ranks",
    "moe_identity_expert": "identity expert whose output is summed over ranks like the others', so scaled down first",
    "local_params": "module whose bare parameters are split by their own rules; its forward sees the local ones",
    "replicate": "every rank keeps all of it",
    # ours
    "qkv_colwise": "fused query|key|value linear split by output features, each section by its own heads",
    "norm_split": "norm over a split dim: weights split, statistics summed over ranks",
    "region": "module whose inside is split: one collective at its edge per direction",
    "region_output": "a region whose output is a partial sum: reduced there and not at row-split modules inside",
    "rowwise_reenter": "linear split by input features inside a region: outputs summed, and used by split parts again",
    "added_once": "parameter kept whole that is added to partial sums: every rank adds its share of it",
    "aside": "an input of a region that does not enter it: it is used behind the sum",
    "local_size": "an input that tells its module the size of a rank's part of its features: to reshape parts by",
    "sequence": "layers, or an input of a layer: split along the sequence (with sequence parallelism), joined behind",
    "sequence_partial": "as sequence, in front of a split head; also what lies between: gradients there are partial",
    "whole_sequence": "module in such layers that is given the whole sequence and computes alike on every rank",
    "divided": "an integer attribute of a module that counts what is split: divided by the number of ranks",
}
"""Every style name, with its meaning."""

PARAMETRIC_STYLES: dict[str, str] = {
    "divided(N)": "as divided, by N, such as 2 or 3/2: it counts what several ranks share, too",
    "rowwise_into(NAME)": "as rowwise, but summed together with what NAME computes, to which it is added",
    "region_output_into(NAME)": "as region_output, but summed together with what NAME computes",
    "split(DIM)": "parameter split along a dim by heads or in plain runs; see shardwise.plan.split_style",
}
"""How styles with arguments are written, with their meaning."""

# A component is `*`, `**` or a name; a name cannot hold what the text form gives a meaning.
_COMPONENT = re.compile(r"\*{1,2}|[^\s.:#*]+")
_SOURCE = re.compile(r"[^\s:#]+")


@dataclass(frozen=True)
class Rule:
    """One pattern and the style of what it matches.

    Args:
        pattern: FQNs of modules or parameters; `*` stands for one whole component, `**` for any number, none included.
        style: A key of `STYLES`, or one of `PARAMETRIC_STYLES` with its arguments.
        source: Where the rule comes from, one word: `user`, `hf`, `family`, `derived`, ...
        reason: Why, in one line (white space is folded).

    Raises:
        PlanError: the pattern is malformed, the style unknown, or the source not one word.
    """

    pattern: str
    style: str
    source: str = "user"
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", " ".join(self.reason.split()))
        at = f'rule "{self.pattern}: {self.style}"'
        for component in self.pattern.split("."):
            if not _COMPONENT.fullmatch(component):
                raise PlanError(
                    f"cannot read the pattern {self.pattern!r}",
                    at=at,
                    why=f"{component!r} is not a name, '*' (one whole component) or '**' (any number of components)",
                )
        if is_split_style(self.style):
            SplitStyle.parse(self.style)
        elif self.style == "sequence_parallel":  # transformers has it, of single modules
            raise PlanError(
                "sequence parallelism is no style of single modules",
                at=at,
                why="it follows from where hidden states are split, for all that lies between there and their joining",
                fix="leave the rule out, and pass sequence_parallel=True",
            )
        elif divisor_of(self.style, 1) is None and joined_style(self.style) is None and self.style not in STYLES:
            raise PlanError(
                f"unknown style {self.style!r}{did_you_mean(self.style, STYLES)}",
                at=at,
                fix=f"use one of {', '.join((*STYLES, *PARAMETRIC_STYLES))}",
            )
        if not _SOURCE.fullmatch(self.source):
            raise PlanError(f"the source {self.source!r} of a rule is not one word", at=at)

    @property
    def meaning(self) -> str:
        """The reason, or where none is given what the style says."""
        return self.reason or STYLES.get(self.style, self.style)

    def __str__(self) -> str:
        text = f"{self.pattern}: {self.style}"
        if self.reason:
            return f"{text}  # {self.source}: {self.reason}"
        return text if self.source == "user" else f"{text}  # {self.source}"

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """The rule that one line of a plan spells.

        Raises:
            PlanError: there is no `pattern: style`, or what it says is not a rule.
        """
        body, _, comment = text.partition("#")
        pattern, colon, style = body.partition(":")
        if not colon:
            raise PlanError(f"{text.strip()!r} is not a rule", why='a rule reads "pattern: style  # source: reason"')
        source, _, reason = comment.partition(":")
        return cls(pattern.strip(), style.strip(), source.strip() or "user", reason)


@dataclass(frozen=True)
class Plan:
    """Rules in rising precedence: where several match a name, the last one governs it.

    Raises:
        PlanError: two rules have the same pattern.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[str, Rule] = {}
        twice = [(seen[rule.pattern], rule) for rule in self.rules if seen.setdefault(rule.pattern, rule) is not rule]
        if twice:
            raise PlanError(
                f"a plan has two rules for {', '.join(repr(rule.pattern) for _, rule in twice)}",
                why="\n".join(f'"{first}" and "{second}"' for first, second in twice),
                fix="keep one rule per pattern; plan | other lets the other's rules win",
            )

    @classmethod
    def of(cls, styles: Mapping[str, str], *, source: str = "user") -> "Plan":
        """The plan that maps patterns to style names. Raises `PlanError` where a rule is wrong."""
        return cls(tuple(Rule(pattern, style, source) for pattern, style in styles.items()))

    def __or__(self, other: "Plan") -> "Plan":
        """Both plans' rules; the other's come last and so win, and replace rules with the same pattern."""
        replaced = {rule.pattern for rule in other.rules}
        return Plan((*(rule for rule in self.rules if rule.pattern not in replaced), *other.rules))

    def __str__(self) -> str:
        return "\n".join(str(rule) for rule in self.rules)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan that `text` spells, one rule per line; blank lines and comment lines are skipped.

        Raises:
            PlanError: some lines are not rules (all are reported), or two have the same pattern.
        """
        rules: list[Rule] = []
        problems: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                rules.append(Rule.parse(line))
            except PlanError as error:
                problems.append(f"line {number}: {error.summary}" + (f" ({error.why})" if error.why else ""))
        if problems:
            raise PlanError("cannot read the plan", why="\n".join(problems))
        return cls(tuple(rules))

    def to_json(self) -> dict[str, object]:
        """The plan as a JSON object; `from_json` reads it back."""
        return {"rules": [{name: getattr(rule, name) for name in _RULE_FIELDS} for rule in self.rules]}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "Plan":
        """The plan that `to_json` wrote as `data`.

        Raises:
            PlanError: `data` is not such an object: a key is unknown or missing, or a value not text.
        """
        match data:
            case {"rules": list(rules), **rest} if not rest:
                return cls(tuple(_rule_from_json(rule) for rule in rules))
        raise PlanError(f"not a plan: an object with the keys {sorted(data)}", why="it has one key, 'rules', a list")


_RULE_FIELDS = ("pattern", "style", "source", "reason")


def _rule_from_json(data: object) -> Rule:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise PlanError(f"not a rule: {data!r}", why="it is an object whose values are text")
    for key in data:
        if key not in _RULE_FIELDS:
            raise PlanError(f"unknown key {key!r} in a rule{did_you_mean(key, _RULE_FIELDS)}", at=str(data))
    if not {"pattern", "style"} <= data.keys():
        raise PlanError(f"a rule without pattern or style: {data!r}", why="a rule has at least these two")
    return Rule(**data)
