"""State of a split model's gradients, and the phase that completes them.

# [Note: one gradient phase]
Hooks on parameters fire too early under gradient accumulation and never under some pipeline schedules. So our sums do
not run during backward. FSDP2 reduces over the data axes as soon as a unit is done; the sum over tp may come
afterwards, on the smaller shards. When a backward ends, one collective sums all partial gradients together, and one
more each group of gradients of replicated key/value heads. `TrainStep` delays this until its last microbatch. So
`p.grad` is complete whenever a backward has returned, and readers such as torch's own optimizers need no call of ours.
Before more is added to a complete gradient, it is scaled back to partial on the ranks that summed it, so that the next
sum restores it.

In a pipeline a backward returns on one rank while others have not started theirs, and each rank runs many. There the
phase runs at the end of `no_sync`, which every rank enters. A weight that several stages hold is summed over them last.
"""

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from shardwise.errors import LayoutError, UnsupportedError
from shardwise.optim.summing import complete_gradients, scale_back_to_partial, time_reduction
from shardwise.parameters.assigned import adopt_parameters, note_inputs
from shardwise.parameters.local_gradient import as_local_gradient
from shardwise.parameters.registry import (
    DataHandling,
    ParameterEntry,
    Registry,
    entry_of,
    find_parameters,
    forget_unreduced,
    mark,
    registry_of,
)
from shardwise.runtime.modes import refuse_wrapped


class HostCopy:
    """A tensor that is copied to the host asynchronously.

    Args:
        value: tensor of any shape, as it is at this point of the device's queue.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._host = value.detach().to("cpu", copy=True)
            return
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> Any:
        """Returns the numbers as Python values; waits only for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy().tolist()


_ATTRIBUTE = "_shardwise_gradients"
PIPELINED: "weakref.WeakSet[Gradients]" = weakref.WeakSet()
"""Those of this process's models in stages, of which a stage may have none of the parameters that a call is about."""
_WATCHED = "_shardwise_watched"


