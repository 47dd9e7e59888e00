"""Mistakes with a pipeline: one clear error before the first step, the same on both ranks, and no weight changes."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Trainer, TrainModule
from leyden.core.errors import ConfigurationError
from leyden.strategies import MeshStrategy
from leyden.strategies.window import Window

Mistake = Callable[[GPT], MeshStrategy]
PP2 = functools.partial(MeshStrategy, pp=2, dp_shard=1, microbatches=2)
MISTAKES: dict[str, tuple[str, Mistake]] = {}


def mistake(message: str) -> Callable[[Mistake], Mistake]:
    """Registers a function that makes a mistake with a module and returns the strategy."""

    def register(function: Mistake) -> Mistake:
        MISTAKES[function.__name__] = (message, function)
        return function

    return register


def replace(module: GPT, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method of one module."""
    setattr(module, name, types.MethodType(function, module))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


# cutting the model ----------------------------------------------------------------------------------------------------
@mistake("pipeline_module='block' is not a module of the model. Did you mean 'blocks'?")
def a_pipeline_module_that_does_not_exist(module: GPT) -> MeshStrategy:
    return PP2(pipeline_module="block")


@mistake("'norm' has no nn.ModuleList or nn.Sequential of several blocks for a pipeline to cut")
def a_pipeline_module_without_a_list(module: GPT) -> MeshStrategy:
    return PP2(pipeline_module="norm")


@mistake("the model has no nn.ModuleList or nn.Sequential of several blocks for a pipeline to cut")
def a_model_without_a_list(module: GPT) -> MeshStrategy:
    module.blocks = module.blocks[0]  # type: ignore[assignment]
    return PP2()


@mistake("the pipeline has 4 stages, and 'blocks' has 3 blocks: use at most 3 stages.")
def fewer_blocks_than_stages(module: GPT) -> MeshStrategy:
    module.blocks = module.blocks[:3]
    return PP2(schedule="Interleaved1F1B")


@mistake("split names 'blocks.9', which is not a block. Did you mean 'blocks.")
def a_split_at_an_unknown_block(module: GPT) -> MeshStrategy:
    return PP2(split=["blocks.9"])


@mistake("split names 2 blocks, and 2 stages need 1: the first block of each stage after the first.")
def a_split_into_too_many_stages(module: GPT) -> MeshStrategy:
    return PP2(split=["blocks.1", "blocks.2"])


@mistake("split=['blocks.3', 'blocks.2', 'blocks.1']: name the blocks in their order, each once, and without")
def a_split_out_of_order(module: GPT) -> MeshStrategy:
    return PP2(split=["blocks.3", "blocks.2", "blocks.1"], schedule="LoopedBFS")


@mistake("first_stage or last_stage names 'plces', which the model does not have. Did you mean 'places'?")
def a_first_stage_of_an_unknown_name(module: GPT) -> MeshStrategy:
    return PP2(first_stage=["plces"])


@mistake("is tied between the stages [1, 2] of the pipeline: only the first and the last stage can share a")
def weights_tied_between_inner_stages(module: GPT) -> MeshStrategy:
    module.blocks[2].up.weight = module.blocks[1].up.weight
    return PP2(schedule="Interleaved1F1B")


@mistake("'norm' is a BatchNorm1d, whose statistics would be those of micro-batches")
def batch_norm(module: GPT) -> MeshStrategy:
    module.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]
    return PP2()


@mistake("'norm' has output_router_logits=True, which collects outputs of every layer")
def an_auxiliary_loss_of_all_layers(module: GPT) -> MeshStrategy:
    module.norm.config = types.SimpleNamespace(output_router_logits=True)  # type: ignore[assignment]
    return PP2()


@mistake("auto_wrap_policy makes a group of 'blocks', which the pipeline cuts into stages")
def a_group_of_all_blocks(module: GPT) -> MeshStrategy:
    module.blocks = nn.Sequential(*module.blocks)  # type: ignore[assignment]
    return PP2(auto_wrap_policy={"Sequential"})


@mistake("ignored_modules with pp=2: their gradients are averaged over all ranks")
def ignored_modules_with_a_pipeline(module: GPT) -> MeshStrategy:
    return PP2(ignored_modules=[module.norm])


