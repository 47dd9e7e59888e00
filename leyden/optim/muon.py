"""Muon on whole and on sharded matrices, with AdamW for parameters that are no matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from leyden.core.errors import ConfigurationError, nearest
from leyden.optim.sharded import Matrix, map_matrices
from leyden.strategies.fsdp.sharding import local

ALGORITHMS = ("muon", "adamw")
ADJUSTMENTS = ("original", "match_rms_adamw")


class Muon(Optimizer):
    """Muon for matrices and AdamW for the rest, in one step and with one learning-rate schedule.

    Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) orthogonalizes the momentum of each matrix. The
    arguments, the updates and the names of the state are those of `torch.optim.Muon`, which trains whole matrices only.
    This one trains shards too, as FSDP and tensor parallel make them: each matrix is gathered in bfloat16 on one of the
    ranks that share it, which orthogonalizes it and sends the shards of the update back, while the next matrices are on
    their way. Given equal gradients, the update of a shard is bit for bit that of the whole matrix. Another number of
    ranks changes the last bits of gradients, which Newton-Schulz, in bfloat16, turns into differences of 2⁻⁸.

    A parameter with three dimensions, such as the stacked weights of experts, is a batch of matrices.

    Args:
        params: parameters or groups of parameters. Groups with `"algorithm": "adamw"` are updated by AdamW.
            `split_parameters` makes both kinds.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: the share of the momentum that is kept in each step.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: the coefficients a, b, c of the Newton-Schulz iteration.
        eps: the least norm that a matrix is divided by.
        ns_steps: the number of Newton-Schulz iterations.
        adjust_lr_fn: "original" multiplies the learning rate by √max(1, rows / columns). "match_rms_adamw" multiplies
            it by 0.2 √max(rows, columns), so that updates are as large as AdamW's and one learning rate fits both
            (Liu et al., https://arxiv.org/abs/2502.16982). None means "original".
        betas: of AdamW.
        adamw_eps: of AdamW.

    Raises:
        ConfigurationError: if an argument is invalid, or a parameter for Muon is no matrix.

    Example:
        >>> from leyden.optim import split_parameters
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        >>> optimizer = Muon(split_parameters(model), lr=1e-3, adjust_lr_fn="match_rms_adamw")
        >>> [(group["algorithm"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 1), ('adamw', 1), ('adamw', 4)]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        for name, value in (("lr", float(lr)), ("weight_decay", weight_decay), ("momentum", momentum)):
            if value < 0:
                raise ConfigurationError(f"{name}={value}: use a number of at least 0.")
        if not 1 <= ns_steps < 100:
            raise ConfigurationError(f"ns_steps={ns_steps}: use 1 to 99; 5 is usual.")
        if adjust_lr_fn is not None and adjust_lr_fn not in ADJUSTMENTS:
            raise ConfigurationError(f"adjust_lr_fn={adjust_lr_fn!r}: {nearest(str(adjust_lr_fn), ADJUSTMENTS)}")
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        muon |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        adamw = {"betas": betas, "adamw_eps": adamw_eps}
        defaults = {"algorithm": "muon", "lr": lr, "weight_decay": weight_decay, **muon, **adamw}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # A state that torch.optim.Muon saved has no entries for AdamW.
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        is_known = group["algorithm"] in ALGORITHMS
        wrong = [p for p in group["params"] if p.ndim not in (2, 3) or p.is_complex()]
        if not is_known or (wrong and group["algorithm"] == "muon"):
            self.param_groups.pop()
        if not is_known:
            raise ConfigurationError(
                f"algorithm={group['algorithm']!r}: {nearest(str(group['algorithm']), ALGORITHMS)}"
            )
        if wrong and group["algorithm"] == "muon":
            raise ConfigurationError(
                f"Muon trains real matrices, and a parameter has the shape {tuple(wrong[0].shape)}. Pass "
                "split_parameters(model), which gives such parameters to AdamW."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates the parameters that have a gradient. All ranks that share a matrix call it.

        Args:
            closure: a function that evaluates the loss anew and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["algorithm"] == "adamw":
                self._step_adamw(group, parameters)
            else:
                matrices += [Matrix(p, group) for p in parameters]
        for matrix, update in map_matrices(matrices, self._momentum_of, _orthogonalized):
            group, own = matrix.group, local(matrix.parameter)
            lr = float(group["lr"])
            own.mul_(1 - lr * group["weight_decay"])
            own.add_(update, alpha=-lr * _adjustment(group["adjust_lr_fn"], matrix.parameter.shape))
        return loss

    def _momentum_of(self, matrix: Matrix) -> Tensor:
        """Adds the gradient to the momentum; returns what is to be orthogonalized, of this rank's shard."""
        grad, momentum = _gradient(matrix.parameter), matrix.group["momentum"]
        state = self.state[matrix.parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.parameter, dtype=grad.dtype)
        buffer = local(state["momentum_buffer"])
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if matrix.group["nesterov"] else buffer

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            params=[local(parameter) for parameter in parameters],
            grads=[_gradient(parameter) for parameter in parameters],
            exp_avgs=[local(state["exp_avg"]) for state in states],
            exp_avg_sqs=[local(state["exp_avg_sq"]) for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _gradient(parameter: Tensor) -> Tensor:
    """Returns the gradient of this rank's shard of a parameter."""
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        raise ConfigurationError("Muon takes no sparse gradients. Build the embedding with sparse=False.")
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local(grad)


def orthogonalize(
    matrix: Tensor,
    coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Returns a matrix with the singular vectors of the given one, and singular values between about 0.5 and 1.5.

    Runs a Newton-Schulz iteration in bfloat16 (https://kellerjordan.github.io/posts/muon/).

    Args:
        matrix: one matrix or a batch of them, (…, R, C).
        coefficients: a, b and c of the polynomial aX + b(XXᵀ)X + c(XXᵀ)²X.
        steps: the number of iterations.
        eps: the least norm that the matrix is divided by.

    Example:
        >>> orthogonalize(torch.diag(torch.tensor([4.0, 3.0]))).diagonal()
        tensor([1.0938, 0.6953], dtype=torch.bfloat16)
    """
    a, b, c = coefficients
    addmm: Callable[..., Tensor] = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16()
    x = x.mT if is_tall else x  # (…, R, C), R ≤ C
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT  # (…, R, R)
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _orthogonalized(matrix: Matrix, whole: Tensor) -> Tensor:
    group = matrix.group
    return orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _adjustment(name: str | None, shape: Sequence[int]) -> float:
    """Returns the factor of the learning rate for a matrix of a shape."""
    rows, columns = shape[-2:]
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
