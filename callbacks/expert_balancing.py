"""ExpertBalancing, a callback that logs how a router uses its experts, and moves its bias toward an even load."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import is_logged, log_to_all
from leyden.core.checks import check_flags
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers that a router adds to its scores to choose experts: those of transformers and of torchtitan."""
ROUTERS = ("router", "gate")


class ExpertBalancing(Callback):
    """Counts the tokens of each expert in training, and with a rate balances them by biases, without a loss.

    At the end of each accumulation window, the bias of every expert with more tokens than the mean is lowered by
    `rate`, and that of every expert with fewer is raised (Wang et al., 2024, arXiv:2408.15664, and DeepSeek-V3). The
    router adds its bias to the scores by which it chooses experts, not to the weights of their outputs. The bias is a
    float32 buffer named `e_score_correction_bias`, as in `transformers`, or `expert_bias`. It is equal on all ranks and
    part of every checkpoint. It also moves if a gradient scaler skips the step, whose routing took place.

    Counts are those of the window's batches on all ranks. Padding counts; recomputed activations, evaluation and ranks
    without a sample do not. At the steps that the Trainer logs, they are logged for each module of experts:

    - `experts/<name>/max` and `/min`, the largest and the smallest load. A load is an expert's fraction of the
      (token, expert) pairs; 1 / experts is balance.
    - `experts/<name>/violation`, how far the largest load is above balance: max · experts - 1.
    - `experts/<name>/entropy`, the mean entropy of the softmax of the router's logits, in nats, if a module `router` or
      `gate` next to the experts returns them, alone or first.

    Args:
        rate: the step of the biases, such as 0.001. 0 only counts.
        experts: the last part of the names of the modules of experts, which are called with hidden states, the experts
            of each token and their weights.
        per_expert: also log each expert's load, as `experts/<name>/0` and so on.

    Attributes:
        counts: the tokens of each expert in the window last logged, by the name of the module of experts.

    Raises:
        ConfigurationError: for a negative rate; at the start of fit, if there is no such module, or with a rate no such
            buffer; in the first window, if no call of a module was counted.

    Example:
        >>> callback = ExpertBalancing(rate=0.001)
        >>> # Trainer(strategy=MeshStrategy(ep=2), callbacks=[callback]).fit(module, loader)
        >>> callback.counts
        {}
    """

    state_per_rank = False
    changes_weights = True
    # Also called on a rank without a sample of the batch. Before digests and checkpoints of the weights.
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, rate: float = 0.0, experts: str = "experts", per_expert: bool = False) -> None:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate >= 0:
            raise ConfigurationError(f"ExpertBalancing(rate={rate!r}): give a number from 0, such as 0.001.")
        check_flags("ExpertBalancing", per_expert=per_expert)
        self.rate, self.experts, self.per_expert = rate, experts, per_expert
        self.counts: dict[str, list[int]] = {}
        self._layers: dict[str, _Layer] = {}
        self._hooks = ExitStack()
        """Removes the modules' hooks when closed."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        names = [name for name, _ in module.named_modules() if name.rpartition(".")[2] == self.experts]
        if not names:
            raise ConfigurationError(
                f"ExpertBalancing found no module named {self.experts!r}. Pass the last part of the names of your "
                "modules of experts: ExpertBalancing(experts=…)."
            )
        self._hooks.close()
        self.counts, self._layers = {}, {name: self._layer(trainer, module, name) for name in names}

    def _layer(self, trainer: Trainer, module: nn.Module, name: str) -> _Layer:
        experts, parent = module.get_submodule(name), module.get_submodule(name.rpartition(".")[0])
        found = [
            (owner, own) for owner in parent.modules() for own, _ in owner.named_buffers(recurse=False) if own in BIASES
        ]
        if self.rate and len(found) != 1:
            raise ConfigurationError(
                f"ExpertBalancing(rate={self.rate}) moves the bias of the router next to {name!r}, and there "
                f"{'are several' if found else 'is none'}: give the router a buffer of one number for each expert, "
                "self.register_buffer('expert_bias', torch.zeros(experts)), or set rate=0 to log only."
            )
        bias: Any = getattr(*found[0]) if len(found) == 1 else None
        if self.rate and bias.dtype.itemsize < 4:
            raise ConfigurationError(
                f"ExpertBalancing(rate={self.rate}): {found[0][1]!r} next to {name!r} is {bias.dtype}, which rounds "
                "such steps away. Use precision='bf16-mixed' or '16-mixed', whose buffers stay float32."
            )
        parameter: Any = next(experts.parameters(), bias)
        count = bias.numel() if bias is not None else getattr(parameter, "ds_shape", parameter.shape)[0]
        layer = _Layer(count, trainer.strategy, found[0] if len(found) == 1 else None)
        self._hooks.callback(experts.register_forward_pre_hook(layer.count, with_kwargs=True).remove)
        for own, router in parent.named_children():
            if own in ROUTERS:
                measure = functools.partial(self._measure, trainer, layer)
                self._hooks.callback(router.register_forward_hook(measure).remove)
        return layer

    def _measure(self, trainer: Trainer, layer: _Layer, router: nn.Module, args: Any, output: Any) -> None:
        if is_logged(trainer, trainer.global_step + 1):
            layer.measure(router, output)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.window_is_over:
            return
        shows = is_logged(trainer, trainer.global_step)
        if self.rate or shows:
            self._close(trainer, shows)
        for layer in self._layers.values():
            layer.clear()

    @torch.no_grad()
    def _close(self, trainer: Trainer, shows: bool) -> None:
        layers, reduce = self._layers, trainer.strategy.ranks.reduce
        for name, layer in layers.items():
            if layer.calls and not layer.counted:
                raise ConfigurationError(
                    f"ExpertBalancing: {name!r} ran in training_step without gradients, so that no token was counted. "
                    "If the model uses gradient checkpointing, set use_reentrant=False; a frozen module needs no "
                    "balancing."
                )
        device = trainer.strategy.root_device
        totals = reduce(torch.cat([layer.counts_on(device) for layer in layers.values()]), reduction="sum")
        # The ranks of a tp group count the same tokens.
        totals = totals // getattr(getattr(trainer.strategy, "layout", None), "tp", 1)
        sizes = [layer.experts for layer in layers.values()]
        if self.rate:
            for layer, counts in zip(layers.values(), torch.split(totals, sizes), strict=True):
                layer.move(counts, self.rate)
        if shows:
            measured = reduce(torch.stack([layer.measured_on(device) for layer in layers.values()]), reduction="sum")
            read = iter(totals.tolist())
            self.counts = {name: [next(read) for _ in range(layer.experts)] for name, layer in layers.items()}
            values = self._values(measured.tolist())
            trainer.logs.show(values)
            log_to_all(trainer, values, trainer.global_step)

    def _values(self, measured: list[list[float]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for (name, counts), (entropy, tokens) in zip(self.counts.items(), measured, strict=True):
            loads = [count / max(sum(counts), 1) for count in counts]
            prefix = f"experts/{name}"
            values |= {f"{prefix}/max": max(loads), f"{prefix}/min": min(loads)}
            values[f"{prefix}/violation"] = max(loads) * len(loads) - 1
            if tokens:
                values[f"{prefix}/entropy"] = entropy / tokens
            if self.per_expert:
                values |= {f"{prefix}/{number}": load for number, load in enumerate(loads)}
        return values

    def go_back(self, state: dict[str, Any], step: int) -> None:
        for layer in self._layers.values():
            layer.clear()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._hooks.close()
        self._layers = {}


@dataclass(slots=True)
class _Layer:
    """The counts of one module of experts within a window.

    Attributes:
        experts: the number of experts.
        strategy: tells whether a forward pass counts.
        bias: the module of the bias, and its name there; None if there is none.
        calls: the forward passes and recomputations in training.
        counted: those that counted.
        counts: the tokens of each expert; None before the first.
        measured: the sum of the entropies of the tokens, and the tokens.
    """

    experts: int
    strategy: Strategy
    bias: tuple[nn.Module, str] | None
    calls: int = 0
    counted: int = 0
    counts: Tensor | None = None
    measured: Tensor | None = None

    @property
    def _is_filled(self) -> bool:
        """True while a batch or a micro-batch runs that counts for nothing."""
        return self.strategy.is_filling or self.strategy.outputs.are_rehearsed

    def _is_counted(self, module: nn.Module) -> bool:
        # The last: not in a recomputation in backward.
        return module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def count(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or self._is_filled:
            return
        self.calls += 1
        if not self._is_counted(module):
            return
        self.counted += 1
        chosen = args[1] if len(args) > 1 else kwargs.get("top_k_index")
        if chosen is None:
            raise ConfigurationError(
                f"ExpertBalancing: {type(module).__name__} gets the experts of each token neither as its second "
                "argument nor by the name top_k_index. Write experts(hidden_states, top_k_index, top_k_weights)."
            )
        index = chosen.detach().flatten()
        if self.counts is None:
            self.counts = index.new_zeros(self.experts, dtype=torch.long)
        self.counts.index_add_(0, index.long(), torch.ones_like(index, dtype=torch.long))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def measure(self, module: nn.Module, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        if self._is_filled or not self._is_counted(module) or logits.shape[-1] != self.experts:
            return
        probabilities = logits.detach().float().flatten(0, -2).softmax(-1)
        entropy: Tensor = torch.special.entr(probabilities).sum()
        own = torch.stack([entropy, entropy.new_tensor(len(probabilities))])
        self.measured = own if self.measured is None else self.measured + own

    def counts_on(self, device: torch.device) -> Tensor:
        return torch.zeros(self.experts, dtype=torch.long, device=device) if self.counts is None else self.counts

    def measured_on(self, device: torch.device) -> Tensor:
        return torch.zeros(2, device=device) if self.measured is None else self.measured

    def move(self, counts: Tensor, rate: float) -> None:
        """Moves the bias by `rate`, against the sign of each expert's distance from the mean of the counts."""
        assert self.bias is not None
        bias = getattr(*self.bias)
        # In whole numbers, so that a load equal to the mean is found to be equal.
        bias.add_((counts.sum() - self.experts * counts).sign().to(bias.device, bias.dtype).view_as(bias), alpha=rate)

    def clear(self) -> None:
        self.counts = self.measured = None
