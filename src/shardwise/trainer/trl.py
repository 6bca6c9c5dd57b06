"""TRL's fused head on a split model.

TRL's trainers call `model(..., labels=labels, fused_lm_head=True)` and get per-token log-probabilities instead of
logits. TRL multiplies by `lm_head.weight` itself, of which a rank of a split model holds a part. `fuse_head` gives the
model a forward with the same answer, in which the head module computes (see `shardwise.loss.scores`).
"""

import dataclasses
import functools
import inspect
import types
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from shardwise.errors import UnsupportedError
from shardwise.loss.scores import HeadFormula, Scores, Scoring
from shardwise.parameters.registry import entries_of, registry_of
from shardwise.runtime.adapter_facts import find_model, is_adapter
from shardwise.runtime.context import Axis
from shardwise.runtime.reading import run_reading

_OPTIONS = ("temperature", "cast_lm_head_to_fp32", "outputs")
_FIELDS = ("loss", *Scores._fields, "label_mask", "aux_loss")


def check_trl() -> None:
    """Raises `UnsupportedError` if TRL's fused head takes or returns something else than the one here."""
    known: dict[Any, tuple[str, ...]] = {add_fused_lm_head: ("model", *_OPTIONS), FusedCausalLMOutput: _FIELDS}
    for each, names in known.items():
        if (found := tuple(inspect.signature(each).parameters)) != names:
            raise UnsupportedError(
                f"trl.trainer.utils.{each.__name__} of the installed TRL",
                why=f"it has {', '.join(found)}; shardwise.trainer knows {', '.join(names)}",
                fix="use TRL 1.16, or a newer Shardwise",
            )


check_trl()


