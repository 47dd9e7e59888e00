"""Features of FSDPStrategy beyond plain training, on two real ranks."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks.test_fsdp import SETTINGS, Net, Regression, batches
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.core.errors import LeydenError
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole
from leyden.strategies.precision import MixedPrecision
from leyden.strategies.window import Window


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def trainer(strategy: Any = None, **arguments: Any) -> Trainer:
    settings = {**SETTINGS, "max_epochs": 1, **arguments}
    return Trainer(strategy=FSDPStrategy() if strategy is None else strategy, **settings)


def differences(found: nn.Module, expected: nn.Module) -> list[str]:
    pairs = zip(expected.state_dict().items(), found.state_dict().values(), strict=True)
    return [name for (name, a), b in pairs if not torch.equal(whole(a), whole(b))]


# All runs share one world, since starting a world takes longer than a run.
RUNS: list[tuple[Any, ...]] = [
    ("count_bytes", 4),
    ("fit_twice",),
    ("scalars",),
    ("fail_midway", 1),
    ("fail_midway", 2),
    ("save_shards",),
    ("ignore_a_module", None, "norm", True),
    ("ignore_a_module", 0.05, "norm", False),
    ("ignore_a_module", 0.002, "value", False),
    ("manual",),
    ("overflow_on_one_rank",),
    ("true_dtypes", "bf16-true"),
    ("true_dtypes", "64-true"),
    ("true_dtypes", "bf16-mixed"),
    ("repoint",),
    ("error_messages",),
    ("step_by_each_optimizer",),
    ("styles",),
    ("tied",),
    ("uneven", 1, 17),
    ("uneven", 2, 9),
]
ResultsOf = Callable[..., list[Any]]


def run_all() -> list[Any]:
    return [globals()[name](*args) for name, *args in RUNS]


@pytest.fixture(scope="module")
def results_of() -> ResultsOf:
    """Returns a function from a run to its results on each rank."""
    found = run_world(2, run_all)

    def of(*run: Any) -> list[Any]:
        number = RUNS.index(run)
        return [own[number] for own in found]

    return of


# bytes sent -----------------------------------------------------------------------------------------------------------
class SentBytes(TorchDispatchMode):
    """Counts the bytes of the tensors passed to collectives, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "gather" in name or "reduce" in name:
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            if "c10d" in name:
                self.bytes[name.split("::")[1].strip("_").split(".")[0]] += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def count_bytes(accumulate: int) -> list[tuple[bool, int, int]]:
    """Returns, for each batch, whether it closes its window, bytes of gradients sent, and of parameters gathered."""
    found = []

    class Counting(FSDPStrategy):
        def forward_backward(self, step_fn: Any, batch: Any, extra: Any, window: Any, hooks: Any) -> Any:
            with SentBytes() as sent:
                outputs = super().forward_backward(step_fn, batch, extra, window, hooks)
            reduced = sum(count for name, count in sent.bytes.items() if "reduce" in name)
            found.append((window.closes, reduced, sum(sent.bytes.values()) - reduced))
            return outputs

    trainer(Counting(), accumulate_grad_batches=accumulate).fit(Regression(), batches(6, *rank_and_size()))
    return found


def test_gradients_are_sent_only_at_the_end_of_a_window(results_of: ResultsOf) -> None:
    for found in results_of("count_bytes", 4):
        assert [closes for closes, _, _ in found] == [False, False, False, True, False, True]
        assert all((reduced > 0) == closes for closes, reduced, _ in found)
        assert all(gathered > 0 for _, _, gathered in found)


# consecutive runs -----------------------------------------------------------------------------------------------------
def fit_twice() -> tuple[list[str], bool]:
    data = batches(3, *rank_and_size())
    torch.manual_seed(0)
    once, twice = Regression(), Regression()
    twice.load_state_dict(once.state_dict())
    trainer(max_epochs=2).fit(once, data, data)
    first = trainer()
    first.fit(twice, data, data)
    [values] = first.validate(twice, data, verbose=False)
    sharded = all(isinstance(p, DTensor) for p in twice.parameters())
    assert values["val_loss"] > 0
    first.fit(twice, data, data, ckpt_path="current", max_epochs=2)
    return differences(twice, once), sharded


def test_fitting_twice_equals_one_run(results_of: ResultsOf) -> None:
    """A validation between the fits leaves shards behind, not gathered parameters."""
    assert results_of("fit_twice") == [([], True)] * 2