# the schedule ---------------------------------------------------------------------------------------------------------
@mistake("schedule='1f1c' is unknown. Did you mean '1F1B'?")
def an_unknown_schedule(module: GPT) -> MeshStrategy:
    return PP2(schedule="1f1c")


@mistake("microbatches=1: the schedule 1F1B over 2 ranks needs at least 2. Use more (8 keep the stages busy), or")
def too_few_micro_batches(module: GPT) -> MeshStrategy:
    return PP2(microbatches=1)


@mistake("microbatches=0: use a number from 1.")
def no_micro_batches(module: GPT) -> MeshStrategy:
    return PP2(microbatches=0)


@mistake("microbatches=4.0: use a number from 1.")
def a_float_as_the_number_of_micro_batches(module: GPT) -> MeshStrategy:
    return PP2(microbatches=4.0)


@mistake("stages_per_rank=2: the schedule 1F1B needs 1.")
def several_stages_per_rank_with_a_single_stage_schedule(module: GPT) -> MeshStrategy:
    return PP2(stages_per_rank=2)


@mistake("microbatches=5: the schedule Interleaved1F1B runs them in 2 rounds over 2 ranks: use a multiple of 2.")
def micro_batches_not_divisible_into_rounds(module: GPT) -> MeshStrategy:
    return PP2(schedule="Interleaved1F1B", microbatches=5)


@mistake("microbatches=4 without pp: only a pipeline uses it. Set pp to 2 or more, or leave out")
def micro_batches_without_a_pipeline(module: GPT) -> MeshStrategy:
    return MeshStrategy(microbatches=4)


@mistake("first_stage=['places'] without pp: only a pipeline uses it.")
def a_first_stage_without_a_pipeline(module: GPT) -> MeshStrategy:
    return MeshStrategy(dp_shard=2, first_stage=["places"])


# training -------------------------------------------------------------------------------------------------------------
@mistake("manual optimization does not work with pp: a pipeline runs forward and backward interleaved")
def manual_optimization(module: GPT) -> MeshStrategy:
    module.automatic_optimization = False
    return PP2()


@mistake("a pipeline cuts one model into stages, and 2 were set up: make them submodules of one")
def two_models(module: GPT) -> MeshStrategy:
    module.is_one_of_two = True  # type: ignore[assignment]
    return PP2()


@mistake("LBFGS ")
def an_optimizer_with_a_closure(module: GPT) -> MeshStrategy:
    replace(module, "configure_optimizers", lambda self: torch.optim.LBFGS(self.parameters()))
    return PP2()


@mistake("the module has a backward() of its own, which a pipeline cannot call")
def an_overridden_backward(module: GPT) -> MeshStrategy:
    class WithBackward(GPT):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()

    module.__class__ = WithBackward
    return PP2()


# errors found in the first batch --------------------------------------------------------------------------------------
@mistake("the step runs the blocks of 'blocks' more than once, and a pipeline can run each")
def a_step_that_runs_the_model_twice(module: GPT) -> MeshStrategy:
    def training_step(self: GPT, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self(batch[0]), batch[1]) + loss_of(self(batch[0].flip(0)), batch[1])

    replace(module, "training_step", training_step)
    return PP2()


@mistake("the step did not run through the blocks of 'blocks', which the pipeline cuts")
def a_step_that_never_runs_the_blocks(module: GPT) -> MeshStrategy:
    replace(module, "training_step", lambda self, batch, batch_idx: self.tokens(batch[0]).mean())
    return PP2()


@mistake("'norm' is used before the blocks of 'blocks', and the last stage of the pipeline holds it: add it")
def a_layer_of_the_last_stage_used_before_the_blocks(module: GPT) -> MeshStrategy:
    def forward(self: GPT, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    replace(module, "forward", forward)
    return PP2()


@mistake("(blocks.2 to 3 and the modules after them) computes with 'tokens' of another stage: only the output")
def a_residual_from_before_the_blocks(module: GPT) -> MeshStrategy:
    def forward(self: GPT, tokens: Tensor) -> Tensor:
        x = first = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))

    replace(module, "forward", forward)
    return PP2()