def fuse_head(
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,  # noqa: FBT001, FBT002 - TRL's signature
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Makes `model(..., labels=labels, fused_lm_head=True)` return what TRL's `add_fused_lm_head` makes it return.

    Calls without `fused_lm_head` run the model's own forward. A fused head that TRL has added is replaced.

    Args:
        model: split model, possibly inside PEFT's wrapper. It is changed in place.
        temperature: number by which logits are divided.
        cast_lm_head_to_fp32: whether the head multiplies in float32, outside of autocast.
        outputs: per-token fields of `FusedCausalLMOutput` that are computed. `log_probs` always is.

    Communicates: nothing. Each call communicates what the base model does, what `Scoring.score` does, and in backward
    one all-reduce of the hidden states' gradient over tp.
    """
    registry = registry_of(model)
    model = find_model(model)
    for linear in _linears_of(model, by_vocabulary=registry.plan.tensor.head is not None):
        _fuse_linear(linear)
    own = _unbound(model, _options_of_trl(model).get("original_forward") or model.forward)
    formula = dataclasses.replace(_formula_of(model.config), temperature=temperature, in_float32=cast_lm_head_to_fp32)

    @functools.wraps(type(model).forward)  # generate() reads the names of its arguments
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return own(self, *args, **kwargs)
        fused = _Fused(self, formula, outputs)
        if registry.stages is None:
            return run_reading(self, fused, args, kwargs)
        return run_reading(self, registry.stages.forward, (fused, args, kwargs), {})

    model.forward = types.MethodType(forward, model)


def replace_fused_head(model: nn.Module) -> None:
    """Replaces the fused head that TRL has added to a split model, with the options that TRL was given.

    Does nothing to a model to which TRL has added none, or whose fused head is replaced already.
    """
    options = _options_of_trl(find_model(model))
    if options:
        fuse_head(model, **{name: options[name] for name in _OPTIONS})


def is_fused(model: nn.Module) -> bool:
    """Returns whether TRL has added a fused head to the model."""
    return bool(_options_of_trl(find_model(model)))


def _options_of_trl(model: nn.Module) -> dict[str, Any]:
    """Returns the variables of TRL's fused forward of `model`: TRL's arguments, and the forward before."""
    function: Any = getattr(vars(model).get("forward"), "__func__", None)
    if function is None or function.__code__ not in add_fused_lm_head.__code__.co_consts:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _linears_of(model: Any, *, by_vocabulary: bool) -> list[nn.Linear]:
    """Returns the linears that may compute the logits: the head, or its trained copies (`modules_to_save`).

    Args:
        by_vocabulary: whether the plan splits the head over the vocabulary.
    """
    head = model.get_output_embeddings()
    modules = [] if head is None else list(head.modules())
    linears = [each for each in modules if isinstance(each, nn.Linear)]
    is_adapted = any(map(is_adapter, modules))
    is_split_otherwise = not by_vocabulary and any(entries_of(each)["weight"].split is not None for each in linears)
    if not linears or is_adapted or is_split_otherwise:
        raise UnsupportedError(
            f"a fused head of {type(model).__name__}, whose output embedding is {type(head).__name__}",
            why="log-probabilities are computed from the weight of a linear layer, whole or split over the vocabulary",
            fix="train the head with modules_to_save" if is_adapted else "leave the head to the plan",
        )
    return linears


def _formula_of(config: Any) -> HeadFormula:
    """Returns the scale and the cap of a model's logits, by the names under which configs have them."""
    text = config.get_text_config()
    values = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    scaling = getattr(text, "logits_scaling", None)
    if scaling is not None:
        values.append(scaling if text.model_type == "hyperclovax" else 1 / scaling)
    scale = next((value for value in values if value is not None), 1.0)
    return HeadFormula(scale=scale, softcap=getattr(text, "final_logit_softcapping", None))


def _fuse_linear(linear: nn.Linear) -> None:
    """Makes a head return scores where it is passed a `Scoring`, in place."""
    own = _unbound(linear, linear.forward)

    def forward(self: nn.Linear, hidden: Tensor, scoring: Scoring | None = None) -> Any:
        if scoring is None:
            return own(self, hidden)
        entry = entries_of(self)["weight"]
        axis = entry.registry.context.tp if entry.split is not None else Axis("tp")

        def score(hidden: Tensor) -> Scores:
            return scoring.score(hidden, self.weight, self.bias, axis=axis, num_classes=entry.layout.shape[0])

        return run_reading(self, score, (hidden,), {})

    linear.forward = types.MethodType(forward, linear)  # type: ignore[method-assign]


def _unbound(module: nn.Module, forward: Any) -> Any:
    """Returns a forward of `module` as a function of the module, so that copies of the module run their own."""
    if getattr(forward, "__self__", None) is module:
        return forward.__func__
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Fused:
    """The fused forward of `model`."""

    model: Any
    formula: HeadFormula
    outputs: tuple[str, ...]

    def __call__(
        self,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        score_gradients: tuple[Any, ...] | None = None,
        **kwargs: Any,
    ) -> FusedCausalLMOutput:
        model, text = self.model, self.model.config.get_text_config()
        kwargs["use_cache"] = False
        if getattr(text, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        backbone = model.base_model(*args, **kwargs)
        hidden = backbone.last_hidden_state
        if shift_labels is None:
            assert labels is not None
            hidden, target = hidden[:, :-1], labels[:, 1:]
        else:
            target = shift_labels
        mask = target != -100
        scoring = Scoring(target=target[mask], formula=self.formula, fields=self.outputs)
        scores = Scores(*model.get_output_embeddings()(hidden[mask], scoring))
        # Rows without targets stay in the graph, so that every rank's backward reaches the model.
        tokens = [None if each is None else each.new_zeros(mask.shape).masked_scatter(mask, each) for each in scores]
        log_probs = cast(Tensor, tokens[0])
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            aux_loss = load_balancing_loss_func(
                backbone.router_logits, text.num_experts, text.num_experts_per_tok, kwargs.get("attention_mask")
            )
            loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * aux_loss
        if score_gradients is not None:  # of `StagedScores`
            found = zip((*tokens[:2], aux_loss), score_gradients, strict=True)
            loss = torch.stack([(value * each).sum() for value, each in found if value is not None]).sum()
        fields = dict(zip(Scores._fields, tokens, strict=True))
        return FusedCausalLMOutput(loss=loss, **fields, label_mask=mask, aux_loss=aux_loss)
