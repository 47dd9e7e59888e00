"""Scripts written for Accelerate: their calls behave as they do there."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import Stream
from torch import nn
from torch.utils.data import DataLoader

from leyden import (
    Accelerator,
    AORecipeKwargs,
    ConfigurationError,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    PartialState,
)
from leyden.utils import RNGType


class NestedOutputs(nn.Module):
    """A model that returns a dict of tensors of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Any) -> dict[str, Any]:
        return {"logits": self.layer(x), "hidden": (self.layer(x), torch.arange(2), torch.ones(1, dtype=torch.float64))}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_prepared_model_returns_float32_under_mixed_precision(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(NestedOutputs())
    found = model(torch.ones(1, 2))
    assert found["logits"].dtype == found["hidden"][0].dtype == torch.float32
    assert (found["hidden"][1].dtype, found["hidden"][2].dtype) == (torch.int64, torch.float64)
    # The values are still computed in half precision.
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    assert torch.equal(found["logits"], found["logits"].to(half).float())
    found["logits"].sum().backward()
    assert model.layer.weight.grad.dtype == torch.float32
    unconverted = Accelerator(cpu=True, mixed_precision=precision, convert_outputs=False).prepare(NestedOutputs())
    assert unconverted(torch.ones(1, 2))["logits"].dtype == half


def test_unwrapping_removes_the_output_conversion_but_keeps_a_patched_forward() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(2, 2)
    original_forward = model.forward
    vars(model)["forward"] = lambda x: original_forward(x) * 0
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(1, 2)).dtype == torch.float32
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert bare(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]


def test_unwrapping_keeps_compilation_and_removes_data_parallel() -> None:
    accelerator = Accelerator(cpu=True)
    compiled = torch.compile(nn.Linear(2, 1), backend="eager")
    prepared = accelerator.prepare(compiled)
    assert accelerator.unwrap_model(prepared) is compiled
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is compiled._orig_mod
    module = nn.Linear(2, 1)
    assert accelerator.unwrap_model(nn.DataParallel(module)) is module