def fail_midway(accumulate: int) -> list[str]:
    """Fails between a block's forward and backward in a window's last batch, then fits the module again.

    Returns the parameters that differ from those of a module that never failed.
    """
    modules = []
    for fails in (True, False):
        torch.manual_seed(0)
        module, strategy = Regression(), FSDPStrategy()
        strategy.setup_environment()
        strategy.setup_modules([module])
        if fails:
            step = strategy.setup_step(module.training_step, module)
            own = batches(accumulate, *rank_and_size())
            for batch in own[:-1]:
                strategy._follow_window(Window(0, accumulate, False))
                step(batch, 0).backward()
            handle = module.net.blocks[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(own[-1], 0)
            handle.remove()
            strategy.teardown()
        trainer().fit(module, batches(3, *rank_and_size()))
        modules.append(module)
    return differences(*modules)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_module_trains_normally_after_a_failed_run(results_of: ResultsOf, accumulate: int) -> None:
    assert results_of("fail_midway", accumulate) == [[], []]


# torch.save of shards -------------------------------------------------------------------------------------------------
def save_shards() -> list[Any]:
    torch.manual_seed(0)
    module, run = Regression(), trainer()
    run.fit(module, batches(2, *rank_and_size()))
    optimizer = run.optimizers[0]
    messages = []
    for state in (
        module.state_dict(),
        {name: tensor.cpu().clone() for name, tensor in module.net.state_dict().items()},
        optimizer.state_dict(),
        dict(module.named_parameters()),
    ):
        try:
            torch.save(state, io.BytesIO())
        except RuntimeError as error:
            messages.append(str(error))
    full = run.strategy.full_state_dict(module)
    assert len(full) == (22 if run.is_global_zero else 0)
    for name, tensor in full.items():
        assert not isinstance(tensor, DTensor) and tensor.shape == module.get_parameter(name).shape
    total = sum(whole(p.detach()).double().sum() for p in module.parameters())
    buffer = io.BytesIO()
    torch.save(full, buffer)
    if run.is_global_zero:
        plain = Regression()
        plain.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
        assert float(sum(p.detach().double().sum() for p in plain.parameters())) == float(total)
    return messages


def test_torch_save_of_shards_raises(results_of: ResultsOf) -> None:
    for messages in results_of("save_shards"):
        assert len(messages) == 4
        assert all(
            "trainer.save_checkpoint(path)" in message and "full_state_dict(module)" in message for message in messages
        )


# unsharded parameters, and norms over both kinds ----------------------------------------------------------------------
def ignore_a_module(clip: float | None, algorithm: str, by_name: bool) -> list[str]:
    """Trains with an unsharded module next to the shards, and by hand; returns the parameters that differ."""
    rank, size = rank_and_size()
    torch.manual_seed(0)
    module, plain = Regression(), Regression()
    plain.load_state_dict(module.state_dict())
    strategy = FSDPStrategy(ignored_modules=r".*\.inp" if by_name else [module.net.inp])
    limits = {"gradient_clip_val": clip, "gradient_clip_algorithm": algorithm} if clip else {}
    trainer(strategy, accumulate_grad_batches=2, **limits).fit(module, batches(4, rank, size))
    assert not isinstance(module.net.inp.weight, DTensor) and isinstance(module.net.out.weight, DTensor)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    own = [batches(4, other, size) for other in range(size)]
    for start in (0, 2):
        optimizer.zero_grad()
        for number in (start, start + 1):
            for data in own:
                (F.mse_loss(plain.net(data[number][0]), data[number][1]) / 2 / size).backward()
        if clip and algorithm == "norm":
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        elif clip:
            nn.utils.clip_grad_value_(plain.parameters(), clip)
        optimizer.step()
        scheduler.step()
    state = {name: whole(value) for name, value in module.state_dict().items()}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, state["net.inp.weight"].tolist())
    assert gathered[0] == gathered[1]
    return [name for name, value in plain.state_dict().items() if not torch.allclose(value, state[name], atol=1e-5)]


@pytest.mark.parametrize(
    ("clip", "algorithm", "by_name"), [(None, "norm", True), (0.05, "norm", False), (0.002, "value", False)]
)
def test_ignored_modules_are_averaged_and_clipped_with_the_shards(
    results_of: ResultsOf, clip: float | None, algorithm: str, by_name: bool
) -> None:
    assert results_of("ignore_a_module", clip, algorithm, by_name) == [[], []]


