"""Experts divided over ranks: losses, weights and checkpoints are those of one process, whatever the layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mixture import PLAN, SGD, SPLIT_PLAN, TENSOR_PLAN, TOP_K, VOCABULARY, WIDTH, Mixture, data
from ranks.share import Messages
from ranks.world import run_world
from same import differences
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Accelerator, Trainer
from leyden.callbacks import ActivationCheckpointing, EMAWeightAveraging, ExpertBalancing
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError
from leyden.strategies import DDPStrategy, FSDPStrategy, MeshStrategy, balance_loss, routers_in_float32
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.precision import MixedPrecision

GLOBAL_BATCH, SAMPLES = 8, 27
"""The last global batch has 3 samples, so one of 4 ranks has none."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "AdamW": {"optimizer": functools.partial(torch.optim.AdamW, lr=0.01)},
    "accumulated": {"accumulate_grad_batches": 4},
    "by items": {"accumulate_grad_batches": 2, "by_items": True},
    "balanced": {"balances": 0.1},
    "weights scale inputs": {"scales_inputs": True},
    "experts without a token": {"starved": 2},
    "only experts train": {"trains": "experts"},
    "recomputed blocks": {"activation_checkpointing_policy": {"Block"}},
    "recomputed experts": {"activation_checkpointing_policy": {"Experts"}},
    "kept gathered": {"reshard_after_forward": False},
    "averaged": {"callbacks": "EMA"},
    "biased": {"callbacks": "balance", "accumulate_grad_batches": 2, "log_every_n_steps": 1},
    "biased, recomputed": {
        "callbacks": "balance",
        "log_every_n_steps": 1,
        "activation_checkpointing_policy": {"Block"},
        "starved": 1,
    },
    "recomputed by callback": {"callbacks": "checkpoint"},
    "clipped by value": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.02, "predicts_first": True},
    "watched": {"detect_anomaly": True},
    "scaled": {"precision": "scaled"},
    "single": {"precision": "32-true"},
    "half": {"precision": "bf16-mixed"},
    "half, float32 routers": {"precision": "bf16-mixed", "float32": True, "activation_checkpointing_policy": {"Block"}},
    "only half": {"precision": "bf16-true"},
}
"""Arguments of the module, the strategy and the Trainer."""
COMPILED = {"compiled": {"compile": True}}
ODD = {"an odd share": {"experts": 6}, "less than one": {"experts": 2}}
"""Experts per rank that the ranks which shard them do not divide."""
UNBIASED = {"unbiased": {"has_bias": False}}
TOLERANCE = {"single": 1e-5, "half": 0.05, "half, float32 routers": 0.05, "only half": 0.05, "scaled": 1e-3}
LOGITS = {
    "single": torch.float32,
    "half": torch.bfloat16,
    "half, float32 routers": torch.float32,
    "only half": torch.bfloat16,
    "scaled": torch.float16,
}
OF_STRATEGY = ("activation_checkpointing_policy", "compile", "reshard_after_forward")
OF_MODULE = ("experts", "has_bias", "scales_inputs", "starved", "jitter", "drift", "trains", "by_items", "balances")
OF_MODULE += ("float32", "optimizer")
Sizes = dict[str, int] | None


