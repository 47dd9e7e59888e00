"""The Strategy contract: tests that every strategy passes, including a fused engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Regression
from ranks.world import run_world
from same import same_weights, whole
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from leyden import Trainer
from leyden.core.errors import ConfigurationError
from leyden.strategies import SingleDeviceStrategy, Strategy
from leyden.strategies.base import ClipAlgorithm
from leyden.strategies.window import BackwardHooks, Window, read_loss


class FusedStrategy(SingleDeviceStrategy):
    """An engine that runs forward, backward, clipping and step as one call, as pipelines and DeepSpeed do.

    Gradients live in private buffers, and clipping is an argument of the engine. When the Trainer asks to scale, clip
    or step after the call, the engine has done so, unless a loader ended early and no forward pass closed the window.
    """

    name = "fused"
    supports_closure = False

    def __init__(self, clip: float | None = None, algorithm: ClipAlgorithm = "norm") -> None:
        super().__init__("cpu")
        self.clip_at, self.algorithm = clip, algorithm
        self.buffers: dict[nn.Parameter, Tensor] = {}
        self.fused_steps = 0
        self._done = False

    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        if window.index == 0:
            self.buffers, self._done = {}, False
        with self.precision.forward_context() if self.precision.forward_context else torch.enable_grad():
            outputs = step_fn(batch, *extra)
        loss, num_items = read_loss(outputs)
        for hook in hooks.on_before_backward:
            hook(loss)
        parameters = [p for module in self.modules for p in module.parameters() if p.requires_grad]
        loss = self.loss_to_backward(loss, num_items, window)
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if grad is not None:
                self.buffers[parameter] = self.buffers[parameter] + grad if parameter in self.buffers else grad
        for after in hooks.on_after_backward:
            after()
        if window.closes:
            count = window.index + 1
            if window.num_items is not None and window.first_items is not None and count > 1:
                self._scale(float(window.first_items) / float(window.num_items))
            elif window.num_items is None and count != window.length:
                self._scale(window.length / count)
            self._step()
        return outputs

    def scale_gradients(self, factor: Tensor | float) -> None:
        if not self._done:
            self._scale(float(factor))

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        assert (value, algorithm) == (self.clip_at, self.algorithm)
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if not self._done:
            self._step()
        return True

    def _scale(self, factor: float) -> None:
        for buffer in self.buffers.values():
            buffer.mul_(factor)

    def _step(self) -> None:
        for optimizer in self.optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"] if p in self.buffers]
            for parameter in params:
                parameter.grad = self.buffers[parameter]
            if self.clip_at is not None and self.algorithm == "norm":
                nn.utils.clip_grad_norm_(params, self.clip_at)
            elif self.clip_at is not None:
                nn.utils.clip_grad_value_(params, self.clip_at)
            optimizer.step()
            for parameter in params:
                parameter.grad = None
        self._done = True
        self.fused_steps += 1


class Custom(Strategy):
    """A user's subclass that changes nothing and has no name."""


Make = Callable[..., Strategy]
STRATEGIES: dict[str, Make] = {
    "single_device": lambda **clip: SingleDeviceStrategy("cpu"),
    "fused": FusedStrategy,
    "user subclass": lambda **clip: Custom(),
}


# Only in the full run, since the process group of one rank stays open until the process ends.
@pytest.fixture(params=[*STRATEGIES, pytest.param("ddp", marks=pytest.mark.full)])
def make(request: pytest.FixtureRequest) -> Make:
    """A function that makes a strategy; the fused engine takes clipping arguments."""
    if request.param == "ddp":
        from leyden.strategies.ddp import DDPStrategy

        return lambda **clip: DDPStrategy()
    return STRATEGIES[request.param]


class WeightedNet(Regression):
    """A small network whose loss, with `weighted`, is a sum over items."""

    def __init__(self, configure: Callable[[Any], Any], weighted: bool = False) -> None:
        super().__init__(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1)), configure)
        self.weighted = weighted
        self.calls: list[str] = []

    def errors(self, batch: Any) -> Any:
        x, y = batch
        return (self(x) - y).square()

    def loss(self, batch: Any) -> Any:
        return self.errors(batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        errors = self.errors(batch)
        self.log("loss", errors.mean(), on_step=True, on_epoch=True)
        return {"loss": errors.sum(), "num_items": len(errors)} if self.weighted else errors.mean()


def data(count: int = 10, sizes: Sequence[int] = (4,)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(sizes[i % len(sizes)], 3, generator=generator), torch.randn(1, generator=generator))
        for i in range(count)
    ]