@mistake("stage 2 of the pipeline (blocks.2) computes with 'places' of another stage")
def a_value_of_the_first_stage_added_to_an_inner_block(module: GPT) -> MeshStrategy:
    def forward(self: GPT, tokens: Tensor) -> Tensor:
        x, places = self.tokens(tokens), self.places(torch.arange(tokens.shape[1]))
        for place, block in enumerate(self.blocks):
            x = block(x + places) if place == 2 else block(x)
        return self.head(self.norm(x))

    replace(module, "forward", forward)
    return PP2(schedule="Interleaved1F1B")


@mistake("computes with 'blocks.0' of another stage")
def an_output_of_an_inner_block(module: GPT) -> MeshStrategy:
    def forward(self: GPT, tokens: Tensor) -> Tensor:
        x, outputs = self.tokens(tokens), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.head(self.norm(x + outputs[0]))

    replace(module, "forward", forward)
    return PP2()


@mistake("computes with 'places' of another stage")
def a_parameter_of_the_first_stage_in_the_loss(module: GPT) -> MeshStrategy:
    def training_step(self: GPT, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self(batch[0]), batch[1]) + self.places.weight.square().mean()

    replace(module, "training_step", training_step)
    return PP2()


@mistake("GPT was called with output_hidden_states=True, which collects outputs of every layer")
def hidden_states_of_all_layers(module: GPT) -> MeshStrategy:
    module.config = types.SimpleNamespace(output_hidden_states=False)  # type: ignore[assignment]
    replace(module, "forward", lambda self, tokens, output_hidden_states: GPT.forward(self, tokens))
    replace(
        module,
        "training_step",
        lambda self, batch, batch_idx: loss_of(self(batch[0], output_hidden_states=True), batch[1]),
    )
    return PP2()


class Balanced(nn.Module):
    """A block that stores an auxiliary loss, in itself and in its router."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.router = block, nn.Identity()
        self.router.loss = None

    def forward(self, x: Tensor) -> Tensor:
        self.loss, self.router.loss = x.square().mean(), x.mean()
        return self.block(x)  # type: ignore[no-any-return]


def balance(module: GPT, of: Callable[[Any], Tensor]) -> None:
    def training_step(self: GPT, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.loss = block.router.loss = None
        loss = loss_of(self(batch[0]), batch[1])
        for block in self.blocks:
            loss = loss + of(block)
        return loss

    module.blocks = nn.ModuleList(Balanced(block) for block in module.blocks)
    replace(module, "training_step", training_step)


@mistake("the step reads 'loss' of 'blocks.0', which that module assigns in its forward on another")
def an_auxiliary_loss_stored_in_blocks(module: GPT) -> MeshStrategy:
    balance(module, lambda block: block.loss)
    return PP2()


@mistake("the step reads 'loss' of 'blocks.0.router', which that module assigns in its forward")
def an_auxiliary_loss_stored_in_parts_of_blocks(module: GPT) -> MeshStrategy:
    balance(module, lambda block: getattr(block.router, "loss", torch.zeros(())))
    return PP2(schedule="Interleaved1F1B")


@mistake("the step reads 'seen' of 'blocks.0', which that module assigns in its forward")
def a_buffer_of_the_blocks_read_by_the_step(module: GPT) -> MeshStrategy:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen += 1
        return self.dropout(x) + x  # type: ignore[no-any-return]

    def training_step(self: GPT, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self(batch[0]), batch[1]) * sum(block.seen for block in self.blocks)

    for block in module.blocks:
        block.register_buffer("seen", torch.zeros(()))
        block.forward = types.MethodType(forward, block)
    replace(module, "training_step", training_step)
    return PP2()


def first_error(make: Mistake) -> tuple[str, bool]:
    """Returns the error of a run that begins with a mistake, and whether this rank's weights are unchanged."""
    torch.manual_seed(0)
    module = GPT(depth=4)
    before: dict[str, Tensor] = {}
    try:
        strategy = make(module)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        begin(strategy, module)
    except ConfigurationError as error:
        # A strategy that cannot be created never sees the module.
        now = dict(module.named_parameters())
        return str(error), all(is_unchanged(value, now[name]) for name, value in before.items())
    return "no error", True


def is_unchanged(before: Tensor, parameter: Tensor) -> bool:
    """Returns True also for nan, which marks a parameter of another stage."""
    return bool(parameter.isnan().all()) or torch.equal(before, parameter)


