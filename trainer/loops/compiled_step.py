"""The step of `compile="step"`: forward, gradients, clipping and optimizers in one graph of torch.compile."""

from __future__ import annotations

import inspect
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_flatten

from leyden.callbacks.base import Callback
from leyden.core.errors import ConfigurationError
from leyden.core.tree import map_tensors
from leyden.strategies.base import not_zero
from leyden.strategies.master_weights import parameters_of
from leyden.strategies.window import read_loss
from leyden.trainer.engine.engine import needs_closure
from leyden.trainer.engine.prepared import clear_gradients
from leyden.trainer.events.hooks import overrides
from leyden.trainer.loops.batches import takes_iterator
from leyden.trainer.loops.step import AutomaticStep
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

    from leyden.trainer.loops.schedulers import Schedulers
    from leyden.trainer.run import Run

OUTSIDE = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks between parts of the graph."""
REPLACED = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
"""Methods that replace a part of the graph."""
INSTEAD = "Leave compile out, and pass torch.compile(module) to fit, which compiles the module's steps alone"

IDENTITIES = ("MODULE_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "ID_MATCH")
"""Guards that a module, class or function is the same object."""
FORMS = ("TYPE_MATCH", "TENSOR_MATCH", "DICT_KEYS_MATCH", "DICT_CONTAINS", "NOT_PRESENT_IN_GENERIC_DICT")
"""Guards on types, dtypes, shapes and keys."""
STATE = re.compile(r"optimizers\[\d+\]\.state\.by_id(\[[^][]+\])*")
"""Dynamo's names of the entries in an optimizer's state, but for what is in objects of other classes."""
LIBRARY_GLOBALS = ("G['torch']", "G['__import_torch_dot_", "G['__import_leyden_dot_", "G['__builtins_dict__")
"""How dynamo's names of torch's, Leyden's and Python's own globals start."""

LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""The folders of code that is not the user's."""


def check_compiled(run: Run, accumulates: bool) -> None:
    """Rejects, before training, what needs the gradients between two parts of the step, or steps otherwise.

    Raises:
        ConfigurationError: names the part that does not work with `compile="step"`, and the fix.
    """
    module = run.module
    refusal = None
    if not module.automatic_optimization:
        refusal = "manual optimization"
    elif accumulates:
        refusal = "accumulation over several batches (use larger batches)"
    elif takes_iterator(module.training_step):
        refusal = "training_step(dataloader_iter)"
    elif closures := [type(optimizer).__name__ for optimizer in run.engine.optimizers if needs_closure(optimizer)]:
        refusal = f"{closures[0]}, which evaluates the loss several times per step"
    elif any(group.get("fused") for optimizer in run.engine.optimizers for group in optimizer.param_groups):
        refusal = "an optimizer with fused=True (leave it out: the graph fuses the update itself)"
    elif any(getattr(config.scheduler, "cycle_momentum", False) for config in run.schedulers):
        refusal = "a scheduler that changes momentum, for which torch compiles each step: give it cycle_momentum=False"
    else:
        refusal = next(_hooks_between(run), None)
    if refusal is not None:
        raise ConfigurationError(f"compile='step' does not work with {refusal}. {INSTEAD}.")


def _hooks_between(run: Run) -> Iterator[str]:
    """Yields the overridden methods that would run inside the graph."""
    for name in REPLACED:
        if overrides(run.module, name, TrainModule):
            yield f"{type(run.module).__name__}.{name}, which replaces a part of the graph"
    for owner, base in ((run.module, TrainModule), *((callback, Callback) for callback in run.callbacks)):
        for name in OUTSIDE:
            if overrides(owner, name, base):
                yield f"{type(owner).__name__}.{name}, which would run inside the graph"