def adamw(module: nn.Module) -> Any:
    return AdamW(module.parameters(), lr=0.05)


def scheduled(module: nn.Module) -> Any:
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}}


def two_optimizers(module: Any) -> Any:
    return [SGD(module.net[0].parameters(), lr=0.1), AdamW(module.net[3].parameters(), lr=0.05)]


def plain_loop(module: WeightedNet, batches: Any, epochs: int, accumulate: int, clip: Any) -> None:
    """Trains in plain PyTorch, as every strategy must, bit for bit."""
    configured = module.configure(module)
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
    found = configured["optimizer"] if isinstance(configured, dict) else configured
    optimizers = found if isinstance(found, list) else [found]
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            for optimizer in optimizers:
                optimizer.zero_grad()
            for x, y in window:
                ((module.net(x) - y).square().mean() / len(window)).backward()
            for optimizer in optimizers:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                if clip and clip["algorithm"] == "norm":
                    nn.utils.clip_grad_norm_(params, clip["clip"])
                elif clip:
                    nn.utils.clip_grad_value_(params, clip["clip"])
                optimizer.step()
            if scheduler is not None:
                scheduler.step()


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def build(strategy: Strategy, **arguments: Any) -> Trainer:
        return Trainer(**{**QUIET, "max_epochs": 2, "default_root_dir": tmp_path, "strategy": strategy, **arguments})

    return build


def trainer_clip(clip: Any) -> dict[str, Any]:
    return {"gradient_clip_val": clip["clip"], "gradient_clip_algorithm": clip["algorithm"]} if clip else {}