def train(sizes: Sizes, arguments: dict[str, Any], plan: dict[str, str]) -> dict[str, Any]:
    """Trains for an epoch; in one process if `sizes` is None."""
    given = {"precision": "64-true", **arguments}
    of_module = {name: given.pop(name) for name in OF_MODULE if name in given}
    of_strategy = {name: given.pop(name) for name in OF_STRATEGY if name in given}
    balancing = ExpertBalancing(0.05, per_expert=True)
    if "callbacks" in given:
        chosen: dict[str, Any] = {
            "EMA": EMAWeightAveraging(decay=0.9),
            "checkpoint": ActivationCheckpointing({"Block"}),
            "balance": balancing,
        }
        given["callbacks"] = chosen[given["callbacks"]]
    if given["precision"] == "scaled":
        # From a scale that no step overflows: otherwise ranks skip other steps than one process.
        given["precision"] = MixedPrecision("16", init_scale=256.0)
    predicts_first = given.pop("predicts_first", False)
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes, plan=plan, **of_strategy)
    torch.manual_seed(0)
    module, trainer = Mixture(**of_module), Trainer(strategy=strategy, **{**QUIET, "gradient_clip_val": 0.5, **given})
    readers = trainer.strategy.data_size
    if predicts_first:
        trainer.predict(module, DataLoader(data(3), GLOBAL_BATCH // readers))
    trainer.fit(module, DataLoader(data(SAMPLES), GLOBAL_BATCH // readers), max_epochs=1)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("experts/")}
    predicted = trainer.predict(module, DataLoader(data(3), GLOBAL_BATCH // readers)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "logged": logged,
        "dtypes": {block.logits_dtype for block in module.blocks},
        "counts": balancing.counts,
        "losses": module.losses[: SAMPLES // GLOBAL_BATCH],
        "weights": {name: tensor.double().numpy() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).double().numpy(),
        "held": sum(local(p).numel() for block in module.blocks for p in block.experts.parameters()),
    }


def train_all(layouts: list[tuple[Sizes, dict[str, Any], dict[str, str]]]) -> list[dict[str, Any]]:
    return [{name: train(sizes, own, plan) for name, own in cases.items()} for sizes, cases, plan in layouts]


@functools.cache
def expected(case: str) -> dict[str, Any]:
    return train(None, {**CASES, **COMPILED, **ODD, **UNBIASED}[case], {})


def check(ranks: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    for case in ranks[0]:
        single, tolerance = expected(case), TOLERANCE.get(case, 1e-9)
        if case != "by items":
            columns = zip(*(rank[case]["losses"] for rank in ranks), strict=True)
            means = [sum(column) / len(column) for column in columns]
            assert means == pytest.approx(single["losses"], abs=tolerance), case
        for rank in ranks:
            assert abs(rank[case]["predicted"] - single["predicted"]).max() < 10 * tolerance, case
            assert rank[case]["dtypes"] == {LOGITS.get(case, torch.float64)}, case
            assert rank[case]["counts"] == single["counts"], case
            assert rank[case]["logged"] == pytest.approx(single["logged"], abs=1e-6), case
            assert len(rank[case]["logged"]) == (16 if case.startswith("biased") else 0), case
            for name, value in single["weights"].items():
                exact = 0.0 if name.endswith("expert_bias") else tolerance
                assert abs(rank[case]["weights"][name] - value).max() <= exact, (case, name)
    shards = sizes.get("dp_shard", len(ranks))
    for case in ranks[0].keys() & {"plain", *ODD}:
        assert {rank[case]["held"] for rank in ranks} == {expected(case)["held"] // shards}, case


def only(*names: str) -> dict[str, dict[str, Any]]:
    return {name: CASES[name] for name in names}


SOME = only("plain", "accumulated", "balanced", "experts without a token", "recomputed blocks", "biased", "half")
WORLDS: dict[str, tuple[int, list[Any]]] = {
    "2": (2, [({"ep": 2}, CASES, PLAN)]),
    "4": (
        4,
        [
            ({"dp_shard": 4, "ep": 2}, SOME | ODD, PLAN),
            ({"ep": 4}, only("plain", "experts without a token"), PLAN),
            ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, only("plain"), PLAN),
            ({"dp_shard": 2, "ep": 2, "tp": 2}, only("accumulated"), TENSOR_PLAN | PLAN),
            ({"dp_shard": 2, "ep": 2, "tp": 2}, UNBIASED, SPLIT_PLAN | PLAN),
        ],
    ),
    "every case on 4": (4, [({"dp_shard": 4, "ep": 2}, CASES | COMPILED, PLAN), ({"ep": 4}, CASES, PLAN)]),
    "8": (
        8,
        [
            ({"dp_shard": 8, "ep": 4}, SOME, PLAN),
            ({"dp_replicate": 2, "dp_shard": 4, "ep": 2}, SOME, PLAN),
            ({"dp_shard": 4, "ep": 2, "tp": 2}, UNBIASED, SPLIT_PLAN | PLAN),
            ({"dp_replicate": 2, "dp_shard": 2, "ep": 2, "tp": 2}, UNBIASED, SPLIT_PLAN | PLAN),
        ],
    ),
}
"""Ranks, and the sizes, cases and plan of each mesh on them."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["2", "4", *(pytest.param(n, marks=pytest.mark.full) for n in [*WORLDS][2:])])
def test_experts_train_like_one_process(name: str) -> None:
    world, layouts = WORLDS[name]
    found = run_world(world, train_all, layouts, timeout=600)
    for number, (sizes, _, _) in enumerate(layouts):
        check([rank[number] for rank in found], sizes)


NOISES: dict[str, dict[str, Any]] = {"jitter": {"jitter": 0.5}, "drift": {"drift": 0.5}}


def recomputed() -> dict[str, list[dict[str, Any]]]:
    """Trains with noisy routers, without and with activation checkpointing. Adds the number of all-to-alls."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, noise in NOISES.items():
        for policy in (None, {"Block"}):
            with Messages() as messages:
                run = train({"ep": 2}, {**noise, "activation_checkpointing_policy": policy}, PLAN)
            found.setdefault(name, []).append({**run, "sent": messages.counts["all_to_all_single"]})
    return found


def test_a_recomputed_block_routes_as_in_its_forward_pass_and_sends_nothing_again() -> None:
    for rank in run_world(2, recomputed):
        for name, (plain, again) in rank.items():
            assert len(plain["losses"]) == SAMPLES // GLOBAL_BATCH
            assert again["losses"] == plain["losses"], name
            assert not differences(again["weights"], plain["weights"]), name
            assert again["sent"] == plain["sent"] > 0, name


LAYOUTS: dict[str, Any] = {
    "ep": lambda: MeshStrategy(ep=2, plan=PLAN),
    "fsdp": FSDPStrategy,
    "tp": lambda: MeshStrategy(tp=2, plan={**SPLIT_PLAN, "blocks.*.experts": "experts"}),
    "ep × tp": lambda: MeshStrategy(ep=2, tp=2, plan=SPLIT_PLAN | PLAN),
    "ddp": DDPStrategy,
    "one process": lambda: "single_device",
}


def steps(layout: str, until: int, load: str | None = None, save: str | None = None) -> dict[str, Any]:
    """Trains to a step, from a checkpoint or from the start. Returns the weights."""
    torch.manual_seed(0 if load is None else 9)
    module = Mixture(has_bias=False, optimizer=functools.partial(torch.optim.AdamW, lr=0.01))
    balancing = ExpertBalancing(0.02)
    trainer = Trainer(**QUIET, strategy=LAYOUTS[layout](), precision="64-true", max_epochs=-1, callbacks=balancing)
    loader = DataLoader(data(16), GLOBAL_BATCH // trainer.strategy.data_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=load, max_steps=until)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: t.numpy().copy() for name, t in trainer.strategy.full_state_dict(module, rank0_only=False).items()}


def save_and_resume(folder: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Saves under ep; each layout loads the save of the one before, and saves it again.

    Returns the weights of a longer run under ep, and those of runs that continue the first save under each layout.
    """
    steps("ep", 3, save=f"{folder}/first")
    before = "first"
    for layout in ("fsdp", "tp", "ep × tp", "ddp", "ep"):
        steps(layout, 3, load=f"{folder}/{before}", save=f"{folder}/{layout}")
        before = layout
    layouts = [name for name in LAYOUTS if name != "one process"]
    return steps("ep", 6), {name: steps(name, 6, load=f"{folder}/first") for name in layouts}


def test_checkpoints_move_between_layouts_bit_for_bit(tmp_path: Path) -> None:
    for whole, resumed in run_world(4, save_and_resume, str(tmp_path)):
        assert not differences(resumed["ep"], whole), "a resume on the same layout is not exact"
    steps("one process", 3, load=str(tmp_path / "first"), save=str(tmp_path / "one process"))
    first = CheckpointReader(tmp_path / "first")
    others = [path for path in tmp_path.iterdir() if path.name != "first"]
    assert len(others) == 6
    for path in others:
        other = CheckpointReader(path)
        assert not differences(dict(sorted(other.model().items())), dict(sorted(first.model().items()))), path
        assert not differences(states_in(other.optimizers()), states_in(first.optimizers())), path
    single = steps("one process", 6, load=str(tmp_path / "first"))
    assert any(value.any() for name, value in single.items() if name.endswith("expert_bias"))
    for layout, weights in resumed.items():
        for name, value in weights.items():
            exact = 0.0 if name.endswith("expert_bias") else 1e-9
            assert abs(single[name] - value).max() <= exact, (layout, name)


def states_in(optimizers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns the tensors of the optimizers' states, by parameter and name."""
    [optimizer] = optimizers
    return {f"{key} {name}": value for key, own in sorted(optimizer["state"].items()) for name, value in own.items()}


def own_loop(strategy: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Mixture().double()
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(data(24), GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(module, SGD(module.parameters()), loader)
    for tokens, labels in loader:
        with accelerator.accumulate(model):
            logits, _ = model(tokens)
            accelerator.backward(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.numpy() for name, tensor in accelerator.get_state_dict(model).items()}


def own_loop_of_experts() -> dict[str, Any]:
    return own_loop(MeshStrategy(ep=2, plan=PLAN))


def test_experts_in_a_loop_of_ones_own() -> None:
    single = own_loop("single_device")
    # The main rank has the state.
    found = run_world(2, own_loop_of_experts)[0]
    assert found.keys() == single.keys()
    assert all(abs(found[name] - value).max() < 1e-9 for name, value in single.items())


def test_the_balance_loss_is_that_of_transformers() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(0)
    layers = tuple(torch.randn(12, 4) for _ in range(2))
    mask = torch.ones(2, 6)
    mask[0, :2] = 0
    for own, given in ((None, None), (mask.flatten().repeat(2), mask)):
        probabilities = torch.cat(layers).softmax(-1)
        found = balance_loss(probabilities, probabilities.topk(TOP_K).indices, mask=own)
        assert float(found) == pytest.approx(float(mixtral.load_balancing_loss_func(layers, 4, TOP_K, given)), rel=1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "mixed qwen", "deepseek"])
def test_routers_of_transformers_have_16_bit_logits_under_mixed_precision_unless_told_otherwise(kind: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    from ranks.test_mesh_transformers import MODELS

    tokens = torch.arange(VOCABULARY)[None, : WIDTH // 2]
    found: list[Any] = []
    for widens in (False, True):
        torch.manual_seed(0)
        model = MODELS[kind]()
        names = [name for name, _ in model.named_modules() if name.endswith("gate")]
        assert not widens or routers_in_float32(model) == names
        router = model.get_submodule(names[-1])
        router.register_forward_hook(lambda router, inputs, outputs: found.append((inputs[0], outputs[0])))
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=tokens, labels=tokens).loss.backward()
        assert router.weight.grad.any()
    (_, narrow), (inputs, wide) = found
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    expected = nn.functional.linear(inputs.detach().float().flatten(0, -2), router.weight)
    assert torch.equal(wide.view_as(expected), expected)
    with pytest.raises(ConfigurationError, match="no module with parameters that is named 'router'"):
        routers_in_float32(model, ("router",))


LOGITS_BY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": nn.functional.linear,
    "@": lambda x, weight: x @ weight.T,
    "matmul": lambda x, weight: torch.matmul(x, weight.T),
    "mm": lambda x, weight: x.mm(weight.T),
    "einsum": lambda x, weight: torch.einsum("td,ed->te", x, weight),
}


class Router(nn.Module):
    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.logits, self.weight = logits, nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x, self.weight)


@pytest.mark.parametrize("how", LOGITS_BY)
def test_a_router_of_ones_own_has_float32_logits(how: str) -> None:
    model = nn.ModuleDict({"router": Router(LOGITS_BY[how])}).bfloat16()
    routers_in_float32(model)
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    expected = nn.functional.linear(x.float(), model["router"].weight.float())
    torch.testing.assert_close(model["router"](x), expected)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.zeros(4, 2, 2)), nn.Parameter(torch.zeros(2))


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Three(Short):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(3, 2, 2))


class Pretrained(nn.Module):
    """As transformers' models: the config asks for a balance loss."""

    class config:
        output_router_logits, router_aux_loss_coef = True, 0.01

    def __init__(self) -> None:
        super().__init__()
        self.experts = Mixture().blocks[0].experts


EP2 = functools.partial(MeshStrategy, ep=2)
MISTAKES: dict[str, tuple[Any, nn.Module]] = {
    "ep=0: use a number of ranks from 1.": (lambda: MeshStrategy(ep=0), nn.Linear(1, 1)),
    "ep=2 does not divide dp_shard=1: experts are divided": (lambda: EP2(dp_shard=1, tp=2), nn.Linear(1, 1)),
    "does not divide dp_shard=1 (dp_replicate=2 copies": (lambda: EP2(dp_replicate=2, dp_shard=1), nn.Linear(1, 1)),
    "ep=2 needs a plan of the experts": (EP2, Mixture()),
    "a ReLU has no parameters": (lambda: EP2(plan={"0": "expert_parallel"}), nn.Sequential(nn.ReLU())),
    "has parameters in submodules (up.weight)": (lambda: EP2(plan={"0": "expert_parallel"}), nn.Sequential(Nested())),
    "different first dimensions (up (4, 2, 2), scale (2,))": (
        lambda: EP2(plan={"0": "expert_parallel"}),
        nn.Sequential(Shared()),
    ),
    "a forward that does not take three arguments": (
        lambda: EP2(plan={"0": "expert_parallel"}),
        nn.Sequential(Short()),
    ),
    "'0' has 3 experts, which ep=2 does not divide": (
        lambda: EP2(plan={"0": "expert_parallel"}),
        nn.Sequential(Three()),
    ),
    "output_router_logits=True, which adds a balance loss": (
        lambda: EP2(plan={"experts": "expert_parallel"}),
        Pretrained(),
    ),
}


def errors() -> dict[str, tuple[str, bool]]:
    """Returns the error of each mistake, and whether the weights are unchanged."""
    found = {}
    for message, (make, module) in MISTAKES.items():
        before = [(p, p.detach().clone()) for p in module.parameters()]
        try:
            strategy = make()
            strategy.setup_environment()
            strategy.setup_modules([module])
            text = "no error"
        except ConfigurationError as error:
            text = str(error)
        after = list(module.parameters())
        found[message] = text, all(p is q and torch.equal(p, w) for q, (p, w) in zip(after, before, strict=True))
    calls: dict[str, Callable[[], Any]] = {
        "'0' is called with tensors of shapes (2, 3, 16), (6, 2), (6, 2)": call_with_batches,
        "balance_loss with strategy='ddp'": balance_under_ddp,
        "code has changed one of these tensors in place": change_in_place,
    }
    for message, call in calls.items():
        with pytest.raises(ConfigurationError) as raised:
            call()
        found[message] = str(raised.value), True
    return found


def call_with_batches() -> None:
    strategy, model = EP2(plan={"0": "expert_parallel"}), nn.Sequential(Mixture().blocks[0].experts)
    strategy.setup_environment()
    strategy.setup_modules([model])
    model[0](torch.zeros(2, 3, 16), torch.zeros(6, 2, dtype=torch.long), torch.zeros(6, 2))


class InPlace(Short):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        x.mul_(2)
        return x + self.up.sum()


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = InPlace()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.experts(2 * x, torch.arange(4).view(4, 1), torch.ones(4, 1))
        return outputs.mul_(2).square()


def change_in_place() -> None:
    policy = {"activation_checkpointing_policy": {"Changing"}}
    strategy, model = EP2(plan={"0.experts": "expert_parallel"}, **policy), nn.Sequential(Changing())
    strategy.setup_environment()
    strategy.setup_modules([model])
    model(torch.ones(4, 2)).sum().backward()


def balance_under_ddp() -> None:
    strategy = DDPStrategy()
    strategy.setup_environment()
    balance_loss(torch.ones(2, 2), torch.zeros(2, 1, dtype=torch.long), strategy)


def test_mistakes_raise_the_same_error_on_every_rank() -> None:
    first, second = run_world(2, errors)
    assert first == second and len(first) == len(MISTAKES) + 3
    for message, (text, unchanged) in first.items():
        assert message in text
        assert unchanged, message
