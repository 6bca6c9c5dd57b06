"""Rules of a plan: a small type for each kind (parameters, regions, attributes, inputs, sequence).

# [Note: features, not axes]
Rules say how the features of a region divide into parts, not over which axis of the mesh. `shardwise.plan.parameters`
assigns the parts to the ranks of tp. Context parallelism will read the same rules, with tokens split and weights kept
in full. So no style names an axis.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from shardwise.errors import PlanError, did_you_mean
from shardwise.sharding.boxes import Interval

_TEXT = re.compile(r"split\((\d+)(?:, sections=(\d+))?(?:; ([0-9,|-]+))?\)")


@dataclass(frozen=True)
class SplitStyle:
    """The style `split(...)`: a parameter split along a named dim, for splits that no other style names.

    split(0)                        dim 0, by the heads of its module, in plain runs outside of attention
    split(1)                        dim 1 (a table of biases with one column per head)
    split(0, sections=3)            dim 0 holds three equal sections, each split on its own
    split(0; 0-16,64-80|16-32,80-96)  dim 0, exactly these elements on each rank (for one tp_size)

    Attributes:
        pieces: the intervals of every rank, if given.
    """

    dim: int
    num_sections: int = 1
    pieces: tuple[tuple[Interval, ...], ...] | None = None

    def __str__(self) -> str:
        sections = f", sections={self.num_sections}" if self.num_sections > 1 else ""
        if self.pieces is None:
            return f"split({self.dim}{sections})"
        ranks = "|".join(",".join(f"{start}-{stop}" for start, stop in intervals) for intervals in self.pieces)
        return f"split({self.dim}; {ranks})"

    @classmethod
    def parse(cls, text: str) -> "SplitStyle":
        """Parses the style."""
        found = _TEXT.fullmatch(text)
        if found is None or (found[2] and found[3]):
            raise PlanError(
                f"cannot read the style {text!r}",
                why="it is no split of a dim",
                fix='write "split(0)", "split(0, sections=3)" or "split(0; 0-16,32-48|16-32,48-64)"',
            )
        pieces = None
        if found[3]:
            pieces = tuple(
                tuple((int(run.split("-")[0]), int(run.split("-")[1])) for run in rank.split(",") if run)
                for rank in found[3].split("|")
            )
        return cls(int(found[1]), int(found[2] or 1), pieces)


# A component is `*`, `**` or a name; a name cannot hold what the text form gives a meaning.
_COMPONENT = re.compile(r"\*{1,2}|[^\s.:#*]+")
_ARGUMENTS = {"(NAME)": r"\([^()\s:#*]+\)", "(N)": r"\([1-9]\d*(?:/[1-9]\d*)?\)", "(DIM)": r"\(\d+\)"}
UNREACHED = "no gradient reaches it here, so that nothing shows how to split it"
"""The reason of a rule for a parameter that no batch of the search has used."""

_OLDER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}


@dataclass(frozen=True)
class Rule:
    """One pattern and the style of what it matches. Each section of a plan has a subclass.

    Args:
        pattern: FQNs; `*` stands for one component, `**` for any number, including none.
        style: a style of the section, with its arguments.
        source: origin of the rule, one word: `user`, `transformers`, `family`, `structure`, ...
        reason: the reason, in one line.
    """

    pattern: str
    style: str
    source: str = "user"
    reason: str = ""

    section: ClassVar[str] = ""
    styles: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        at = f'rule "{self.pattern}: {self.style}"'
        object.__setattr__(self, "reason", " ".join(self.reason.split()))
        object.__setattr__(self, "style", _OLDER_NAMES.get(self.style, self.style))
        for component in self.pattern.split("."):
            if not _COMPONENT.fullmatch(component):
                raise PlanError(
                    f"cannot read the pattern {self.pattern!r}",
                    at=at,
                    why=f"{component!r} is not a name, '*' (one component) or '**' (any number of components)",
                )
        if not self._is_known():
            known = [style for styles in STYLES.values() for style in styles]
            raise PlanError(
                f"unknown style {self.style!r}{did_you_mean(self.style, known)}",
                at=at,
                fix="\n".join(f"[{section}] {', '.join(styles)}" for section, styles in STYLES.items()),
            )

    def _is_known(self) -> bool:
        """Returns whether the section has the style, and its arguments can be parsed."""
        return any(_pattern(style).fullmatch(self.style) for style in self.styles)

    @property
    def _argument(self) -> str:
        """The text in parentheses; "" without."""
        return self.style.partition("(")[2].removesuffix(")")

    @property
    def into(self) -> str | None:
        """Name of the module to which the partial sum is handed, relative to the parent of both modules; None if it is
        summed.

        If a layer adds the outputs of two parallel blocks (attention and MLP, experts and shared experts), only their
        total must be summed over ranks. The first block outputs zeros and leaves its sum to the second.
        """
        return self._argument if "_into(" in self.style else None

    @property
    def kind(self) -> str:
        """The style without the module to which a sum is left."""
        return self.style.partition("_into(")[0]

    @property
    def is_for_any_size(self) -> bool:
        """Whether the rule holds for any model size: it names neither single elements nor fractions."""
        return not {";", "/"}.intersection(self.style)

    @property
    def meaning(self) -> str:
        """The reason; without one, the meaning of the style."""
        return self.reason or self.styles.get(self.style, self.style)

    @property
    def place(self) -> str:
        """The rule's text in error messages."""
        return f'rule "{self.pattern}: {self.style}" ({self.source})'

    def __str__(self) -> str:
        text = f"{self.pattern}: {self.style}"
        if self.reason:
            return f"{text}  # {self.source}: {self.reason}"
        return text if self.source == "user" else f"{text}  # {self.source}"

    @classmethod
    def of(cls, pattern: str, style: str, source: str = "user", reason: str = "") -> "Rule":
        """Returns the rule of the section that has the style: for parameters or the sequence, if inputs have it too."""
        name = style.partition("(")[0]
        kinds = (kind for kind in SECTIONS if any(name == known.partition("(")[0] for known in kind.styles))
        return next(kinds, ParameterRule)(pattern, style, source, reason)

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Parses one line of a plan: a rule of this section, or of any section if the class is `Rule`."""
        body, _, comment = text.partition("#")
        pattern, colon, style = body.partition(":")
        if not colon:
            raise PlanError(f"{text.strip()!r} is not a rule", why='a rule reads "pattern: style  # source: reason"')
        source, _, reason = comment.partition(":")
        build = Rule.of if cls is Rule else cls
        return build(pattern.strip(), style.strip(), source.strip() or "user", reason)


class ParameterRule(Rule):
    """How a parameter divides. A rule for a module governs its weight and bias, and how it computes with them."""

    section: ClassVar[str] = "parameters"
    styles: ClassVar[Mapping[str, str]] = {
        "embedding_rowwise": "embedding split by vocabulary rows; outputs summed over ranks",
        "embedding_colwise": "embedding split by columns; outputs gathered",
        "colwise_gather_output": "linear split by output features; outputs gathered",
        "colwise": "linear split by output features; outputs stay split",
        "rowwise": "linear split by input features, inputs arrive split; outputs summed over ranks",
        "rowwise_split_input": "linear split by input features, full inputs are split first; outputs summed over ranks",
        "packed_colwise": "fused linear (gate|up) split by output features, each section on its own",
        "packed_rowwise": "fused weight packed along its last dim, each section split on its own",
        "replicated_with_grad_allreduce": "weights replicated, used on local heads or features; gradients summed",
        "replicate": "every rank keeps all of it; a module is no region then",
        # ours
        "qkv_colwise": "fused query|key|value linear split by output features, each section by its own heads",
        "norm_split": "norm over a split dim: weights split, statistics summed over ranks",
        "rowwise_reenter": "linear split by input features within a region: outputs summed, split parameters use them",
        "added_once": "parameter kept in full that is added to partial sums: every rank adds its share of it",
        "rowwise_into(NAME)": "as rowwise, but summed together with what NAME computes, to which it is added",
        "split(DIM)": "parameter split along a dim by heads or in plain runs; see shardwise.plan.rule",
    }

    def _is_known(self) -> bool:
        return self.split is not None or super()._is_known()

    @property
    def split(self) -> SplitStyle | None:
        """The parsed `split(...)`; None for other styles. Raises `PlanError` if it is malformed."""
        return SplitStyle.parse(self.style) if self.style.startswith("split(") else None

    @property
    def splits(self) -> bool:
        """Whether the style splits anything."""
        return self.style not in ("replicate", "replicated_with_grad_allreduce", "added_once")


class RegionRule(Rule):
    """A module at whose edge partial sums begin or end."""

    section: ClassVar[str] = "regions"
    styles: ClassVar[Mapping[str, str]] = {
        "region": "module whose inside is split: one collective at its edge per direction",
        "region_output": "region whose output is a partial sum: reduced there, not at row-split modules inside",
        "region_output_into(NAME)": "as region_output, but summed together with what NAME computes",
        "all_reduce": "outputs are partial and are summed over ranks",
        "moe_tp_experts": "every rank runs its slice of every expert; outputs summed over ranks",
        "moe_identity_expert": "identity expert whose output is summed like the others', so scaled down first",
    }


class AttributeRule(Rule):
    """An integer attribute of a module that counts split features."""

    section: ClassVar[str] = "attributes"
    styles: ClassVar[Mapping[str, str]] = {
        "divided": "divided by tp_size",
        "divided(N)": "divided by N, such as 2 or 3/2: it counts what several ranks share, too",
    }

    def divisor(self, parts: int) -> Fraction:
        """Returns the divisor of the attribute if features divide into `parts`."""
        return Fraction(self._argument or parts)


class InputRule(Rule):
    """An input of a module, `MODULE.ARGUMENT`."""

    section: ClassVar[str] = "inputs"
    styles: ClassVar[Mapping[str, str]] = {
        "split(DIM)": "each rank uses its own part of it: by heads, or along the last dim by features",
        "aside": "residual input of a region: it does not enter it, and is used after the sum",
        "local_size": "its module reads the size of a rank's part of its features from it, to reshape by",
        "sequence": "split along the sequence (with sequence parallelism), as the hidden states are",
    }

    @property
    def dim(self) -> int | None:
        """The dim of which a rank uses its part; None if the style is no `split(DIM)`."""
        return int(self._argument) if self._argument else None


class SequenceRule(Rule):
    """Where hidden states are split along the sequence (with sequence parallelism)."""

    section: ClassVar[str] = "sequence"
    styles: ClassVar[Mapping[str, str]] = {
        "sequence": "list of layers that work on parts of the sequence, which is gathered after the last",
        "whole_sequence": "module in such layers that is given the full sequence and computes alike on every rank",
    }


@functools.cache
def _pattern(style: str) -> re.Pattern[str]:
    """Returns the regular expression of a style's text, with any argument."""
    name, bracket, argument = style.partition("(")
    return re.compile(re.escape(name) + (_ARGUMENTS[bracket + argument] if bracket else ""))


SECTIONS: tuple[type[Rule], ...] = (ParameterRule, RegionRule, AttributeRule, SequenceRule, InputRule)
"""The kinds of rules, in the order in which a plan has them."""

STYLES: dict[str, Mapping[str, str]] = {kind.section: kind.styles for kind in SECTIONS}
"""Every style with its meaning, by section."""
