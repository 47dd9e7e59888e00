"""DeepSpeedStrategy on real ranks: the losses and weights of DDP, step by step, to six digits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

# For the launch that the tests of this file share.
pytestmark = pytest.mark.timeout(900)
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), Block(12), Block(12), nn.Linear(12, 4))


class Net(TrainModule):
    """A regression that records its losses and learning rates.

    Args:
        late: builds the net in configure_model.
        items: returns the loss as a sum, with num_items.
        kind: "adamw", "sgd", "groups" (two, one of them at a lower rate), "schedule", or "none".
        scale: adds a parameter of the module itself, and one that no step uses.
    """

    def __init__(self, late: bool = False, items: bool = False, kind: str = "adamw", scale: bool = False) -> None:
        super().__init__()
        self.net: Any = None if late else build()
        self.items, self.kind, self.scale = items, kind, scale
        if scale:
            self.factor, self.unused = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.ones(3))
            self.net[0].bias.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))
        self.losses: list[float] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = build()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        out = self.net(batch[0])
        loss = F.mse_loss(out * self.factor if self.scale else out, batch[1])
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.items:
            count = len(batch[0]) + batch_idx % 3
            return {"loss": loss * count, "num_items": count, "extra": out}
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Not called for the substitute batch of a rank without samples.
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

    def configure_optimizers(self) -> Any:
        if self.kind == "none":
            return None
        if self.kind == "groups":
            last = list(self.net[3].parameters())
            rest = [p for p in self.parameters() if all(p is not other for other in last)]
            return AdamW([{"params": rest}, {"params": last, "lr": 1e-3, "weight_decay": 0.1}], lr=1e-2)
        optimizer = (
            SGD(self.parameters(), lr=0.05, momentum=0.9) if self.kind == "sgd" else AdamW(self.parameters(), lr=1e-2)
        )
        if self.kind == "schedule":
            scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        return optimizer


@dataclass
class Case:
    """A fit under DeepSpeed and its counterpart under DDP.

    Attributes:
        module: arguments of Net.
        trainer: arguments of the Trainer.
        zero: arguments of DeepSpeedStrategy besides the stage.
        ddp: arguments of DDP's Trainer, if other than `trainer`.
        ddp_module: arguments of DDP's Net, if other than `module`.
        samples: number of training samples; 41 leave one rank of two without a sample at the end.
        epochs: number of epochs.
        stages: stages that support this case.
        usual: stages of the default run on two ranks; the full run takes all.
        alone: stages of the default run on one rank.
    """

    module: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] | None = None
    ddp_module: dict[str, Any] | None = None
    samples: int = 40
    epochs: int = 1
    stages: tuple[int, ...] = STAGES
    usual: tuple[int, ...] = (2, 3)
    alone: tuple[int, ...] = ()


OFFLOADED = {"offload_optimizer": True, "offload_parameters": True, "pin_memory": False}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_accumulation_steps": "auto"}
CASES = {
    "plain": Case(epochs=2, usual=STAGES, alone=STAGES),
    # 10 batches on one rank and 5 on two: the last window has 1 and 2.
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}, usual=STAGES, alone=(0, 2)),
    "clipping": Case(trainer={"gradient_clip_val": 0.05}, usual=(0, 1, 3), alone=(2,)),
    "clipping by the config": Case(
        zero={"config": {"gradient_clipping": 0.05}}, ddp={"gradient_clip_val": 0.05}, usual=(0, 2)
    ),
    "schedule": Case({"kind": "schedule"}, {"accumulate_grad_batches": 2}, usual=(1, 3)),
    "items": Case({"items": True}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, usual=STAGES, alone=(3,)),
    "uneven": Case(samples=41, usual=STAGES),
    "uneven items": Case({"items": True}, {"accumulate_grad_batches": 4}, samples=41),
    "groups": Case({"kind": "groups"}, usual=(1, 3)),
    "sgd": Case({"kind": "sgd"}, usual=(2,)),
    "frozen, unused and module-level parameters": Case(
        {"scale": True}, ddp={"strategy": "ddp_find_unused_parameters_true"}, usual=(0, 1, 3)
    ),
    "optimizer offload": Case(zero={"offload_optimizer": True}, stages=(1, 2, 3), usual=(1,), alone=(2,)),
    "optimizer offload, accumulation, clipping": Case(
        trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
        zero={"offload_optimizer": "cpu"},
        stages=(1, 2, 3),
    ),
    "all offloaded": Case(zero=OFFLOADED, stages=(3,), usual=()),
    "zero.Init": Case({"late": True}, {"accumulate_grad_batches": 3}, usual=(3,)),
    "zero.Init, offloaded": Case({"late": True}, zero=OFFLOADED, stages=(3,), alone=(3,)),
    "everything partitioned": Case(
        {"late": True}, zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}, stages=(3,)
    ),
    "checkpointed activations": Case(zero={"activation_checkpointing_policy": {"Block"}}),
    "the config's optimizer": Case({"kind": "none"}, zero={"config": ADAMW}, ddp_module={}, usual=(1, 3)),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed", "accumulate_grad_batches": 3}, usual=(0, 1, 3), alone=(2,)),
}
EVERY = [(name, stage) for name, case in CASES.items() for stage in case.stages]
USUAL = {
    1: [(name, stage) for name, case in CASES.items() for stage in case.alone],
    2: [(name, stage) for name, case in CASES.items() for stage in case.usual if stage in case.stages],
}


def data(samples: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def fit(case: Case, stage: int | None) -> dict[str, Any]:
    """Returns this rank's losses and rates, and on rank 0 the final weights; `stage` is None for DDP."""
    if stage is None:
        module = Net(**(case.module if case.ddp_module is None else case.ddp_module))
        arguments = {"strategy": "ddp", **(case.trainer if case.ddp is None else case.ddp)}
    else:
        module = Net(**case.module)
        arguments = {"strategy": DeepSpeedStrategy(stage=stage, **case.zero), **case.trainer}  # type: ignore[arg-type]
    trainer = Trainer(max_epochs=case.epochs, **{**QUIET, **arguments})
    trainer.fit(module, data(case.samples))
    weights = trainer.strategy.full_state_dict(module)
    return {
        "losses": module.losses,
        "rates": module.rates,
        "steps": trainer.global_step,
        "weights": {name: value.double().tolist() for name, value in weights.items()},
    }