class CompiledStep(AutomaticStep):
    """Runs a training step as one compiled graph, without gradients in memory between its parts.

    The gradients are those of `torch.autograd.grad`, since torch.compile cannot trace `backward()` with the rest. They
    exist within the graph only: after a step, `p.grad` is None.

    Args:
        run: the run of the fit. Its `arguments.compile` has the arguments of `torch.compile`.
        training_step: the user's `training_step`.
        schedulers: the run's schedulers.
    """

    def __init__(self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers) -> None:
        super().__init__(run, training_step, schedulers, accumulates=False)
        assert run.traced is not None
        self.fit = run  # `run` is a method.
        self.rates, self.traced = Rates(self.optimizers), list(map(traceable, self.optimizers))
        arguments = _options(run.arguments.compile, self._kept_guards)
        step = run.traced.around(torch.compile(self._traceable(), fullgraph=True, **arguments))
        self.compiled = step if run.profiler is None else run.profiler.wrap("training_step", step)

    def _traceable(self) -> Callable[..., Any]:
        """Returns the whole step as a function that torch.compile can trace."""
        training_step, context = self.training_step, self.strategy.precision.forward_context
        clip, clip_value = self.strategy.clip_parameters, self.clip_value
        clip_algorithm: Any = self.clip_algorithm
        optimizers = self.traced

        def step(batch: Any, *extra: Any) -> Any:
            if context is None:
                outputs = training_step(batch, *extra)
            else:
                with context():
                    outputs = training_step(batch, *extra)
            loss, num_items = read_loss(outputs)
            if num_items is not None:
                loss = loss / not_zero(num_items)
            trained = [p for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad]
            for parameter, grad in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                parameter.grad = grad
            with torch.no_grad():
                for optimizer in optimizers:
                    if clip_value is not None:
                        clip(parameters_of(optimizer), clip_value, clip_algorithm)
                    # The class's method, since schedulers wrap that of the instance.
                    type(optimizer).step(optimizer)
            for parameter in trained:
                parameter.grad = None
            return map_tensors(outputs, Tensor.detach)

        # torch.compile counts recompilations by code object, and each fit compiles a step of its own.
        step.__code__ = step.__code__.replace()
        return step

    def _kept_guards(self, guards: Sequence[GuardFilterEntry]) -> list[bool]:
        """Chooses the guards of a graph, which is new: its first step may add to the states."""
        for optimizer in self.traced:
            optimizer.state.unsettle()
        return kept_guards(guards)

    def begin(self) -> None:
        for optimizer in self.optimizers:
            hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
            if hooks:
                raise ConfigurationError(
                    f"compile='step' does not call the hooks that are registered with {type(optimizer).__name__}. "
                    f"{INSTEAD}."
                )
            make_state(optimizer)
            # For the schedulers, which warn if they step first.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        clear_gradients(self.optimizers)

    def run(self, batch: Any, batch_idx: int) -> Any:
        extra = (batch_idx,) if self.takes_index else ()
        # The graph calls no hook of an optimizer, such as that of an asynchronous save.
        self.fit.saves.before_step()
        for optimizer, traced in zip(self.optimizers, self.traced, strict=True):
            # A rollback replaces groups and states.
            traced.param_groups = optimizer.param_groups
            traced.state.refresh()
        self.hooks.current = "training_step"
        with self.rates:
            try:
                outputs = self.compiled(batch, *extra)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self._explain(error, batch, extra)
                raise
        for traced in self.traced:
            if not traced.state.is_settled:
                traced.state.settle()
        self.hooks.current = ""
        self.has_stepped = True
        self.progress.count_window(stepped=True)
        if self.schedulers.configs:
            self.schedulers.step("step", self.progress.stepped)
        return outputs

    def _explain(self, error: Exception, batch: Any, extra: tuple[Any, ...]) -> None:
        """Raises a readable error for one of torch.compile: the step's own error, or where the graph breaks and a fix.

        Other errors of torch.compile, such as those of its compilers, stay as they are.
        """
        if isinstance(error, FailOnRecompileLimitHit):
            raise ConfigurationError(
                "compile='step' compiled the step again and again, because a value that it reads keeps changing: "
                "torch's warning above names it as the last reason. Make the value a tensor, or pad batches to a few "
                f"sizes. {INSTEAD}."
            ) from error
        with self.fit.logs.discarding():
            # An error of the step itself is easier to read without torch.compile.
            read_loss(self.strategy.forward(self.training_step, batch, extra))
        frames = getattr(error, "real_stack", None)
        if frames:
            own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
            frame = (own or frames)[-1]
            what = str(error).strip().splitlines()[0]
            raise ConfigurationError(
                f"compile='step' makes one graph of the whole step, and torch.compile cannot trace {frame.filename}, "
                f"line {frame.lineno}, {frame.line!r}: {what}. Move that line to a hook, such as on_train_batch_end, "
                f"or use another optimizer if it is the optimizer's. {INSTEAD}."
            ) from error


