"""Result of `shardwise.verify`, as a value and as a table."""

from dataclasses import dataclass

from shardwise.errors import VerificationError, counted
from shardwise.plan.explain import table
from shardwise.proof.parity import Difference, Measurement

_LABELS = {
    "loss": "loss",
    "logits": "logits",
    "gradient": "worst gradient",
    "parameter": "parameters, 3 steps",
    "in_training": "padding",
    "narrow": "in {}",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of proving a split; `str` is the table.

    Attributes:
        subject: the model.
        layout: its layout.
        measurements: one per rank.
        seconds: duration of the proof.
        not_given: image, video and sound arguments that the model takes and did not receive.
        without_dropout: reason why nothing was dropped, if so.
    """

    subject: str
    layout: str
    measurements: tuple[Measurement, ...]
    seconds: float
    not_given: tuple[str, ...] = ()
    without_dropout: str = "nothing draws random numbers"

    @property
    def passed(self) -> bool:
        """Whether every rank computes the same as the unsplit model."""
        return all(found.passed for found in self.measurements)

    @property
    def share_split(self) -> float:
        """Share of all bytes that belong to split parameters."""
        return self.measurements[0].share_split

    def raise_if_failed(self) -> None:
        """Raises `VerificationError` with the table unless the proof passed."""
        if not self.passed:
            raise VerificationError(
                f"{self.subject} over {self.layout} does not compute what the unsplit model does", why=str(self)
            )

    def __str__(self) -> str:
        rows = [("", "largest difference", "allowed", "verdict", "where")]
        for name in _LABELS:
            found = [getattr(each, name) for each in self.measurements]
            if found[0] is None:
                rows += [("padding", "not tried", "", "", "it cannot be trained on it")] * (name == "in_training")
                continue
            rows.append(_row(name, found))
            if name == "in_training" and not found[0].num_draws:
                rows.append(("dropout", "not tried", "", "", self.without_dropout))
        unequal = sorted({name for found in self.measurements for name in found.unequal_replicas})
        differing = f"{len(unequal)} unequal after {counted(self.measurements[0].num_steps, 'step')}"
        rows.append(("replicas", differing, "0", _verdict(not unequal), ", ".join(unequal)))
        verdict = "equal to the unsplit model" if self.passed else "NOT equal to the unsplit model"
        if self.not_given:
            verdict += f", without {' and '.join(self.not_given)}, which it was not given"
        return "\n".join(
            [
                f"{self.subject} over {self.layout}: {verdict}",
                "",
                *table(rows, has_rule=False),
                "",
                f"{self.share_split:.1%} of the tiny model's parameters are split; proved in {self.seconds:.1f} s",
            ]
        )


def _row(name: str, found: list[Difference]) -> tuple[str, str, str, str, str]:
    worst = max(found, key=lambda each: each.error / each.allowed if each.error == each.error else float("inf"))
    where = "of all gradients, relative to their norm" if name == "narrow" else worst.name
    label = _LABELS[name].format(worst.name)
    if not worst.num_compared:
        return label, "not compared", "", "", "neither model returns any"
    if worst.num_draws:
        label, where = f"{label}, dropout", f"{where} ({counted(worst.num_draws, 'draw')} alike)".lstrip()
    return label, f"{worst.error:.1e}", f"{worst.allowed:.1e}", _verdict(worst.passed), where


def _verdict(passed: object) -> str:
    return "ok" if passed else "FAILED"
