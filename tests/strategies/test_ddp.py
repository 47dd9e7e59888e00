"""DDP on two ranks matches a hand-written script bit for bit, with every option of torch's DDP."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.strategies import find_strategy
from leyden.strategies.ddp import DDPStrategy

CLIP = 0.05
BATCHES, SIZE = 7, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(SIZE, 6, generator=generator), torch.randint(0, 3, (SIZE,), generator=generator))
        for _ in range(BATCHES)
    ]


def cross_entropy(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


class Module(TrainModule):
    """Trains `net` with the optimizers of a case."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.net, self.case = Net(), case

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizers, scheduler = optimizers_of(self.net, self.case)
        if scheduler is not None:
            return [optimizers[0]], [{"scheduler": scheduler, "interval": "step"}]
        return optimizers


def optimizers_of(net: Net, case: str) -> tuple[list[Any], Any]:
    if case == "two optimizers":
        return [torch.optim.SGD(net.first.parameters(), 0.1), torch.optim.AdamW(net.second.parameters(), 0.01)], None
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return [optimizer], torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Trainer arguments, DDP arguments
    "plain": ({}, {}),
    "accumulation": ({"accumulate_grad_batches": 3}, {}),
    "clipping": ({"gradient_clip_val": CLIP, "accumulate_grad_batches": 2}, {}),
    "bf16": ({"precision": "bf16-mixed"}, {}),
    "two optimizers": ({}, {}),
    "static graph": ({"accumulate_grad_batches": 2}, {"static_graph": True, "gradient_as_bucket_view": True}),
    "small buckets": ({}, {"bucket_cap_mb": 0.0001, "broadcast_buffers": False}),
    "unused": ({}, {"find_unused_parameters": True}),
}


def by_hand(case: str, rank: int, epochs: int = 2) -> dict[str, Tensor]:
    """The script that a careful user would write with torch alone."""
    arguments, ddp_arguments = CASES[case]
    torch.manual_seed(3)
    net = Net()
    ddp = DistributedDataParallel(net, **ddp_arguments)
    optimizers, scheduler = optimizers_of(net, case)
    accumulate = arguments.get("accumulate_grad_batches", 1)
    context = torch.autocast("cpu", torch.bfloat16) if case == "bf16" else contextlib.nullcontext()
    for epoch in range(epochs):
        for number, batch in enumerate(batches(rank)):
            start = number - number % accumulate
            length = min(accumulate, BATCHES - start)
            closes = number == start + length - 1
            if number == start:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            # torch learns a static graph in a synced backward, and aborts if the first one is not synced.
            syncs = closes or (case == "static graph" and (epoch, number) == (0, 0))
            with contextlib.nullcontext() if syncs else ddp.no_sync():
                with context:
                    loss = cross_entropy(ddp, batch)
                (loss / length).backward()
            if not closes:
                continue
            for optimizer in optimizers:
                if "gradient_clip_val" in arguments:
                    nn.utils.clip_grad_norm_(net.parameters(), CLIP)
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
    del ddp
    return net.state_dict()


def trainer(**arguments: Any) -> Trainer:
    return Trainer(**{**QUIET, "max_epochs": 2, "use_distributed_sampler": False, **arguments})


def digest(state: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def weights(module: Module) -> dict[str, Tensor]:
    return {name.removeprefix("net."): value for name, value in module.state_dict().items()}


def compare(case: str) -> tuple[list[str], str]:
    """Returns the tensors that differ from the hand-written script's, and a digest of this rank's parameters."""
    arguments, ddp_arguments = CASES[case]
    run = trainer(strategy=DDPStrategy(**ddp_arguments), **arguments)
    torch.manual_seed(3)
    module = Module(case)
    run.fit(module, batches(run.global_rank))
    ours, theirs = weights(module), by_hand(case, run.global_rank)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])], digest(parameters)


def compare_all() -> dict[str, tuple[list[str], str]]:
    return {case: compare(case) for case in CASES}


@pytest.fixture(scope="module")
def compared() -> list[dict[str, tuple[list[str], str]]]:
    """Results of every case on each rank, from one world, since starting ranks takes seconds."""
    return run_world(2, compare_all)


@pytest.mark.parametrize("case", CASES)
def test_weights_match_the_hand_written_script_bit_for_bit(
    case: str, compared: list[dict[str, tuple[list[str], str]]]
) -> None:
    (wrong, first), (wrong_too, second) = (found[case] for found in compared)
    assert not wrong and not wrong_too
    assert first == second