class Rates:
    """Makes the learning rates tensors while a step runs: torch.compile would compile again for each new number.

    Outside of steps they are numbers, for schedulers, callbacks and checkpoints.

    Args:
        optimizers: the optimizers of the step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        # In float64, so that nothing is rounded before a number would be.
        self._tensors: list[Tensor] = []
        self._numbers: list[float] = []
        self._groups: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        tensors, numbers, groups = self._tensors, self._numbers, self._groups
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rate, place = group.get("lr"), len(groups)
                if not isinstance(rate, (int, float)):
                    continue
                if place == len(tensors):
                    tensors.append(torch.tensor(rate, dtype=torch.float64))
                    numbers.append(rate)
                elif numbers[place] != rate:
                    tensors[place].fill_(rate)
                    numbers[place] = rate
                group["lr"] = tensors[place]
                groups.append(group)

    def __exit__(self, *error: object) -> None:
        for group, number in zip(self._groups, self._numbers, strict=False):
            group["lr"] = number
        self._groups.clear()


class States:
    """The state of an optimizer, by the ids of its parameters.

    The graph reads each entry in each step. A dict with tensors as keys would be listed for each of them.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.by_id: dict[int, Any] = {}
        self.form = ""
        """A name for the entries' types, shapes and dtypes. The graph checks it in place of each entry's."""
        self.is_settled = False
        """True once a step has left the form as it was: further steps of its graph do, too."""
        self._forms: list[Any] = []
        self._read()

    def refresh(self) -> None:
        """Follows entries that were added or replaced since the last step."""
        states, known = self._optimizer.state, self.by_id
        if len(states) != len(known) or not all(map(operator.is_, states.values(), known.values())):
            self._read()
            self.is_settled = False

    def unsettle(self) -> None:
        """Expects that the next step adds entries or changes their form."""
        self.is_settled = False

    def settle(self) -> None:
        """Follows what a step has changed."""
        form = self.form
        self._read()
        self.is_settled = self.form == form

    def _read(self) -> None:
        self.by_id = {id(parameter): state for parameter, state in self._optimizer.state.items()}
        leaves, tree = tree_flatten(self.by_id)
        form = (tree, list(map(_form, leaves)))
        if form not in self._forms:
            self._forms.append(form)
        # torch.compile makes numbers that change symbols of a graph, and checks that text is equal.
        self.form = f"form {self._forms.index(form)}"

    def __getitem__(self, parameter: Tensor) -> Any:
        place = id(parameter)
        return self.by_id[place] if self.form and place in self.by_id else self._optimizer.state[parameter]


def _form(entry: Any) -> Any:
    """Returns what torch.compile builds a graph on, of an entry of an optimizer's state."""
    if not isinstance(entry, Tensor):
        return type(entry)
    return type(entry), entry.dtype, entry.shape, entry.stride(), entry.device, entry.requires_grad