def begin(strategy: MeshStrategy, module: GPT) -> None:
    strategy.setup_environment()
    strategy.setup_modules([module, GPT()] if hasattr(module, "is_one_of_two") else [module])
    strategy.setup_optimizers([module], [module.configure_optimizers()])
    step: Any = strategy.setup_step(module.training_step, module)
    own = module.backward if type(module).backward is not TrainModule.backward else None
    hooks: Any = types.SimpleNamespace(on_before_backward=(), on_after_backward=(), backward=own)
    strategy.forward_backward(step, next(iter(DataLoader(data(8), 8))), (0,), Window(), hooks)


def all_errors() -> dict[str, tuple[str, bool]]:
    return {name: first_error(make) for name, (_, make) in MISTAKES.items()}


@pytest.fixture(scope="module")
def errors() -> list[dict[str, tuple[str, bool]]]:
    return run_world(2, all_errors)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_the_same_error_on_both_ranks(errors: list[dict[str, tuple[str, bool]]], name: str) -> None:
    for found, unchanged in (rank[name] for rank in errors):
        assert MISTAKES[name][0] in found
        assert unchanged
    assert errors[0][name] == errors[1][name]


# errors of the Trainer, which end the ranks ---------------------------------------------------------------------------
class DrawsBatches(GPT):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return loss_of(self(batch[0]), batch[1])


def fit(kind: type[GPT], compiles: bool) -> None:
    module = kind(depth=4)
    trainer = Trainer(strategy=PP2(), max_epochs=1, **QUIET)
    trainer.fit(torch.compile(module) if compiles else module, DataLoader(data(8), 8))  # type: ignore[arg-type]


TRAINER_ERRORS = {
    "a step that draws its own batches": (
        (DrawsBatches, False),
        "training_step(dataloader_iter) draws its own batches, so a pipeline cannot split them into micro-batches",
    ),
    "a module that is compiled as a whole": (
        (GPT, True),
        "torch.compile with strategy='mesh': a pipeline stage ends the step where the next stage begins.",
    ),
}


@pytest.mark.parametrize("case", TRAINER_ERRORS)
def test_the_trainer_raises_on_unsupported_modules(case: str) -> None:
    arguments, message = TRAINER_ERRORS[case]
    # The first error ends both ranks, so one of them may report none.
    found = [outcome for outcome in run_world(2, fit, *arguments, may_fail=True) if isinstance(outcome, str)]
    assert found and all(message in text for text in found)


def errors_of_four() -> list[str]:
    """Returns the errors of two mistakes on four ranks, "" for a mistake without an error."""
    strategies = [
        MeshStrategy(pp=2, tp=2, plan=PLAN, schedule="ZBVZeroBubble"),
        MeshStrategy(pp=2, dp_shard=2, microbatches=2),
    ]
    found = []
    for strategy in strategies:
        module = GPT(depth=4)
        a_residual_from_before_the_blocks(module)
        try:
            begin(strategy, module)
            found.append("")
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.full
def test_mistakes_with_other_dimensions_raise_on_all_ranks() -> None:
    for bubble, residual in run_world(4, errors_of_four):
        assert "schedule='ZBVZeroBubble' computes weight gradients in separate passes, which is silently" in bubble
        assert "computes with 'tokens' of another stage" in residual


# supported cases ------------------------------------------------------------------------------------------------------
def losses(strategy: dict[str, Any] | None, starts_with_nan: bool = False, **arguments: Any) -> list[float]:
    torch.manual_seed(0)
    module = GPT(depth=4)
    if starts_with_nan:
        nn.init.constant_(module.places.weight, torch.nan)
    chosen: Any = "single_device" if strategy is None else MeshStrategy(pp=2, dp_shard=1, microbatches=2, **strategy)
    Trainer(strategy=chosen, max_epochs=1, **arguments, **QUIET).fit(module, DataLoader(data(16), 8))
    return module.losses


def all_losses() -> list[list[float]]:
    compiled = losses({"compile": {"backend": "eager"}}, detect_anomaly=True)
    return [compiled, losses({}, starts_with_nan=True)]


def test_compiled_blocks_train_with_detect_anomaly_and_nan_losses_do_not_end_the_run() -> None:
    _, (compiled, nan_losses) = run_world(2, all_losses)
    assert compiled == pytest.approx(losses(None), abs=1e-5)
    assert len(nan_losses) == 2 and all(map(math.isnan, nan_losses))