# manual optimization --------------------------------------------------------------------------------------------------
class Manual(Module):
    """Two optimizers as in a GAN, with two backward passes into one net and manual accumulation for the other."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        self.other = nn.Linear(6, 3)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.AdamW(self.other.parameters(), 0.01)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(cross_entropy(self.net, batch))
        self.manual_backward(0.3 * self.net(batch[0]).square().mean())
        self.clip_gradients(first, CLIP)
        first.step()
        if batch_idx % 2 == 0:
            second.zero_grad()
        with self.trainer.strategy.gradient_sync(batch_idx % 2 == 1):
            self.manual_backward(cross_entropy(self.other, batch) / 2)
        if batch_idx % 2 == 1:
            second.step()


def manual_by_hand(rank: int) -> list[Tensor]:
    torch.manual_seed(3)
    net, other = Net(), nn.Linear(6, 3)
    first, second = torch.optim.SGD(net.parameters(), 0.1), torch.optim.AdamW(other.parameters(), 0.01)

    def average(module: nn.Module) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
            dist.all_reduce(parameter.grad)

    for _ in range(2):
        for number, batch in enumerate(batches(rank)):
            for buffer in net.buffers():
                dist.broadcast(buffer, 0)
            first.zero_grad()
            cross_entropy(net, batch).backward()  # type: ignore[no-untyped-call]
            average(net)
            (0.3 * net(batch[0]).square().mean()).backward()
            average(net)
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            first.step()
            if number % 2 == 0:
                second.zero_grad()
            (cross_entropy(other, batch) / 2).backward()
            if number % 2 == 1:
                average(other)
                second.step()
    return [*net.state_dict().values(), *other.state_dict().values()]


def compare_manual() -> tuple[list[int], str]:
    run = trainer(strategy="ddp")
    torch.manual_seed(3)
    module = Manual("plain")
    run.fit(module, batches(run.global_rank))
    theirs = manual_by_hand(run.global_rank)
    ours = list(module.state_dict().values())
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    wrong = [i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(one, other)]
    # Unsynced gradients of `other` are sent with the next synced backward of any module, so they are averaged twice,
    # which rounds differently.
    assert all(
        torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(ours[-2:], theirs[-2:], strict=True)
    )
    return [i for i in wrong if i < len(ours) - 2], digest(parameters)


def test_manual_optimization_syncs_each_backward() -> None:
    (wrong, first), (wrong_too, second) = run_world(2, compare_manual)
    assert not wrong and not wrong_too
    assert first == second


# communication --------------------------------------------------------------------------------------------------------
class OwnBackward(TrainModule):
    """Manual optimization with the user's own `loss.backward()`, twice per step, and with clipping."""

    automatic_optimization = False

    def __init__(self, mixes: bool, accumulates: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.mixes, self.accumulates = mixes, accumulates

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        steps = not self.accumulates or batch_idx % 2 == 1
        with self.trainer.strategy.gradient_sync(steps):
            self.second(self.first(batch[0]).tanh()).square().mean().backward()
            loss = self.first(batch[0]).pow(3).mean()
            if self.mixes:
                self.manual_backward(loss)
            else:
                loss.backward()
        with self.trainer.strategy.gradient_sync(False):
            # Exchanged with the others, though none of its own is asked for.
            (0.1 * self.second(batch[0][:, :1].expand(-1, 8)).square().mean()).backward()
        if steps:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step_by_own_backward() -> list[dict[str, Any]]:
    found = []
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(5))
    for mixes, accumulates in ((False, False), (True, False), (False, True), (True, True)):
        torch.manual_seed(3)
        module = OwnBackward(mixes, accumulates)
        run = Trainer(strategy="ddp" if dist.is_torchelastic_launched() else "auto", max_epochs=1, **QUIET)
        run.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 4 // run.world_size))
        found.append({name: value.numpy().copy() for name, value in module.state_dict().items()})
    return found


def test_gradients_of_the_users_own_backward_are_averaged_before_the_step() -> None:
    expected = step_by_own_backward()
    first, second = run_world(2, step_by_own_backward)
    for ours, theirs, single in zip(first, second, expected, strict=True):
        for name, value in single.items():
            assert (ours[name] == theirs[name]).all(), name
            assert abs(ours[name] - value).max() < 1e-6, name