def traceable(optimizer: Optimizer) -> Any:
    """Returns an object with the optimizer's groups, state and methods, which torch.compile traces like any other code.

    Of an optimizer itself, it reads gradients from before the step, and its `step` breaks the graph.
    """
    methods: dict[str, Any] = {}
    for kind in reversed(type(optimizer).__mro__[:-1]):
        own = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
        methods |= {name: inspect.unwrap(value) if inspect.isfunction(value) else value for name, value in own.items()}
    traced = type(type(optimizer).__name__, (), methods)()
    vars(traced).update(vars(optimizer), state=States(optimizer))
    return traced


def make_state(optimizer: Optimizer) -> None:
    """Creates the state that torch's optimizers create in their first step, which would be compiled for itself.

    Step counts become float64: the graph computes bias corrections from them, an ordinary step from Python's numbers.
    """
    creates = type(optimizer).__module__.startswith("torch.optim.") and hasattr(optimizer, "_init_group")
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        if isinstance(optimizer, SGD):
            if group["momentum"] and not group["dampening"]:
                for parameter in trained:
                    # Bit for bit a first step: 0 * momentum + grad.
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.detach()))
        elif creates:
            for parameter in trained:
                # Of the gradient's shape and dtype, without memory of its own.
                parameter.grad = parameter.detach()
            lists = len(inspect.signature(optimizer._init_group).parameters) - 1  # type: ignore[attr-defined]
            optimizer._init_group(group, *([] for _ in range(lists)))  # type: ignore[attr-defined]
            for parameter in trained:
                parameter.grad = None
        for parameter in trained:
            count = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(count, Tensor):
                optimizer.state[parameter]["step"] = count.double()


def _options(given: Mapping[str, Any], keeps: Callable[[Sequence[GuardFilterEntry]], list[bool]]) -> dict[str, Any]:
    """Returns the arguments of torch.compile, with a filter of guards, and for inductor with `ExplicitAlpha`."""
    options = {"guard_filter_fn": keeps, **(given.get("options") or {})}
    if given.get("backend", "inductor") != "inductor":
        return {**given, "options": options}
    arguments = {name: value for name, value in given.items() if name != "mode"}
    modes = {} if given.get("mode") is None else list_mode_options(given["mode"])
    return {**arguments, "options": {**modes, **options, "post_grad_custom_pre_pass": ExplicitAlpha()}}


def kept_guards(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Returns which guards each step checks.

    Those on the identity of torch's and Leyden's own code are left out: they would take 10 to 20 µs of every step, and
    only a monkeypatch of torch during the fit could make one fail. So are those on the form of an optimizer's state
    (4 µs for each parameter under AdamW), for which `States.form` stands. It does not see a callback that puts a tensor
    of another dtype into an entry that exists.
    """

    def is_needed(guard: GuardFilterEntry) -> bool:
        if guard.guard_type in IDENTITIES:
            return not guard.name.startswith(LIBRARY_GLOBALS)
        return guard.guard_type not in FORMS or STATE.fullmatch(guard.name) is None

    return list(map(is_needed, guards))


class ExplicitAlpha(CustomGraphPass):
    """Turns `add(x, y, alpha=a)` into `add(x, a * y)`.

    Inductor fuses `add(mm(x, y), z, alpha=a)` to `addmm(z, x, y)`, which drops `a` (torch 2.13). Weight decay on the
    gradient of a linear layer has this form once both are in one graph.
    """

    def __call__(self, graph: fx.Graph) -> None:
        add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
        for node in graph.find_nodes(op="call_function", target=add):
            alpha, other = node.kwargs.get("alpha", 1), node.args[1]
            if isinstance(other, fx.Node) and (isinstance(alpha, fx.Node) or alpha != 1):
                with graph.inserting_before(node):
                    scaled = graph.call_function(mul, (other, alpha))
                factor = alpha.meta["val"] if isinstance(alpha, fx.Node) else alpha
                scaled.meta["val"] = other.meta["val"] * factor
                node.args, node.kwargs = (node.args[0], scaled), {}

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