class Scaled(Net):
    """A net with a logit scale, as in CLIP, and a scalar gate in every block; built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        for block in self.blocks:
            block.gate = nn.Parameter(torch.rand(()))
            block.register_forward_hook(lambda block, args, output: args[0] + block.gate * output)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.logit_scale.exp()


class Late(Regression):
    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = Scaled()
            self.net.blocks[0].gate.requires_grad_(False)

    def on_train_start(self) -> None:
        self.net.blocks[0].gate.requires_grad_(True)


def scalars() -> list[str]:
    """Trains a model with scalar parameters, one frozen until training starts, twice, and by hand.

    Returns:
        The names of the parameters that differ.
    """
    rank, size = rank_and_size()
    torch.manual_seed(0)
    plain = Regression(Scaled())
    torch.manual_seed(0)
    module = Late()
    for _ in range(2):
        trainer(gradient_clip_val=0.5).fit(module, batches(3, rank, size))
        optimizer = plain.configure_optimizers()["optimizer"]
        own = [batches(3, other, size) for other in range(size)]
        for number in range(3):
            optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** (number // 2)
            optimizer.zero_grad()
            for data in own:
                (F.mse_loss(plain.net(data[number][0]), data[number][1]) / size).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
    state = {name: whole(value) for name, value in module.state_dict().items()}
    assert not isinstance(module.net.logit_scale, DTensor) and isinstance(module.net.out.weight, DTensor)
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, [value.item() for value in state.values() if not value.dim()])
    assert everywhere[0] == everywhere[1]
    return [name for name, value in plain.state_dict().items() if not torch.allclose(value, state[name], atol=1e-4)]


def test_scalar_parameters_stay_unsharded(results_of: ResultsOf) -> None:
    assert results_of("scalars") == [[], []]


# manual optimization --------------------------------------------------------------------------------------------------
class TwoNets(Regression):
    """Two networks with an optimizer each, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Net(depth=2)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        first.zero_grad()
        self.manual_backward(F.mse_loss(self.net(x), y))
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        second.zero_grad()
        self.manual_backward(F.mse_loss(self.other(x), self.net(x).detach()))
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (self.net, self.other)]


def by_hand_twice(data: Any) -> TwoNets:
    torch.manual_seed(0)
    module = TwoNets()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for net in (module.net, module.other):
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    first, second = module.configure_optimizers()
    for x, y in data:
        first.zero_grad()
        F.mse_loss(module.net(x), y).backward()
        nn.utils.clip_grad_norm_(module.net.parameters(), 0.1)
        first.step()
        second.zero_grad()
        F.mse_loss(module.other(x), module.net(x).detach()).backward()
        second.step()
    return module


def manual() -> list[str]:
    data = batches(5, *rank_and_size())
    torch.manual_seed(0)
    module = TwoNets()
    trainer().fit(module, data)
    return differences(module, by_hand_twice(data))


def manual_with_a_parameter() -> None:
    module = TwoNets()
    module.scale = nn.Parameter(torch.ones(1))
    trainer().fit(module, batches(1, *rank_and_size()))


def test_manual_optimization_steps_two_optimizers(results_of: ResultsOf) -> None:
    assert results_of("manual") == [[], []]
    with pytest.raises(
        AssertionError, match="'scale' belongs to the module itself, and in manual optimization FSDP shards each child"
    ):
        run_world(2, manual_with_a_parameter)


# dtypes ---------------------------------------------------------------------------------------------------------------
def overflow_on_one_rank() -> tuple[float, list[int], str]:
    """Trains in fp16; rank 1's second batch overflows, and both ranks skip that step and halve the scale."""
    rank, size = rank_and_size()
    data = batches(3, rank, size)
    if rank == 1:
        data[1] = (data[1][0], torch.full_like(data[1][1], 1e30))
    torch.manual_seed(0)
    module, plugin = Regression(), MixedPrecision("16", init_scale=64.0)
    seen: list[list[Tensor]] = []
    module.on_train_batch_end = lambda *_: seen.append([whole(p.detach()).clone() for p in module.parameters()])
    run = trainer(precision=plugin)
    run.fit(module, data)
    assert all(p.dtype == torch.float32 for p in module.parameters())
    moved = [int(not torch.equal(a, b)) for a, b in zip(seen[0], seen[1], strict=True)]
    later = [int(not torch.equal(a, b)) for a, b in zip(seen[1], seen[2], strict=True)]
    assert plugin.scaler is not None
    return plugin.scaler.get_scale(), [sum(moved), sum(later)], run.strategy.details


def test_all_shards_skip_a_step_that_overflows_on_one_rank(results_of: ResultsOf) -> None:
    for scale, (moved, later), details in results_of("overflow_on_one_rank"):
        assert scale == 32.0 and moved == 0 and later == 22
        assert details == "3 Block + root over 2 ranks, fp32 shards, gathered in fp16, reduced in fp32"


