"""ExpertBalancing, a callback that logs how a router uses its experts, and moves its bias toward an even load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import is_logged, log_to_all
from leyden.core.checks import check_flags
from leyden.strategies.expert_balancer import ExpertBalancer, check_rate

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


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
        check_rate("ExpertBalancing", rate)
        check_flags("ExpertBalancing", per_expert=per_expert)
        self.rate, self.experts, self.per_expert = rate, experts, per_expert
        self.counts: dict[str, list[int]] = {}
        self._balancer: ExpertBalancer | None = None

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._remove()
        self.counts = {}
        self._balancer = ExpertBalancer(
            module,
            trainer.strategy,
            self.rate,
            self.experts,
            measures_entropy=lambda: is_logged(trainer, trainer.global_step + 1),
        )

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._balancer is None or not trainer.window_is_over:
            return
        shows = is_logged(trainer, trainer.global_step)
        if not (self.rate or shows):
            self._balancer.clear()
            return
        entropies = self._balancer.entropies() if shows else {}
        counts = self._balancer.step()
        if shows:
            self.counts = {name: own.tolist() for name, own in counts.items()}
            values = self._values(entropies)
            trainer.logs.show(values)
            log_to_all(trainer, values, trainer.global_step)

    def _values(self, entropies: dict[str, float]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, counts in self.counts.items():
            loads = [count / max(sum(counts), 1) for count in counts]
            prefix = f"experts/{name}"
            values |= {f"{prefix}/max": max(loads), f"{prefix}/min": min(loads)}
            values[f"{prefix}/violation"] = max(loads) * len(loads) - 1
            if name in entropies:
                values[f"{prefix}/entropy"] = entropies[name]
            if self.per_expert:
                values |= {f"{prefix}/{number}": load for number, load in enumerate(loads)}
        return values

    def go_back(self, state: dict[str, Any], step: int) -> None:
        if self._balancer is not None:
            self._balancer.clear()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._balancer is not None:
            self._balancer.close()
            self._balancer = None
