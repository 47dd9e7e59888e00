"""GradNormMonitor: the norm of the whole gradient, in one process and on ranks that hold parts of it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Regression
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN, data
from ranks.world import run_world
from samples import pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import CSVLogger, GradNormMonitor, grad_norm
from leyden.strategies import FSDPStrategy, MeshStrategy


class Net(Regression):
    """Records the gradients before clipping."""

    def __init__(self, configure: Callable[[Any], Any] | None = None) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
        super().__init__(net, **({} if configure is None else {"configure": configure}))
        self.grads: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})


def rows(folder: Path) -> list[dict[str, float]]:
    with next(folder.rglob("metrics.csv")).open() as file:
        found = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in found if any(name.startswith("grad_") for name in row)]


def train(folder: Path, monitor: GradNormMonitor, module: Net | None = None, **arguments: Any) -> Net:
    module = module or Net()
    own = {"max_steps": 4, "log_every_n_steps": 1, "logger": CSVLogger(folder), "callbacks": monitor}
    Trainer(**{**QUIET, **own, **arguments}).fit(module, DataLoader(pairs(32), 2))
    return module


def norm(grads: dict[str, Tensor], p: float = 2.0) -> float:
    return float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads.values()]).double(), p))


@pytest.mark.parametrize("p", [1, 2.0, 3.0, "inf"])
@pytest.mark.parametrize("batches", [1, 2])
def test_total_norms_are_measured_before_and_after_clipping(tmp_path: Path, p: Any, batches: int) -> None:
    monitor = GradNormMonitor(p, after_clipping=True)
    module = train(tmp_path, monitor, gradient_clip_val=0.1, accumulate_grad_batches=batches)
    names = [f"grad_{float(p)}_norm_total", f"grad_{float(p)}_norm_clipped_total"]
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    for row, grads in zip(found, module.grads, strict=True):
        assert row[names[0]] == pytest.approx(norm(grads, float(p)), rel=1e-6)
        factor = min(1.0, 0.1 / (norm(grads) + 1e-6))
        assert row[names[1]] == pytest.approx(factor * norm(grads, float(p)), rel=1e-5)
    assert not any(name.startswith("grad_") and name not in names for row in found for name in row)


@pytest.mark.parametrize("separator", ["/", "."])
def test_parameter_norms_use_lightnings_names(tmp_path: Path, separator: str) -> None:
    monitor = GradNormMonitor(per="parameter", group_separator=separator)
    module = train(tmp_path, monitor, max_steps=1)
    [row], [grads] = rows(tmp_path), module.grads
    for name, grad in grads.items():
        assert row[f"grad_2.0_norm{separator}{name}"] == pytest.approx(norm({name: grad}), rel=1e-6)


@pytest.mark.parametrize(
    ("depth", "owners"),
    [
        (None, {"net.0": ["net.0.weight", "net.0.bias"], "net.1.1": ["net.1.1.weight", "net.1.1.bias"]}),
        (2, {"net.0": ["net.0.weight", "net.0.bias"], "net.1": ["net.1.1.weight", "net.1.1.bias"]}),
        (1, {"net": ["net.0.weight", "net.0.bias", "net.1.1.weight", "net.1.1.bias"]}),
    ],
)
def test_module_norms_cover_their_parameters(tmp_path: Path, depth: int | None, owners: dict[str, list[str]]) -> None:
    module = train(tmp_path, GradNormMonitor(per="module", max_depth=depth), max_steps=1)
    [row], [grads] = rows(tmp_path), module.grads
    found = {name: value for name, value in row.items() if name.startswith("grad_2.0_norm/")}
    expected = {f"grad_2.0_norm/{owner}": norm({n: grads[n] for n in names}) for owner, names in owners.items()}
    assert found == pytest.approx(expected, rel=1e-6)


def test_only_logged_steps_are_measured(tmp_path: Path) -> None:
    module = train(tmp_path, GradNormMonitor(), max_steps=5, log_every_n_steps=2)
    assert [row["step"] for row in rows(tmp_path)] == [2, 4] and len(module.grads) == 5


def test_scaled_gradients_are_unscaled_first(tmp_path: Path) -> None:
    monitor = GradNormMonitor(after_clipping=True)
    train(tmp_path / "16", monitor, precision="16-mixed", gradient_clip_val=0.1)
    train(tmp_path / "32", GradNormMonitor())
    [first], [expected] = rows(tmp_path / "16")[:1], rows(tmp_path / "32")[:1]
    assert first["grad_2.0_norm_total"] == pytest.approx(expected["grad_2.0_norm_total"], rel=1e-2)
    assert first["grad_2.0_norm_clipped_total"] == pytest.approx(0.1, rel=1e-3)


def halves(module: Any) -> Any:
    return [torch.optim.SGD(module.net[part].parameters(), lr=0.1) for part in (0, 1)]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__(halves)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("kind", [lambda: Net(halves), Manual])
def test_several_optimizers_share_one_total(tmp_path: Path, kind: Callable[[], Net]) -> None:
    module = train(tmp_path, GradNormMonitor(), kind(), max_steps=2)
    totals = [row["grad_2.0_norm_total"] for row in rows(tmp_path)]
    assert totals == pytest.approx([norm(grads) for grads in module.grads[1::2]], rel=1e-6)


def test_the_monitor_does_not_change_the_weights(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], GradNormMonitor(per="parameter", after_clipping=True)):
        module = train(tmp_path, callbacks, logger=False, gradient_clip_val=0.1)  # type: ignore[arg-type]
        weights.append(list(module.state_dict().values()))
        assert not module.trainer.optimizers[0]._optimizer_step_pre_hooks
    assert all(map(torch.equal, *weights))
    assert "grad_2.0_norm_clipped/net.0.weight" in module.trainer.callback_metrics


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"norm_type": 0}, r"norm_type=0\): give a number above 0"),
        ({"norm_type": "two"}, "norm_type='two'"),
        ({"norm_type": math.nan}, "norm_type=nan"),
        ({"per": "layer"}, "per='layer'"),
        ({"per": "parameter", "max_depth": 1}, "with per='module'"),
        ({"per": "module", "max_depth": 0}, "a depth from 1"),
    ],
)
def test_invalid_arguments_raise(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        GradNormMonitor(**arguments)


def test_grad_norm_handles_sparse_and_bfloat16_gradients() -> None:
    net = nn.Module()
    net.table, net.narrow = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    net.without = nn.Linear(1, 1)
    assert grad_norm(net, 2) == {}
    net.table(torch.tensor([1, 1, 2])).sum().backward()
    net.narrow.weight.grad = torch.tensor([[300.0, 400.0]], dtype=torch.bfloat16)
    found = {name: float(norm) for name, norm in grad_norm(net, "1", ".").items()}
    of_parameters = {"grad_1.0_norm.table.weight": 6.0, "grad_1.0_norm.narrow.weight": 700.0}
    assert found == {**of_parameters, "grad_1.0_norm_total": 706.0}
    with pytest.raises(ConfigurationError, match=r"grad_norm\(norm_type=-1\): give a number above 0"):
        grad_norm(net, -1)


def test_after_clipping_with_lbfgs_raises(tmp_path: Path) -> None:
    module = Net(lambda module: torch.optim.LBFGS(module.parameters()))
    with pytest.raises(ConfigurationError, match="does not support LBFGS, which clips"):
        train(tmp_path, GradNormMonitor(after_clipping=True), module)
    module = train(tmp_path, GradNormMonitor(), Net(lambda module: torch.optim.LBFGS(module.parameters())), max_steps=1)
    assert rows(tmp_path)[-1]["grad_2.0_norm_total"] == pytest.approx(norm(module.grads[-1]), rel=1e-6)


def is_pipeline(strategy: Any) -> bool:
    return isinstance(strategy, MeshStrategy) and strategy.layout.pp > 1


class NormRecorder(GradNormMonitor):
    """Records the values shown after each batch, on every rank, and those of `grad_norm`."""

    def __init__(self, norm_type: float) -> None:
        super().__init__(norm_type, per="parameter", after_clipping=True)
        self.shown: list[dict[str, float]] = []
        self.by_function: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, module, optimizer)
        if is_pipeline(trainer.strategy):
            with pytest.raises(ConfigurationError, match="another stage of the pipeline holds"):
                grad_norm(module, self.norm_type)
            return
        self.by_function.append({name: float(norm) for name, norm in grad_norm(module, self.norm_type).items()})

    @property
    def state_key(self) -> str:
        return f"norms {self.norm_type}"

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, *rest)
        found = trainer.callback_metrics
        self.shown.append({name: float(found[name]) for name in sorted(found) if name.startswith(self.kind)})


def norms_of(strategy: Any, readers: int) -> list[dict[str, float]]:
    """Takes three steps on nine samples; only the first reader has a sample of the last global batch."""
    torch.manual_seed(0)
    logs = [NormRecorder(2.0), NormRecorder(math.inf)]
    trainer = Trainer(
        strategy=strategy, max_epochs=1, gradient_clip_val=0.5, log_every_n_steps=1, callbacks=logs, **QUIET
    )
    trainer.fit(GPT(), DataLoader(data(9), 4 // readers))
    if not is_pipeline(trainer.strategy):
        for log in logs:
            for shown, found in zip(log.shown, log.by_function, strict=False):
                assert {name: shown[name] for name in found} == pytest.approx(found, rel=1e-5, abs=1e-9)
            assert len(log.by_function) >= len(log.shown) >= 2
    return [first | second for first, second in zip(*(log.shown for log in logs), strict=True)]


def on_two_ranks() -> dict[str, Any]:
    return {"single": norms_of("single_device", 1), "ddp": norms_of("ddp", 2), "fsdp": norms_of("fsdp", 2)}


def on_four_ranks() -> dict[str, Any]:
    return {
        "single": norms_of("single_device", 1),
        "hsdp": norms_of(FSDPStrategy(device_mesh=(2, 2)), 4),
        "fsdp x tp": norms_of(MeshStrategy(dp_shard=2, tp=2, plan=PLAN), 2),
        "pp x fsdp": norms_of(MeshStrategy(pp=2, dp_shard=2), 2),
        "tp by sequences": norms_of(MeshStrategy(tp=2, dp_replicate=2, plan=SEQUENCE_PLAN), 2),
        "pp x tp": norms_of(MeshStrategy(pp=2, tp=2, plan=PLAN), 1),
    }


def check(ranks: list[dict[str, Any]]) -> None:
    single = ranks[0]["single"]
    assert len(single) == 3 and "grad_inf_norm_clipped/blocks.1.down.bias" in single[0]
    for strategy in ranks[0]:
        assert len(ranks[0][strategy]) == 3
        for found in (rank[strategy] for rank in ranks):
            # Hooks are not called on a rank without a sample of the batch.
            assert len(found) >= 2, strategy
            for own, expected in zip(found, single[: len(found)], strict=True):
                assert own.keys() == expected.keys(), strategy
                assert own == pytest.approx(expected, rel=1e-3, abs=1e-6), strategy


def test_ranks_log_the_norm_of_the_whole_gradient() -> None:
    check(run_world(2, on_two_ranks))


@pytest.mark.full
def test_four_ranks_log_the_norm_of_the_whole_gradient() -> None:
    check(run_world(4, on_four_ranks))