@pytest.mark.parametrize("configure", [adamw, scheduled, two_optimizers])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [{}, {"clip": 0.1, "algorithm": "norm"}, {"clip": 0.01, "algorithm": "value"}])
def test_weights_match_the_plain_loop_bit_for_bit(
    make: Make, trainer: Any, configure: Any, accumulate: int, clip: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    module = WeightedNet(configure)
    plain = copy.deepcopy(module)
    state = torch.get_rng_state()
    run = trainer(make(**clip), accumulate_grad_batches=accumulate, **trainer_clip(clip))
    run.fit(module, data(), data(3))
    torch.set_rng_state(state)
    plain_loop(plain, data(), 2, accumulate, clip)
    for (name, expected), found in zip(plain.net.named_parameters(), module.net.parameters(), strict=True):
        # The last window of an epoch is divided by its true length, known before its first batch.
        assert torch.equal(expected, found), name
    assert run.global_step == 2 * -(-10 // accumulate)
    assert {"loss_step", "loss_epoch", "val_loss"} <= set(run.callback_metrics)


def test_the_fused_engine_takes_every_step(trainer: Any) -> None:
    strategy = FusedStrategy()
    run = trainer(strategy, accumulate_grad_batches=4)
    run.fit(WeightedNet(adamw), data())
    assert strategy.fused_steps == run.global_step == 6


@pytest.mark.parametrize("accumulate", [2, 4])
def test_an_item_weighted_window_equals_one_large_batch(make: Make, trainer: Any, accumulate: int) -> None:
    torch.manual_seed(0)
    module = WeightedNet(lambda net: SGD(net.parameters(), lr=0.1), weighted=True)
    module.net[2] = nn.Identity()
    whole = copy.deepcopy(module)
    parts = data(accumulate, sizes=(1, 5, 2))
    trainer(make(), accumulate_grad_batches=accumulate, max_epochs=3).fit(module, parts)
    joined = (torch.cat([x for x, _ in parts]), torch.cat([y.expand(len(x), 1) for x, y in parts]))
    trainer(make(), max_epochs=3).fit(whole, [joined])
    for expected, found in zip(whole.parameters(), module.parameters(), strict=True):
        assert torch.allclose(expected, found, atol=1e-6)


class ShortLoader(list[Any]):
    """Reports three batches more than it has."""

    def __len__(self) -> int:
        return super().__len__() + 3


def test_a_window_cut_short_is_averaged_over_its_actual_length(make: Make, trainer: Any) -> None:
    torch.manual_seed(0)
    module = WeightedNet(lambda net: SGD(net.parameters(), lr=0.1))
    module.net[2] = nn.Identity()
    plain = copy.deepcopy(module)
    with pytest.warns(UserWarning, match="reports 9 batches but ended after 6"):
        trainer(make(), accumulate_grad_batches=4).fit(module, ShortLoader(data(6)))
    plain_loop(plain, data(6), 2, 4, {})
    for expected, found in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.allclose(expected, found, atol=1e-6)


BACKWARD = ("on_before_backward", "on_after_backward")
LAST_BATCH = (*BACKWARD, "on_before_optimizer_step", "on_train_batch_end")
TWO_WINDOWS = ["on_before_zero_grad", *BACKWARD, "on_train_batch_end", *LAST_BATCH, "on_before_zero_grad", *LAST_BATCH]
"""Hooks called in a window of two batches followed by a window of one."""


def recording() -> tuple[list[str], WeightedNet]:
    """Returns a list of hook calls, and the module that appends to it."""
    calls: list[str] = []

    def recorder(hook: str) -> Callable[..., None]:
        return lambda self, *args: calls.append(hook)

    return calls, type("Recording", (WeightedNet,), {hook: recorder(hook) for hook in TWO_WINDOWS})(adamw)


def test_hooks_around_a_step_run_in_order(make: Make, trainer: Any) -> None:
    calls, module = recording()
    trainer(make(), accumulate_grad_batches=2, max_epochs=1).fit(module, data(3))
    assert calls == TWO_WINDOWS


def test_manual_optimization_matches_the_plain_loop(make: Make, trainer: Any) -> None:
    class Manual(WeightedNet):
        def __init__(self) -> None:
            super().__init__(lambda net: SGD(net.parameters(), lr=0.1))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
            optimizer.step()

    if make is FusedStrategy:
        pytest.skip("an engine that fuses the passes has no manual backward")
    module = Manual()
    module.net[2] = nn.Identity()
    plain = copy.deepcopy(module)
    trainer(make()).fit(module, data(4))
    plain_loop(plain, data(4), 2, 1, {})
    assert same_weights(plain, module)


@pytest.mark.parametrize("other", STRATEGIES)
def test_a_checkpoint_resumes_under_every_strategy(make: Make, trainer: Any, tmp_path: Path, other: str) -> None:
    torch.manual_seed(0)
    whole = WeightedNet(adamw)
    half = copy.deepcopy(whole)
    state = torch.get_rng_state()
    trainer(make(), max_epochs=4, accumulate_grad_batches=3).fit(whole, data(), data(2))
    torch.set_rng_state(state)
    first = trainer(make(), max_steps=6, max_epochs=4, accumulate_grad_batches=3)
    first.fit(half, data(), data(2))
    path = first.save_checkpoint(tmp_path / "half")
    resumed = WeightedNet(adamw)
    second = trainer(STRATEGIES[other](), max_epochs=4, accumulate_grad_batches=3)
    second.fit(resumed, data(), data(2), ckpt_path=path)
    for expected, found in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert second.global_step == 16


def test_evaluation_matches_the_plain_module(make: Make, trainer: Any) -> None:
    run, module = trainer(make()), WeightedNet(adamw)
    [values] = run.validate(module, data(3), verbose=False)
    module.eval()
    with torch.no_grad():
        expected = [module.net(x) for x, _ in data(3)]
    losses = [(out - y).square().mean() for out, (_, y) in zip(expected, data(3), strict=True)]
    assert values["val_loss"] == pytest.approx(float(torch.stack(losses).mean()))
    outputs = run.predict(module, data(3))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_every_precision_trains_in_its_dtype(make: Make, trainer: Any, precision: str) -> None:
    module = WeightedNet(adamw)
    run = trainer(make(), precision=precision)
    run.fit(module, data(3), data(1))
    assert run.precision == precision and run.global_step == 6
    dtypes = {"64-true": torch.float64, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
    assert module.net[0].weight.dtype == dtypes[precision]
    assert bool(torch.isfinite(run.callback_metrics["loss_epoch"]))


def test_optimizer_closures_run_or_raise(make: Make, trainer: Any) -> None:
    module = WeightedNet(lambda net: torch.optim.LBFGS(net.parameters(), max_iter=3))
    strategy = make()
    if strategy.supports_closure:
        run = trainer(strategy, max_epochs=1)
        run.fit(module, data(2))
        assert run.global_step == 2
        return
    with pytest.raises(ValueError, match="strategy='fused': use a single device or DDP"):
        trainer(strategy).fit(module, data(2))


def test_collectives_on_one_rank_return_their_input(make: Make) -> None:
    strategy = make()
    tensor = torch.arange(3.0)
    assert strategy.ranks.all_gather(tensor).shape == (1, 3) and strategy.ranks.broadcast("x") == "x"
    for reduction in ("mean", "sum", "max", "min"):
        assert torch.equal(strategy.ranks.reduce(tensor, reduction=reduction), tensor)
    assert strategy.reduce(0.5) == 0.5 and torch.equal(strategy.reduce(tensor, reduce_op="AVG"), tensor)
    with pytest.raises(ConfigurationError, match="reduce_op='product' is not known. Use one of mean, avg, sum"):
        strategy.reduce(tensor, reduce_op="product")
    assert strategy.ranks.any(True) is True and strategy.ranks.any(False) is False
    strategy.ranks.barrier()
    assert (strategy.data_rank, strategy.data_size, strategy.ranks.world_size) == (
        0,
        1,
        1,
    ) and strategy.ranks.is_global_zero


def test_teardown_may_run_twice(make: Make) -> None:
    strategy = make()
    strategy.setup_environment()
    with strategy.init_module():
        net = nn.Linear(2, 1)
    assert net.weight.device.type == strategy.root_device.type == "cpu"
    [net] = strategy.setup_modules([net])  # type: ignore[list-item]
    [optimizer] = strategy.setup_optimizers([net], [SGD(net.parameters(), lr=1.0)])
    assert strategy.modules == [net] and strategy.optimizers == [optimizer]
    batch = {"x": [torch.ones(1)], "s": "a"}
    assert strategy.to_device(batch) is batch and strategy.leaves_batches
    strategy.teardown()
    strategy.teardown()
    assert strategy.modules == [] == strategy.optimizers


def test_init_module_uses_the_trainers_precision(make: Make, trainer: Any) -> None:
    run = trainer(make(), precision="64-true")
    with run.init_module():
        module = WeightedNet(adamw)
    assert module.dtype == torch.float64 and run.strategy.precision.name == "64-true"


# several ranks --------------------------------------------------------------------------------------------------------


def differences_from_one_process(name: str) -> list[str]:
    """Returns the parameters that differ from those of one process trained on the batches of both ranks."""
    wrong: list[str] = []
    for configure, accumulate, clip, weighted in [
        (adamw, 1, {}, False),
        (scheduled, 4, {"clip": 0.1, "algorithm": "norm"}, False),
        (two_optimizers, 3, {"clip": 0.01, "algorithm": "value"}, False),
        (scheduled, 3, {}, True),
    ]:
        torch.manual_seed(0)
        module = WeightedNet(configure, weighted)
        module.net[2] = nn.Identity()
        plain = copy.deepcopy(module)
        batches = data(20, sizes=(4, 4, 2, 2) if weighted else (4,))
        run = Trainer(strategy=name, max_epochs=2, accumulate_grad_batches=accumulate, **QUIET, **trainer_clip(clip))
        run.fit(module, batches, data(3))
        joined = [
            (torch.cat([x for x, _ in pair]), torch.cat([y.expand(len(x), 1) for x, y in pair]))
            for pair in zip(batches[::2], batches[1::2], strict=True)
        ]
        single = Trainer(
            strategy="single_device", max_epochs=2, accumulate_grad_batches=accumulate, **QUIET, **trainer_clip(clip)
        )
        single.fit(plain, joined)
        assert run.global_step == single.global_step
        for (label, expected), found in zip(plain.named_parameters(), module.parameters(), strict=True):
            if not torch.allclose(expected, whole(found.detach()), atol=1e-5):
                wrong.append(f"{configure.__name__} × {accumulate}: {label}")
    return wrong


def hooks_and_collectives(name: str) -> tuple[list[str], list[str]]:
    calls, module = recording()
    run = Trainer(strategy=name, max_epochs=1, accumulate_grad_batches=2, **QUIET)
    run.fit(module, data(6))
    strategy = run.strategy
    strategy.setup_environment()
    rank = strategy.ranks.global_rank
    wrong = []
    mine = torch.tensor([1.0, 2.0]) * (rank + 1)
    checks = {
        "place": (strategy.data_rank, strategy.data_size, strategy.ranks.world_size) == (rank, 2, 2),
        "all_gather": strategy.ranks.all_gather(mine).tolist() == [[1.0, 2.0], [2.0, 4.0]],
        "broadcast": strategy.ranks.broadcast({"of": rank}, src=1) == {"of": 1},
        "objects": strategy.ranks.all_gather_object(rank) == [0, 1],
        "mean": strategy.ranks.reduce(mine).tolist() == [1.5, 3.0],
        "sum": strategy.ranks.reduce(mine, reduction="sum").tolist() == [3.0, 6.0],
        "max": strategy.ranks.reduce(mine, reduction="max").tolist() == [2.0, 4.0],
        "min": strategy.ranks.reduce(mine, reduction="min").tolist() == [1.0, 2.0],
        "untouched": mine.tolist() == [rank + 1, 2 * (rank + 1)],
        "reduce_op": strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.SUM).tolist() == [3.0, 6.0],
        "average": strategy.reduce(mine, reduce_op="avg").tolist() == [1.5, 3.0],
        "all": strategy.reduce_boolean_decision(True) and not strategy.reduce_boolean_decision(rank == 1),
        "one": strategy.reduce_boolean_decision(rank == 1, all=False),
        "none": not strategy.reduce_boolean_decision(False, all=False),
        "any": strategy.ranks.any(rank == 1) and not strategy.ranks.any(False),
        "flags": strategy.ranks.exchange_flags([rank == 0, False])() == [True, False],
    }
    strategy.ranks.barrier()
    wrong += [label for label, passed in checks.items() if not passed]
    strategy.teardown()
    strategy.teardown()
    assert strategy.modules == [] == strategy.optimizers
    return calls, wrong


def check_rank(name: str) -> dict[str, list[str]]:
    wrong = differences_from_one_process(name)
    calls, collectives = hooks_and_collectives(name)
    return {"weights": wrong, "hooks": calls, "collectives": collectives}


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, list[str]]]:
    """Results of `check_rank` on each of two ranks."""
    return run_world(2, check_rank, request.param)


def test_two_ranks_match_one_process_on_the_batches_of_both(ranks: list[dict[str, list[str]]]) -> None:
    assert [rank["weights"] for rank in ranks] == [[], []]


def test_two_ranks_call_the_same_hooks_as_one(ranks: list[dict[str, list[str]]]) -> None:
    assert [rank["hooks"] for rank in ranks] == [TWO_WINDOWS] * 2


def test_collectives_on_two_ranks_return_correct_results(ranks: list[dict[str, list[str]]]) -> None:
    assert [rank["collectives"] for rank in ranks] == [[], []]


def test_sparse_gradients_are_scaled() -> None:
    strategy, table = SingleDeviceStrategy(), nn.Embedding(4, 2, sparse=True)
    strategy.setup_optimizers([table], [torch.optim.SGD(table.parameters(), 0.1)])
    table(torch.tensor([1])).sum().backward()
    strategy.scale_gradients(0.5)
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().tolist() == [[0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", ["world_size", "broadcast", "all_gather_object"])
def test_overriding_an_attribute_of_ranks_raises_at_class_definition(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Custom overrides {name}.* Strategy\\(ranks=…\\)"):
        type("Custom", (Strategy,), {name: property(lambda self: 2)})