def run_cells(cells: list[tuple[str, int]]) -> dict[Any, Any]:
    expected = {name: fit(CASES[name], None) for name in dict.fromkeys(name for name, _ in cells)}
    return {"ddp": expected} | {cell: fit(CASES[cell[0]], cell[1]) for cell in cells}


@pytest.fixture(scope="module")
def results() -> Any:
    """Results of each case on each rank, from one world of one rank and one of two."""
    return {size: run_world(size, run_cells, cells, timeout=800) for size, cells in USUAL.items()}


@pytest.mark.parametrize(("size", "name", "stage"), [(size, *cell) for size, cells in USUAL.items() for cell in cells])
def test_losses_and_weights_match_ddp(results: Any, size: int, name: str, stage: int) -> None:
    compare(results[size], name, stage)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, 2])
def test_every_case_matches_ddp_at_every_stage(size: int) -> None:
    found = run_world(size, run_cells, EVERY, timeout=1700)
    for name, stage in EVERY:
        compare(found, name, stage)


def compare(found: list[Any], name: str, stage: int) -> None:
    for rank, cells in enumerate(found):
        ours, theirs = cells[name, stage], cells["ddp"][name]
        assert len(ours["losses"]) > 0 and ours["steps"] == theirs["steps"] > 0
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["rates"][: len(theirs["rates"])] == theirs["rates"]
        expected = theirs["weights"]
        if "unused" in expected:
            # Its gradient is zero here and None under DDP, so only here weight decay shrinks it.
            expected["unused"] = [0.9999 ** ours["steps"]] * 3
        assert rank > 0 or ours["weights"].keys() == expected.keys()
        for key, value in ours["weights"].items():
            # Only DDP sends buffers in every forward; rank 0's are compared.
            if rank == 0 or key != "steps":
                assert_close(torch.tensor(value), torch.tensor(expected[key]), rtol=1e-5, atol=1e-6)


def run_bf16() -> dict[Any, Any]:
    """Trains weights in bfloat16 with float32 masters, at three stages and by hand."""
    found: dict[Any, Any] = {stage: fit(Case(trainer={"precision": "bf16-true"}), stage) for stage in (1, 2, 3)}
    own = Case(trainer={"precision": "bf16-mixed"}, zero={"config": {"bf16": {"enabled": True}}})
    found["bf16 in the config"] = fit(own, 2)
    net = build().bfloat16()
    masters = [parameter.detach().float().requires_grad_() for parameter in net.parameters()]
    optimizer, losses = AdamW(masters, lr=1e-2), []
    for x, y in data(40):
        loss = F.mse_loss(net(x.bfloat16()), y.bfloat16())
        loss.backward()
        losses.append(float(loss.detach()))
        for master, parameter in zip(masters, net.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, net.parameters(), strict=True):
                parameter.copy_(master)
    return {**found, 0: {"losses": losses}}


def test_bf16_true_holds_weights_in_bf16_and_steps_float32_masters() -> None:
    [found] = run_world(1, run_bf16)
    for name in (1, 2, 3, "bf16 in the config"):
        assert found[name]["losses"] == pytest.approx(found[0]["losses"], rel=1e-6)
        assert len(set(found[name]["losses"])) > 5