def weights_after_stream(prepares: bool, items: bool) -> torch.Tensor:
    """Returns the weights after five batches of a stream in windows of two, the last of which ends early."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001)
    model, loader = accelerator.prepare(model, DataLoader(Stream(torch.arange(10.0).view(5, 2, 1)), None))
    if prepares:
        optimizer = accelerator.prepare(optimizer)
    for x in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), x, reduction="sum" if items else "mean")
            accelerator.backward(loss, **({"num_items": len(x)} if items else {}))
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize("items", [False, True])
def test_an_unprepared_optimizer_stepping_on_sync_gradients_matches_a_prepared_one(items: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(weights_after_stream(False, items), weights_after_stream(True, items))


@pytest.mark.parametrize(("method", "words"), [("step", "weights changed"), ("zero_grad", "gradients were cleared")])
def test_an_unprepared_optimizer_that_ignores_the_window_raises(method: str, words: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)

    def one_batch() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            getattr(optimizer, method)()

    one_batch()
    with pytest.raises(ConfigurationError, match=words):
        one_batch()


def test_load_state_rejects_arguments_without_effect(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved", map_location="cpu", load_kwargs={"strict": True, "weights_only": True})
    with pytest.raises(TypeError, match="map_locatoin"):
        accelerator.load_state(tmp_path / "saved", map_locatoin="cpu")  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="'strict'"):
        accelerator.load_state(tmp_path / "saved", load_kwargs={"strickt": False})
    with pytest.raises(ConfigurationError, match="to the prepared model's device"):
        accelerator.load_state(tmp_path / "saved", map_location="cuda:1")
    assert model.weight.dtype == torch.float32


def test_a_prepared_loader_can_be_copied_and_pickled() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(6.0), 2))
    expected = [batch.tolist() for batch in loader]
    for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch.tolist() for batch in again] == expected
    deep = copy.deepcopy(loader)
    assert type(deep) is type(loader) and deep.dataset is not loader.dataset and deep.iteration == 1
    skipped = accelerator.skip_first_batches(loader, 2)
    assert [batch.tolist() for batch in copy.copy(skipped)] == expected[2:]


def test_prepared_optimizers_and_schedulers_can_be_copied_and_pickled() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    )
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step()
    # Pickles hold torch's own objects, which are to be prepared again, as for loaders.
    pickled, rates = pickle.loads(pickle.dumps((optimizer, scheduler)))
    assert (type(pickled), type(rates)) == (torch.optim.SGD, torch.optim.lr_scheduler.StepLR)
    assert (rates.optimizer is pickled, rates.get_last_lr()) == (True, [0.05])
    twin, copied, rates = copy.deepcopy((model, optimizer, scheduler))
    assert (type(copied), rates.optimizers) == (type(optimizer), [copied])
    before = model.weight.clone()
    twin(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match="no parameter of a prepared model"):
        copied.step()
    rates.step()
    # The copy steps its own parameters, with its own momentum and rate.
    assert torch.equal(model.weight, before) and not torch.equal(twin.weight, before)
    assert (rates.get_last_lr(), scheduler.get_last_lr()) == ([0.025], [0.05])
    assert copy.copy(optimizer).optimizer is optimizer.optimizer


def test_an_accelerator_is_copied_as_itself_and_pickled_as_its_state() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(nn.Linear(2, 1))
    assert copy.deepcopy([accelerator])[0] is copy.copy(accelerator) is accelerator
    state = pickle.loads(pickle.dumps(accelerator))
    assert (state.num_processes, state.is_main_process, state.device.type, state.mixed_precision) == (
        *(1, True, "cpu", "bf16"),
    )
    assert type(pickle.loads(pickle.dumps(PartialState(cpu=True)))) is PartialState


def test_handlers_and_precision_are_attributes() -> None:
    scaler, recipe = GradScalerKwargs(init_scale=2.0), AORecipeKwargs()
    plain = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler])
    assert (plain.scaler_handler is scaler, plain.ddp_handler, plain.init_handler) == (True, None, None)
    assert (plain.native_amp, plain.fp8_enabled, plain.has_fp8_handler, plain.data_parallel_rank) == (
        *(True, False, False, 0),
    )
    assert not Accelerator(cpu=True).native_amp
    fp8 = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert (fp8.ao_recipe_handler is recipe, fp8.te_recipe_handler, fp8.fp8_recipe_handler) == (True, None, None)
    assert fp8.fp8_enabled and fp8.has_fp8_handler
    with pytest.raises(AttributeError, match="bakward"):
        _ = plain.bakward


def test_dataloader_config_can_be_set_before_loaders_are_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True, even_batches=False)
    assert (accelerator.split_batches, accelerator.even_batches) == (True, False)
    accelerator.even_batches = True
    assert (accelerator.split_batches, accelerator.even_batches) == (True, True)


def test_prepared_objects_are_marked_as_in_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = (model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader(torch.ones(2, 1)))
    assert not any(hasattr(entry, "_is_accelerate_prepared") for entry in given)
    assert all(entry._is_accelerate_prepared for entry in accelerator.prepare(*given))


def test_a_scheduler_past_its_total_steps_warns_and_keeps_its_rate() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule)
    rates = []

    def one_step() -> None:
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])

    for _ in range(3):
        one_step()
    with pytest.warns(UserWarning, match="OneCycleLR has reached its total_steps=3"):
        one_step()
    one_step()
    assert rates[2:] == [rates[2]] * 3 and rates[1] != rates[2]
    assert copy.copy(scheduler).scheduler is schedule


def test_log_with_returns_the_given_trackers(tmp_path: Path) -> None:
    assert Accelerator(cpu=True).log_with == []
    assert Accelerator(cpu=True, log_with="csv", project_dir=tmp_path).log_with == ["csv"]


def test_settings_are_attributes_with_accelerates_names() -> None:
    plain = Accelerator(cpu=True)
    assert (plain.multi_device, plain.is_fsdp2, plain.step_scheduler_with_optimizer) == (False, False, True)
    assert (plain.split_batches, plain.dispatch_batches, plain.even_batches) == (False, None, True)
    assert (plain.use_seedable_sampler, plain.non_blocking, plain.use_stateful_dataloader, plain.rng_types) == (
        *(False, False, False),
        [],
    )
    config = DataLoaderConfiguration(True, False, False, True, non_blocking=True, use_stateful_dataloader=True)
    configured = Accelerator(
        cpu=True, dataloader_config=config, rng_types=["torch", RNGType.CUDA], step_scheduler_with_optimizer=False
    )
    assert (configured.split_batches, configured.dispatch_batches, configured.even_batches) == (True, False, False)
    assert (configured.use_seedable_sampler, configured.non_blocking, configured.use_stateful_dataloader) == (
        True,
        True,
        True,
    )
    assert (configured.rng_types, configured.step_scheduler_with_optimizer) == (["torch", "cuda"], False)
    assert Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).is_fsdp2