class LossScale:
    """Dynamic loss scale for float16, on the device, like torch's GradScaler: halved after an overflow, doubled after
    `interval` steps without one.

    Attributes:
        factor: float32 scalar, a power of two.
        good_steps: int32 scalar, steps without overflow since the last change.
    """

    def __init__(self, device: torch.device, *, value: float = 2.0**16, interval: int = 2000) -> None:
        self.factor = torch.full((), value, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._interval = interval

    def update(self, is_bad: Tensor) -> None:
        """Updates the scale after a step. `is_bad`: float32 scalar, 1 if gradients were infinite or NaN."""
        torch._amp_update_scale_(self.factor, self.good_steps, is_bad.to(self.factor.device), 2.0, 0.5, self._interval)

    def state_dict(self) -> dict[str, float]:
        """Returns the state for checkpoints. Waits for the device."""
        return {"value": self.factor.item(), "good_steps": int(self.good_steps)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores the result of `state_dict`."""
        self.factor.fill_(state["value"])
        self.good_steps.fill_(state["good_steps"])


class Gradients:
    """State of a split model's gradients between backwards.

    Args:
        model: the split model, or its outermost known wrapper.

    Attributes:
        norm: norm of the current gradients, if it has been computed.
        is_bad: float32 scalar, 1 if any rank's gradients are infinite or NaN; None if not checked.
        is_late: whether steps continue before the host knows whether gradients are finite (not on CPUs).
        fault: float32 scalar, 1 from the first step on that should raise; None if none was checked.
        pending_fault: `fault` on its way to the host.
        is_partial: whether gradients must be summed over ranks before use.
        is_deferred: whether sums wait for a later backward.
        is_in_step: whether `no_sync` is active.
        share: factor of the loss in the next forward through a pipeline, which computes gradients at once.
    """

    def __init__(self, model: nn.Module, registry: Registry) -> None:
        self.model = model
        self.registry = registry
        self.norm: Tensor | None = None
        self.is_bad: Tensor | None = None
        self.loss: Tensor | None = None
        self.is_late = registry.mesh.device.type != "cpu"
        self.fault: Tensor | None = None
        self.pending_fault: HostCopy | None = None
        precision = registry.precision
        is_scaled = precision is not None and precision.compute == "float16"
        self.loss_scale = LossScale(registry.mesh.device) if is_scaled else None
        self.is_partial = self.is_deferred = self.is_in_step = False
        self.share = 1.0
        self._at_rest: dict[int, nn.Parameter] = {}
        self._task = -1
        if self._is_pipeline:
            PIPELINED.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Gradients":
        # A copied model starts without gradients; a copied part of a model has none of its own.
        root = memo.get(id(self.registry.model()))
        if root is None:
            return self
        copied = memo[id(self)] = Gradients(memo.get(id(self.model), root), copy.deepcopy(self.registry, memo))
        for _, parameter, entry in find_parameters(self.model):
            if entry is not None:
                mark(copy.deepcopy(parameter, memo), copy.deepcopy(entry, memo))
        return copied

    def watch(self) -> None:
        """Makes every backward through the model, or a part of it, complete its gradients. Not for pipelines."""
        if self._is_pipeline:
            return
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel) or module is self.registry.model():
                module.register_forward_hook(self._watch_output)
        self._find_summed()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: gradients of several backwards are summed once, at the end. In a pipeline all ranks enter.

        Communicates: what `complete` does.
        """
        self.is_deferred = self.is_in_step = True
        if self._is_pipeline:
            if self.registry.casting is not None:
                self.registry.casting.shared = {}
            if not self.is_partial:
                self._make_partial()
        try:
            yield
        except BaseException:  # what the step was to sum is no part of the next one
            forget_unreduced(self.model)
            time_reduction(self.registry, is_last=True)
            raise
        finally:
            self.is_deferred = self.is_in_step = False
            if self.registry.casting is not None:
                self.registry.casting.shared = None
        self.complete()

    def complete(self) -> None:
        """Sums the gradients that are still partial: of replicated parameters inside regions, of shared heads, of
        parameters outside of FSDP2, and of parameters of several stages.

        Does nothing if none is partial. Every rank of the mesh must call it.

        Communicates: over tp, one all-reduce of all partial gradients of a dtype together, and one per group of ranks
        that share key/value heads; over the data axes, one all-reduce of the gradients that FSDP2 has not reduced and
        of the record of used parameters (see [Note: parameters that no rank used]); over each group of stages that
        share parameters, one.
        """
        self.sync_if_partial()
        shape = self.registry.mesh.shape
        if self.registry.needs_sums or shape.world_size > shape.size("ddp"):
            for _, parameter, entry in find_parameters(self.model):
                if parameter.grad is not None and entry is not None and entry_of(parameter.grad) is not entry:
                    parameter.grad = as_local_gradient(parameter.grad, entry)

    def sync_if_partial(self) -> None:
        """Calls `complete` if needed, but leaves `p.grad` a plain tensor, for a caller that only reads values."""
        if not self.is_partial:
            return
        self.is_partial = False
        complete_gradients(self._find_summed(), self.registry)

    def note_trained(self, ranks: Sequence[Sequence[int]]) -> None:
        """Records which stages train anything, for the step that begins. Code that asks all ranks for gradients would
        wait for the others in vain.

        Args:
            ranks: for every pp and tp rank, whether it trains anything, and its pp coord.
        """
        trained = {stage for is_trained, stage in ranks if is_trained}
        self.registry.idle_stages = tuple(sorted({stage for _, stage in ranks} - trained))

    def note_change(self) -> None:
        """Forgets what is known of the gradients' values, after they were changed without a backward."""
        self.norm = self.is_bad = None

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(self._begin)

    def _begin(self, gradient: Tensor) -> None:
        """Runs when a backward reaches the model, possibly several times."""
        task = torch._C._current_graph_task_id()
        if task == self._task or (self.is_deferred and self.is_partial):
            return
        self._task = task
        if torch.is_grad_enabled() and self.registry.mesh.shape.world_size > 1:
            raise UnsupportedError(
                "a backward with create_graph=True",
                why="what sums gradients over ranks has no derivative",
                fix="leave it out: second derivatives are the unsplit model's",
            )
        self._make_partial()
        if not self.is_deferred:
            # Twice: what FSDP2 does at the end of backward must come first.
            Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(self.complete))

    def _make_partial(self) -> None:
        """Scales complete gradients back to partial, before more is added to them."""
        self.norm = self.is_bad = None
        summed = self._find_summed()
        for parameter, entry in summed if not self.is_partial else ():
            scale_back_to_partial(parameter, entry)
        self.is_partial = True

    @property
    def _is_pipeline(self) -> bool:
        return self.registry.plan.pipeline is not None

    def adopt_added(self) -> None:
        """Registers trained parameters that were added later."""
        if any(entry is None and parameter.requires_grad for _, parameter, entry in find_parameters(self.model)):
            adopt_parameters(self.model)

    def _find_summed(self) -> list[tuple[nn.Parameter, ParameterEntry]]:
        """Returns the parameters, as stored between steps, whose gradients are summed. Adds a hook to each."""
        summed = []
        self.adopt_added()
        for _, parameter, entry in find_parameters(self.model):
            if entry is None or not entry.needs_sum:
                continue
            is_gathered = entry.data is DataHandling.FSDP and not isinstance(parameter, DTensor)
            at_rest = self._at_rest.setdefault(id(entry), parameter) if is_gathered else parameter
            if at_rest.requires_grad or len(entry.stage_coords) > 1:
                self._at_rest[id(entry)] = at_rest
                self._watch_parameter(at_rest, entry)
                summed.append((at_rest, entry))
        return summed

    def _watch_parameter(self, parameter: nn.Parameter, entry: ParameterEntry) -> None:
        if hasattr(parameter, _WATCHED) or parameter.is_meta or self._is_pipeline:
            return
        setattr(parameter, _WATCHED, True)

        def arrive(gradient: Tensor) -> None:
            _check_accumulated(parameter, entry)
            self._begin(gradient)

        parameter.register_hook(arrive)


def _check_accumulated(parameter: nn.Parameter, entry: ParameterEntry) -> None:
    """Raises if `torch.autograd.grad` would return the parameter's gradient before ranks have summed it."""
    try:
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # torch's answer for a leaf whose gradient is handed out
        raise UnsupportedError(
            f"torch.autograd.grad of {entry.fqn}",
            why="each rank holds a partial gradient, and these are not summed yet",
            fix="call backward(), after which parameter.grad is complete",
        ) from None


def track_gradients(model: nn.Module, registry: Registry) -> Gradients:
    """Makes gradients of a split model complete whenever a backward has returned.

    Communicates: nothing; `Gradients.complete` lists the communication of later backwards.
    """
    note_inputs(model, registry.plan)
    gradients = model.__dict__[_ATTRIBUTE] = Gradients(model, registry)
    gradients.watch()
    return gradients


def gradients_of(model: nn.Module) -> Gradients:
    """Returns the state of a split model's gradients. A wrapper may be passed; then its parameters belong to it too."""
    root = registry_of(model).model()
    gradients: Gradients | None = root.__dict__.get(_ATTRIBUTE) if root is not None else None
    if gradients is None:
        raise LayoutError(f"the gradients of this {type(model).__name__} are not tracked")
    if model is not root:
        refuse_wrapped(model)
    if gradients.model is not model and any(module is gradients.model for module in model.modules()):
        gradients.model = model
    return gradients
