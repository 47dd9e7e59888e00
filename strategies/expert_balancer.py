"""Counts the tokens of a mixture's experts over all ranks, and balances the experts by biases of their router."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers that a router adds to its scores to choose experts: those of transformers and of torchtitan."""
ROUTERS = ("router", "gate")


def check_rate(owner: str, rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate >= 0:
        raise ConfigurationError(f"{owner}(rate={rate!r}): give a number from 0, such as 0.001.")


class ExpertBalancer:
    """Counts the tokens of each expert, and balances the experts by biases; for a loop of your own.

    The callback `ExpertBalancing`, which does this under a Trainer, documents what counts and how a bias moves.

    Args:
        model: the prepared model.
        strategy: the run's strategy, `accelerator.strategy`.
        rate: the step of the biases, such as 0.001. 0 only counts.
        experts: the last part of the names of the modules of experts.
        measures_entropy: asked in each forward whether to measure the entropy of the routers' probabilities; None
            never measures it.

    Raises:
        ConfigurationError: for a negative rate; if there is no such module, or with a rate no bias next to it that is
            float32 or wider.

    Example:
        >>> class Layer(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.experts = Sum()
        ...         self.register_buffer("expert_bias", torch.zeros(2))
        ...     def forward(self, x, index):
        ...         return self.experts(x, index, torch.ones(len(x), 1))
        >>> class Sum(nn.Module):
        ...     def forward(self, x, index, weights):
        ...         return x * weights
        >>> from leyden import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> layer = accelerator.prepare(Layer())
        >>> balancer = ExpertBalancer(layer, accelerator.strategy, rate=0.5)
        >>> _ = layer(torch.ones(3, 1), torch.tensor([[0], [0], [1]]))
        >>> balancer.step()  # after optimizer.step(), if accelerator.sync_gradients
        {'experts': tensor([2, 1])}
        >>> layer.expert_bias
        tensor([-0.5000,  0.5000])
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        rate: float = 0.0,
        experts: str = "experts",
        measures_entropy: Callable[[], bool] | None = None,
    ) -> None:
        check_rate("ExpertBalancer", rate)
        self._strategy, self._rate, self._measures_entropy = strategy, rate, measures_entropy
        self._hooks = ExitStack()
        """Removes the modules' hooks when closed."""
        names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == experts]
        if not names:
            raise ConfigurationError(
                f"Expert balancing found no module named {experts!r}. Pass the last part of the names of your modules "
                "of experts: experts=…."
            )
        self._layers = {name: self._layer(model, name) for name in names}

    def _layer(self, model: nn.Module, name: str) -> _Layer:
        experts, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
        found = [
            (owner, own) for owner in parent.modules() for own, _ in owner.named_buffers(recurse=False) if own in BIASES
        ]
        if self._rate and len(found) != 1:
            raise ConfigurationError(
                f"Expert balancing with rate={self._rate} moves the bias of the router next to {name!r}, and there "
                f"{'are several' if found else 'is none'}: give the router a buffer of one number for each expert, "
                "self.register_buffer('expert_bias', torch.zeros(experts)), or set rate=0 to count only."
            )
        bias: Any = getattr(*found[0]) if len(found) == 1 else None
        if self._rate and bias.dtype.itemsize < 4:
            raise ConfigurationError(
                f"Expert balancing with rate={self._rate}: {found[0][1]!r} next to {name!r} is {bias.dtype}, which "
                "rounds such steps away. Use precision='bf16-mixed' or '16-mixed', whose buffers stay float32."
            )
        parameter: Any = next(experts.parameters(), bias)
        count = bias.numel() if bias is not None else getattr(parameter, "ds_shape", parameter.shape)[0]
        layer = _Layer(count, self._strategy, found[0] if len(found) == 1 else None)
        self._hooks.callback(experts.register_forward_pre_hook(layer.count, with_kwargs=True).remove)
        if self._measures_entropy is not None:
            for own, router in parent.named_children():
                if own in ROUTERS:
                    measure = functools.partial(self._measure, self._measures_entropy, layer)
                    self._hooks.callback(router.register_forward_hook(measure).remove)
        return layer

    @staticmethod
    def _measure(wanted: Callable[[], bool], layer: _Layer, router: nn.Module, args: Any, output: Any) -> None:
        if wanted():
            layer.measure(router, output)

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Moves the biases and begins a new window. Call it on every rank, at the end of each accumulation window.

        Returns:
            The tokens of each expert in the window on all ranks, (experts,), on the device, by the names of the modules
            of experts.

        Raises:
            ConfigurationError: if a module ran, and none of its calls counted.
        """
        for name, layer in self._layers.items():
            if layer.calls and not layer.counted:
                raise ConfigurationError(
                    f"Expert balancing: {name!r} ran in training without gradients, so that no token was counted. If "
                    "the model uses gradient checkpointing, set use_reentrant=False; a frozen module needs no "
                    "balancing."
                )
        device, layers = self._strategy.root_device, self._layers.values()
        own = torch.cat([layer.counts_on(device) for layer in layers])
        # The ranks of a tp group count the same tokens.
        copies = getattr(getattr(self._strategy, "layout", None), "tp", 1)
        totals = self._strategy.ranks.reduce(own, reduction="sum") // copies
        counts = dict(zip(self._layers, torch.split(totals, [layer.experts for layer in layers]), strict=True))
        if self._rate:
            for name, layer in self._layers.items():
                layer.move(counts[name], self._rate)
        self.clear()
        return counts

    @torch.no_grad()
    def entropies(self) -> dict[str, float]:
        """Returns the mean entropy of each router in this window so far, in nats. Call it on every rank.

        Routers are modules named `router` or `gate` next to the experts that return logits, alone or first.
        """
        device = self._strategy.root_device
        own = torch.stack([layer.measured_on(device) for layer in self._layers.values()])
        measured = zip(self._layers, self._strategy.ranks.reduce(own, reduction="sum").tolist(), strict=True)
        return {name: entropy / tokens for name, (entropy, tokens) in measured if tokens}

    def clear(self) -> None:
        """Forgets the window's tokens."""
        for layer in self._layers.values():
            layer.clear()

    def close(self) -> None:
        """Stops counting."""
        self._hooks.close()


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
                f"Expert balancing: {type(module).__name__} gets the experts of each token neither as its second "
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