def true_dtypes(precision: str) -> list[Any]:
    torch.manual_seed(0)
    module = Regression()
    run = trainer(precision=precision)
    run.fit(module, batches(3, *rank_and_size()), batches(1, *rank_and_size()))
    assert run.strategy.details.startswith("3 Block + root over 2 ranks")
    finite = all(bool(torch.isfinite(whole(p)).all()) for p in module.parameters())
    return [str(module.dtype), finite, str(next(iter(run.optimizers[0].state.values()))["exp_avg"].dtype)]


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_parameters_have_the_precisions_dtype(results_of: ResultsOf, precision: str) -> None:
    dtype = {"bf16-true": "torch.bfloat16", "64-true": "torch.float64", "bf16-mixed": "torch.float32"}[precision]
    assert results_of("true_dtypes", precision) == [[dtype, True, dtype]] * 2


# ways to write a module -----------------------------------------------------------------------------------------------
class ByForward(Regression):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.mse_loss(self(batch[0]), batch[1])}


class ByParts(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = F.linear(batch[0], self.net.inp.weight, self.net.inp.bias)
        for block in self.net.blocks:
            x = block(x)
        return F.mse_loss(self.net.out(x), batch[1])


def styles() -> list[list[str]]:
    modules = []
    for kind in (Regression, ByForward, ByParts):
        torch.manual_seed(0)
        modules.append(kind())
        trainer(accumulate_grad_batches=2, precision="bf16-mixed").fit(modules[-1], batches(5, *rank_and_size()))
    return [differences(module, modules[0]) for module in modules[1:]]


def test_a_step_may_call_forward_or_single_parts_of_the_module(results_of: ResultsOf) -> None:
    assert results_of("styles") == [[[], []]] * 2


def tied() -> tuple[list[str], bool, str]:
    """Trains blocks that share a weight; returns differences from one process, whether still shared, and details."""
    rank, size = rank_and_size()
    modules = []
    for strategy in (FSDPStrategy(), "single_device"):
        torch.manual_seed(0)
        module = Summed()
        module.net.blocks[2].up.weight = module.net.blocks[0].up.weight
        own = [batches(4, other, size) for other in range(size)]
        joined = [(torch.cat([x for x, _ in pair]), torch.cat([y for _, y in pair])) for pair in zip(*own, strict=True)]
        run = trainer(strategy)
        run.fit(module, own[rank] if strategy != "single_device" else joined)
        if strategy != "single_device":
            details = run.strategy.details
        modules.append(module)
    still = modules[0].net.blocks[2].up.weight is modules[0].net.blocks[0].up.weight
    pairs = zip(modules[1].state_dict().items(), modules[0].state_dict().values(), strict=True)
    return [name for (name, a), b in pairs if not torch.allclose(a, whole(b), atol=1e-5)], still, details


def test_tied_blocks_stay_tied(results_of: ResultsOf) -> None:
    for differ, still, details in results_of("tied"):
        assert differ == [] and still
        assert details.startswith("1 Block + root") and "2 tied, kept in the root" in details


# ranks without samples ------------------------------------------------------------------------------------------------
class Summed(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def uneven(accumulate: int, count: int) -> tuple[list[str], float]:
    """Returns the differences from one process with the doubled batch, if one rank has no sample at the end."""
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    modules, losses = [], []
    for strategy, size in ((FSDPStrategy(), 4), ("single_device", 8)):
        torch.manual_seed(0)
        module = Summed()
        run = trainer(strategy, accumulate_grad_batches=accumulate, max_epochs=2, use_distributed_sampler=True)
        run.fit(module, DataLoader(data, size, shuffle=True), DataLoader(data, size))
        modules.append({name: whole(value.detach()) for name, value in module.state_dict().items()})
        losses.append(float(run.callback_metrics["val_loss"]))
    worst = [name for name, value in modules[0].items() if not torch.allclose(value, modules[1][name], atol=1e-5)]
    return worst, abs(losses[0] - losses[1])


@pytest.mark.parametrize(("accumulate", "count"), [(1, 17), (2, 9)])
def test_a_rank_without_samples_stays_in_step(results_of: ResultsOf, accumulate: int, count: int) -> None:
    for differ, distance in results_of("uneven", accumulate, count):
        assert differ == [] and distance < 1e-6


# unsupported settings -------------------------------------------------------------------------------------------------
UNSUPPORTED = {
    "Adafactor": "Adafactor takes means over whole rows and columns",
    "Muon": "Muon orthogonalizes whole matrices",
    "Rprop": "Rprop writes to single elements",
    "LBFGS": "LBFGS takes dot products over all parameters",
    "dtypes": "have several dtypes: LayerNorm.weight is float32, Linear.weight is bfloat16",
    "mesh": "device_mesh=(2, 2) does not match 2 ranks",
    "hsdp": "has 2 rank(s), 2 per machine: use 'fsdp'",
    "precision": "sharded by an earlier run",
    "window": "before the last batch of its accumulation window",
    "filler": "a rank has no sample of its own",
}


def error_messages() -> dict[str, str]:
    return {kind: error_message(kind) for kind in UNSUPPORTED}


def error_message(kind: str) -> str:
    """Returns the error of a strategy with an unsupported setting."""
    module, plugin = Regression(), None
    mesh: Any = {"mesh": (2, 2), "hsdp": "auto"}.get(kind)
    if kind == "dtypes":
        module.net.blocks[0].up.bfloat16()
    if kind == "precision":
        earlier = FSDPStrategy()
        earlier.setup_environment()
        earlier.setup_modules([module])
        plugin = MixedPrecision("bf16")
    strategy = FSDPStrategy(device_mesh=mesh, precision=plugin)
    try:
        strategy.setup_environment()
        strategy.setup_modules([module])
        matrices = [p for p in module.parameters() if p.ndim == 2]
        make = getattr(torch.optim, kind, torch.optim.SGD)
        [optimizer] = strategy.setup_optimizers([module], [make(matrices, lr=0.1)])
        if kind == "window":
            with strategy.gradient_sync(False):
                strategy.before_step(optimizer)
        elif kind == "filler":
            strategy.shadow_batch(module.training_step, None, (), Window())
    except LeydenError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_settings_raise(results_of: ResultsOf, kind: str) -> None:
    for found in results_of("error_messages"):
        assert UNSUPPORTED[kind] in found[kind]


def step_by_each_optimizer() -> dict[str, float]:
    """Returns how far shards are from whole parameters after three steps of each of torch's optimizers."""
    distance = {}
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        module, plain = Regression(), Regression()
        plain.load_state_dict(module.state_dict())
        strategy = FSDPStrategy()
        strategy.setup_environment()
        strategy.setup_modules([module])
        step = strategy.setup_step(module.training_step, module)
        [optimizer] = strategy.setup_optimizers([module], [getattr(torch.optim, name)(module.parameters(), lr=0.01)])
        other = getattr(torch.optim, name)(plain.parameters(), lr=0.01)
        for number, batch in enumerate(batches(3, 0, 1)):
            for stepper, function in ((optimizer, step), (other, plain.training_step)):
                stepper.zero_grad()
                function(batch, number).backward()
                stepper.step()
        pairs = zip(module.parameters(), plain.parameters(), strict=True)
        distance[name] = max(float((whole(a.detach()) - b.detach()).abs().max()) for a, b in pairs)
    return distance


OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD")


def test_torchs_optimizers_step_shards_like_whole_tensors(results_of: ResultsOf) -> None:
    for distance in results_of("step_by_each_optimizer"):
        assert distance == dict.fromkeys(OPTIMIZERS, 0.0)


# optimizers created before sharding -----------------------------------------------------------------------------------
def repoint() -> list[str]:
    """Trains with an optimizer created, and stepped, before sharding; returns the differences from one process."""
    rank, size = rank_and_size()
    data = batches(2, rank, size)
    modules = []
    for early in (True, False):
        torch.manual_seed(0)
        module, strategy = Regression(), FSDPStrategy()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        x, y = batches(1, 0, 1, seed=9)[0]
        F.mse_loss(module.net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if early:
            strategy.setup_environment()
            strategy.setup_modules([module])
            strategy.setup_optimizers([module], [optimizer])
            assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
            assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
            step = strategy.setup_step(module.training_step, module)
            for number, batch in enumerate(data):
                optimizer.zero_grad()
                step(batch, number).backward()
                optimizer.step()
        else:
            own = [batches(2, other, size) for other in range(size)]
            for number in range(2):
                optimizer.zero_grad()
                for part in own:
                    (F.mse_loss(module.net(part[number][0]), part[number][1]) / size).backward()
                optimizer.step()
        modules.append({name: whole(value.detach()) for name, value in module.state_dict().items()})
    return [name for name, value in modules[0].items() if not torch.allclose(value, modules[1][name], atol=1e-5)]


def test_optimizers_created_before_sharding_step_the_shards(results_of: ResultsOf) -> None:
    assert results_of("repoint") == [[], []]