def count_bytes(accumulate: int) -> list[tuple[int, int]]:
    """Returns for each batch its index in the window and the bytes of gradients sent."""
    sent: list[tuple[int, int]] = []

    def counting(state: Any, bucket: Any) -> Any:
        number, size = sent[-1]
        sent[-1] = number, size + bucket.buffer().numel() * bucket.buffer().element_size()
        return default_hooks.allreduce_hook(state, bucket)

    class Counted(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            sent.append((self.trainer.window.index, 0))

    run = trainer(strategy=DDPStrategy(ddp_comm_hook=counting), accumulate_grad_batches=accumulate, max_epochs=1)
    run.fit(Counted("plain"), batches(run.global_rank))
    return sent


def test_gradients_are_sent_only_at_the_end_of_a_window() -> None:
    size = sum(p.numel() for p in Net().parameters()) * 4
    expected = [(0, 0), (1, 0), (2, size), (0, 0), (1, 0), (2, size), (0, size)]
    assert run_world(2, count_bytes, 3) == [expected, expected]


def run_hook(hook: str, wrapped: bool) -> tuple[float, str]:
    wrapper = default_hooks.fp16_compress_wrapper if wrapped else None
    run = trainer(strategy=DDPStrategy(ddp_comm_hook=hook, ddp_comm_wrapper=wrapper))
    torch.manual_seed(3)
    module = Module("plain")
    run.fit(module, batches(run.global_rank))
    exact = by_hand("plain", run.global_rank)
    ours = weights(module)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    error = max(float((ours[name] - exact[name]).abs().max()) for name in exact if exact[name].is_floating_point())
    return error, digest(parameters)


@pytest.mark.parametrize("hook", ["bf16", "powersgd"])
def test_communication_hooks_survive_pickling(hook: str) -> None:
    wrapper = default_hooks.fp16_compress_wrapper
    for strategy in (DDPStrategy(ddp_comm_hook=hook), DDPStrategy(ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)):
        copy = pickle.loads(pickle.dumps(strategy))
        assert copy._wrapping.hook[1]._hook is strategy._wrapping.hook[1]._hook
        assert copy._wrapping.hook[1]._wrapper is strategy._wrapping.hook[1]._wrapper


HOOKS = [("fp16", False, 2e-2), ("bf16", False, 5e-2), ("powersgd", False, 0.0), ("powersgd", True, 2e-2)]


def run_hooks() -> list[tuple[float, str]]:
    return [run_hook(hook, wrapped) for hook, wrapped, _ in HOOKS]


def test_communication_hooks_are_chosen_by_name() -> None:
    for (_, _, tolerance), (error, first), (_, second) in zip(HOOKS, *run_world(2, run_hooks), strict=True):
        assert first == second
        # PowerSGD does not compress before its step 1000; compressed results are close, but not equal.
        assert error <= tolerance and (error > 0) == (tolerance > 0)


# start, buffers, short windows ----------------------------------------------------------------------------------------
def fit_from_different_weights() -> tuple[list[float], str, list[str]]:
    """Fits from different weights on each rank; returns sums in on_fit_start, digests after fit and in validation."""
    seen: list[float] = []
    digests: list[str] = []

    class RecordingModule(Module):
        def on_fit_start(self) -> None:
            seen.append(float(self.net.first.weight.detach().sum()))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            digests.append(digest(self.state_dict()))

    run = trainer(strategy="ddp", max_epochs=1, num_sanity_val_steps=0)
    torch.manual_seed(run.global_rank)
    module = RecordingModule("plain")
    run.fit(module, batches(run.global_rank), batches(0)[:1])
    torch.manual_seed(10 + run.global_rank)
    run.validate(RecordingModule("plain"), batches(0)[:1], verbose=False)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    return seen, digest(parameters), digests


def test_all_ranks_start_and_validate_with_rank_0s_weights_and_buffers() -> None:
    first, second = run_world(2, fit_from_different_weights)
    assert first == second
    assert len(first[2]) == 2


class ShortLoader:
    """A loader that reports 6 batches and yields 4."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(self.rank)[:4])


class SGDModule(Module):
    """Trains with SGD, since Adam amplifies gradients that are only rounding errors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


def end_early() -> list[list[float]]:
    """Returns the weights after a loader that ends early, and after one that reports its true length."""
    found = []
    for short in (True, False):
        run = trainer(strategy="ddp", max_epochs=1, accumulate_grad_batches=3)
        torch.manual_seed(3)
        module = SGDModule("plain")
        loader: Any = ShortLoader(run.global_rank) if short else batches(run.global_rank)[:4]
        with pytest.warns(UserWarning, match="6 batches but ended after 4") if short else contextlib.nullcontext():
            run.fit(module, loader)
        found.append([value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()])
    return found


def test_a_window_cut_short_by_its_loader_is_synced() -> None:
    (short, known), (other, _) = run_world(2, end_early)
    assert short == other
    # Divided by three and multiplied by three again, so equal up to rounding.
    assert short == pytest.approx(known, rel=1e-5, abs=1e-6)


class Stream:
    """Batches without a length, and without a sampler that could be sharded."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def sized(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


UNEVEN: dict[str, tuple[list[Any], list[Any]]] = {
    # One stream that both ranks read, and the global batches of a run.
    "shared": (sized(4, 4, 4, 4, 4), [(0, 1), (2, 3), (4,)]),
    # A stream per rank, of which rank 1's ends first: 0 1 2 on rank 0, 3 on rank 1.
    "per rank": (sized(2, 4, 3, 4), [(0, 3), (1,), (2,)]),
}


class Linear(Module):
    """Without batch norm, whose statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.net = nn.Linear(6, 3)  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


def fit_uneven() -> dict[str, tuple[int, list[float]]]:
    found = {}
    for name, (data, _) in UNEVEN.items():
        run = trainer(strategy="ddp", max_epochs=1, use_distributed_sampler=name == "shared")
        torch.manual_seed(3)
        module = Linear()
        stream = data if name == "shared" else data[:3] if run.global_rank == 0 else data[3:]
        run.fit(module, Stream(stream))
        found[name] = (
            run.global_step,
            [value for p in module.parameters() for value in p.detach().flatten().tolist()],
        )
    return found


def test_uneven_ranks_match_training_on_the_global_batches() -> None:
    first, second = run_world(2, fit_uneven)
    assert first == second
    for name, (data, groups) in UNEVEN.items():
        torch.manual_seed(3)
        net = Linear().net
        for group in groups:
            x, y = (torch.cat([data[number][part] for number in group]) for part in (0, 1))
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
        steps, weights = first[name]
        assert steps == len(groups)
        assert weights == pytest.approx([v for p in net.parameters() for v in p.detach().flatten().tolist()], abs=1e-6)


class PartlyUsed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.first(batch[0]).mean()  # type: ignore[no-any-return]


def leave_parameters_unused(strategy: str) -> str:
    run = trainer(strategy=strategy, max_epochs=1)
    run.fit(PartlyUsed("plain"), batches(run.global_rank))
    return "fine"


def test_unused_parameters_raise_unless_ddp_looks_for_them() -> None:
    assert run_world(2, leave_parameters_unused, "ddp_find_unused_parameters_true") == ["fine", "fine"]
    messages = run_world(2, leave_parameters_unused, "ddp", may_fail=True)
    assert any("strategy='ddp_find_unused_parameters_true'" in str(message) for message in messages), messages


class LBFGSModule(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, line_search_fn="strong_wolfe")


def fit_lbfgs() -> str:
    run = trainer(strategy="ddp", max_epochs=1)
    torch.manual_seed(3)
    module = LBFGSModule("plain")
    run.fit(module, batches(run.global_rank))
    return digest({name: value.detach() for name, value in module.named_parameters()})


def test_lbfgs_takes_the_same_step_on_all_ranks() -> None:
    first, second = run_world(2, fit_lbfgs)
    assert first == second


# arguments ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"static_grap": True}, "no argument 'static_grap'. Did you mean 'static_graph'"),
        ({"device_ids": [0]}, "device_ids=….*the strategy sets device_ids itself"),
        ({"ddp_comm_hook": "fp17"}, "ddp_comm_hook='fp17' is not known. Did you mean 'fp16'"),
        ({"ddp_comm_state": 3}, "need a ddp_comm_hook"),
        ({"start_method": "forks"}, "start_method='forks' is not known. Did you mean 'fork'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        DDPStrategy(**arguments)


def test_strategy_names_set_start_method_and_find_unused_parameters() -> None:
    for name, start in (("ddp", "script"), ("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "notebook")):
        for ending, expected in (
            ("", {}),
            ("_find_unused_parameters_true", True),
            ("_find_unused_parameters_false", False),
        ):
            strategy = find_strategy(f"{name}{ending}", "cpu", 2)
            assert isinstance(strategy, DDPStrategy) and strategy.ranks.start_method == start
            assert strategy.ddp_arguments == ({"find_unused_parameters": expected} if ending else {})


def test_sync_batchnorm_is_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigurationError, match="sync_batchnorm=True needs GPUs.*does not run on the CPU"):
        trainer(strategy="ddp", devices=2, sync_batchnorm=True)
    assert trainer(sync_batchnorm=True).world_size == 1
