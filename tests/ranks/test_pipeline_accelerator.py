"""Pipelines under a user's own loop: the model that `prepare` returns trains like one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from leyden import Accelerator, ConfigurationError, GradientAccumulationPlugin
from leyden.cli.launch.plan import ElasticOptions, resolve
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import parse
from leyden.strategies import MeshStrategy
from leyden.utils import MegatronLMDummyScheduler, MegatronLMPlugin, avg_losses_across_data_parallel_group

GLOBAL_BATCH = 4


class WithLoss(GPT):
    """A GPT that returns logits, and the loss if it gets labels, as a model of `transformers` does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(depth=4, dropout=dropout)

    def parallel_plan(self) -> dict[str, str]:
        return PLAN

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(tokens)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.clamp(0).flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def by_items(model: Any, batch: Any) -> dict[str, Any]:
    """Returns a summed loss and the number of its items."""
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return {"loss": loss, "num_items": (labels != -100).sum()}


def steps(accelerator: Accelerator, model: Any, batch: Any, way: str) -> Tensor:
    """Runs forward and backward of one batch, in one of three ways to write it; returns the loss."""
    tokens, labels = batch
    if way == "called":
        outputs = model(tokens, labels=labels)
        accelerator.backward(outputs.loss)
        return outputs.loss
    if accelerator.strategy.outputs.are_in_parts:
        return accelerator.pipeline_step(model, batch, **({"step": by_items} if way == "items" else {}))
    if way == "items":
        found = by_items(model, batch)
        accelerator.backward(found["loss"], num_items=found["num_items"])
        return found["loss"]
    loss = model(*batch).loss
    accelerator.backward(loss)
    return loss


def start(accelerator: Accelerator, dropout: float = 0.0, before: bool = True) -> tuple[Any, ...]:
    """Returns a model, an optimizer created before or after the model is prepared, a scheduler and a loader."""
    torch.manual_seed(0)
    model = WithLoss(dropout)
    loader = DataLoader(data(20), GLOBAL_BATCH // accelerator.strategy.data_size)
    if not before:
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = MegatronLMDummyScheduler(optimizer, num_training_steps=20, num_warmup_steps=2)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator: Accelerator, way: str, epochs: int = 2, folder: str | None = None) -> dict[str, Any]:
    """Trains in windows of two batches; saves after the first epoch if there is a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, scheduler, loader = start(accelerator, 0.0 if folder is None else 0.2, way != "called")
    losses, norms = [], []
    for epoch in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = steps(accelerator, model, batch, way)
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                norms += [norm] if accelerator.sync_gradients else []
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(avg_losses_across_data_parallel_group([loss])))
        if epoch == 0 and folder is not None:
            accelerator.save_state(folder)
    model.eval()
    logits = [accelerator.gather_for_metrics(model(tokens).logits) for tokens, _ in loader]
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "logits": torch.cat(logits).detach().numpy(),
        "weights": {name: tensor.detach().numpy() for name, tensor in state.items()},
        "lr": scheduler.get_last_lr(),
        "steps": accelerator.steps,
    }


def resumed(accelerator: Accelerator, folder: str) -> dict[str, Any]:
    """Resumes another run after its first epoch; returns the results of the second epoch."""
    torch.manual_seed(99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = start(accelerator, 0.2)
    accelerator.load_state(folder)
    return second_epoch(accelerator, *prepared)


def second_epoch(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> dict[str, Any]:
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            losses.append(float(steps(accelerator, model, batch, "step")))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return {"losses": losses, "weights": {name: tensor.detach().numpy() for name, tensor in state.items()}}


def accelerator_of(**strategy: Any) -> Accelerator:
    """Returns an Accelerator for a mesh, with windows of two batches."""
    return Accelerator(cpu=True, strategy=MeshStrategy(**strategy), gradient_accumulation_steps=2)


def mistakes() -> dict[str, str]:
    """Returns the error of each unsupported call, by its name."""
    found = {}

    def record_error(name: str, action: Any) -> None:
        try:
            action()
        except ConfigurationError as error:
            found[name] = str(error)

    accelerator = accelerator_of(pp=2, microbatches=2)
    model, _, _, loader = start(accelerator)
    batch = next(iter(loader))
    record_error("no loss", lambda: model(batch[0]))
    loss = accelerator.pipeline_step(model, batch)
    record_error("another loss", lambda: accelerator.backward(loss * 2))
    record_error("items too late", lambda: accelerator.backward(loss, num_items=3))
    accelerator.backward(loss)
    record_error("twice", lambda: accelerator.backward(loss))
    record_error("second model", lambda: accelerator.prepare(torch.nn.Linear(2, 2)))
    accelerator.free_memory()
    record_error("left in place", lambda: accelerator.prepare_model(WithLoss(), device_placement=False))
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    record_error(
        "each batch",
        lambda: Accelerator(cpu=True, strategy=MeshStrategy(pp=2), gradient_accumulation_plugin=plugin),
    )
    return found


def run_two(folder: str) -> dict[str, Any]:
    stages = {"pp": 2, "microbatches": 4}
    return {
        **{way: train(accelerator_of(**stages), way) for way in ("called", "step", "items")},
        "whole": train(accelerator_of(**stages), "step", folder=folder),
        "resumed": resumed(accelerator_of(**stages), folder),
        "mistakes": mistakes(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline") / "checkpoint"


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_world(2, run_two, str(folder))


def alone(way: str) -> dict[str, Any]:
    return train(Accelerator(cpu=True, strategy="single_device", gradient_accumulation_steps=2), way)


def check_equal(found: dict[str, Any], single: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(single["losses"], rel=1e-6, abs=1e-5)
    assert found["norms"] == pytest.approx(single["norms"], rel=1e-5)
    assert (found["lr"], found["steps"]) == (single["lr"], single["steps"])
    assert abs(found["logits"] - single["logits"]).max() < 1e-4
    for name, value in single["weights"].items():
        assert abs(found["weights"][name] - value).max() < 1e-5, name


@pytest.mark.parametrize("way", ["called", "step", "items"])
def test_a_loop_trains_and_evaluates_like_one_process(two_ranks: list[dict[str, Any]], way: str) -> None:
    single = alone(way)
    assert len(single["losses"]) == 10 and single["steps"] == 6 and len(single["logits"]) == 20
    for rank in two_ranks:
        check_equal(rank[way], single)


def test_a_resumed_loop_continues_bit_for_bit(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    for rank in two_ranks:
        whole, again = rank["whole"], rank["resumed"]
        assert again["losses"] == whole["losses"][5:]
        assert all((again["weights"][name] == value).all() for name, value in whole["weights"].items())


def test_the_checkpoint_loads_on_one_process(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    accelerator = Accelerator(cpu=True, strategy="single_device", gradient_accumulation_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, *_ = start(accelerator, 0.2)
    accelerator.load_state(folder)
    tensors = load_file(next(folder.glob("model*.safetensors")))
    assert set(tensors) <= set(model.state_dict()) and optimizer.optimizer.state


ERRORS = {
    "no loss": "returned a SimpleNamespace without a loss",
    "another loss": "backward got a different loss than the last step's",
    "items too late": "backward(num_items=…) comes too late in a pipeline",
    "twice": "backward got a different loss than the last step's",
    "second model": "a pipeline cuts one model into stages, and 2 were set up",
    "left in place": "device_placement=False leaves a model as it is, and pp=2",
    "each batch": "sync_each_batch=True cannot be combined with a pipeline",
}


@pytest.mark.parametrize("name", ERRORS)
def test_unsupported_calls_raise_on_every_rank(two_ranks: list[dict[str, Any]], name: str) -> None:
    for rank in two_ranks:
        assert ERRORS[name] in rank["mistakes"][name]


# a model of transformers ----------------------------------------------------------------------------------------------
def train_llama(strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Trains and evaluates with the loop of an ordinary script."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    )
    chosen = "single_device" if strategy is None else MeshStrategy(**strategy)
    accelerator = Accelerator(cpu=True, strategy=chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(3))
    samples: Any = [{"input_ids": row, "labels": row} for row in rows]
    loader = DataLoader(samples, GLOBAL_BATCH // accelerator.strategy.data_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, found = [], []
    model.train()
    for batch in loader:
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(avg_losses_across_data_parallel_group([outputs.loss])))
    model.eval()
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        found.append(accelerator.gather_for_metrics(outputs.logits))
    return {"losses": losses, "logits": torch.cat(found).numpy()}


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"pp": 2, "microbatches": 2}, {"pp": 2, "dp_shard": 2, "microbatches": 2}], ids=str)
def test_an_ordinary_transformers_loop_runs_unchanged(layout: dict[str, Any]) -> None:
    pytest.importorskip("transformers", minversion="5")
    single = train_llama(None)
    for rank in run_world(2 * layout.get("dp_shard", 1), train_llama, layout):
        assert rank["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert abs(rank["logits"] - single["logits"]).max() < 1e-4


# Megatron-LM's settings -----------------------------------------------------------------------------------------------
SECTION = {"num_micro_batches": 2, "gradient_clipping": 0.5, "recompute_activations": True}


def by_plugin(**settings: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin = MegatronLMPlugin(**SECTION, **settings)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, gradient_accumulation_steps=2)
    assert accelerator.state.megatron_lm_plugin is plugin
    return train_megatron(accelerator)


def by_launch() -> dict[str, Any]:
    return train_megatron(Accelerator(gradient_accumulation_steps=2))


def train_megatron(accelerator: Accelerator, clips: bool = False) -> dict[str, Any]:
    """Trains with a loop that leaves clipping to the Megatron-LM settings, unless `clips` is set."""
    model, optimizer, scheduler, loader = start(accelerator)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(*batch)
            accelerator.backward(outputs.loss)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(avg_losses_across_data_parallel_group([outputs.loss])))
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "weights": {name: tensor.detach().numpy() for name, tensor in state.items()},
        "layout": accelerator.strategy.details,
    }


def launched(ranks: int, **section: Any) -> dict[str, str]:
    """Returns the variables that a launch with Accelerate's config file sets."""
    options = {f"megatron_lm_{name}": value for name, value in {**SECTION, **section}.items()}
    file = {"distributed_type": "MEGATRON_LM", "num_processes": ranks, "use_cpu": True, "megatron_lm_config": options}
    plan = resolve(parse(file), ElasticOptions(), Machine(cpus=ranks), {})
    return {name: value for name, value in plan.variables().items() if name.startswith(("LEYDEN", "MEGATRON"))}


MEGATRON: list[tuple[int, dict[str, Any], str]] = [
    (2, {"pp_degree": 2}, "pp 2 of 2 ranks"),
    (4, {"tp_degree": 2, "pp_degree": 2, "sequence_parallelism": True}, "pp 2 × tp 2 of 4 ranks"),
    (4, {"pp_degree": 2, "use_distributed_optimizer": True}, "pp 2 × dp_shard 2 of 4 ranks"),
    (4, {"pp_degree": 2}, "pp 2 × dp_replicate 2 of 4 ranks"),
]


@pytest.mark.parametrize(
    ("ranks", "section", "layout"),
    [pytest.param(*row, marks=[] if row[0] == 2 else pytest.mark.full, id=row[2]) for row in MEGATRON],
)
def test_megatron_settings_train_a_users_own_model(ranks: int, section: dict[str, Any], layout: str) -> None:
    single = train_megatron(Accelerator(cpu=True, strategy="single_device", gradient_accumulation_steps=2), clips=True)
    worlds = [run_world(ranks, run_plugin, section), run_world(ranks, by_launch, environ=launched(ranks, **section))]
    for rank in (rank for world in worlds for rank in world):
        assert rank["layout"].startswith(layout)
        assert rank["losses"] == pytest.approx(single["losses"], abs=1e-5)
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-5, name


def run_plugin(section: dict[str, Any]) -> dict[str, Any]:
    return by_plugin(**section)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_degree": 0}, "tp_degree=0"),
        ({"gradient_clipping": -1.0}, "use a positive norm"),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "stages_per_rank"),
        ({"train_iters": 100}, "how long to train"),
        ({"custom_train_step_class": object}, "pipeline_step"),
        ({"other_megatron_args": {"vocab_size": 8}}, "trained unchanged"),
    ],
)
def test_unsupported_megatron_settings_raise(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))) as error:
        MegatronLMPlugin(**settings)
    assert words in str(error.value)


def test_pipeline_step_raises_without_a_pipeline() -> None:
    accelerator = Accelerator(cpu=True, strategy="single_device")
    with pytest.raises(ConfigurationError, match=r"accelerator\.backward\(loss\)"):
        accelerator.pipeline_step(accelerator.prepare(torch.nn.Linear(2, 2)), torch.ones(2, 2))


def test_gradient_clipping_of_0_disables_clipping() -> None:
    with_plugin = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(gradient_clipping=0.0))
    found, plain = train_megatron(with_plugin), train_megatron(Accelerator(cpu=True))
    assert found["losses"] == plain["losses"]
    assert train_megatron(Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin()))["losses"] != plain["losses"]


def test_the_plugin_takes_unset_options_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")
    monkeypatch.setenv("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "true")
    plugin = MegatronLMPlugin(pp_degree=2)
    assert (plugin.tp_degree, plugin.num_micro_batches, plugin.gradient_clipping) == (2, 8, 1.0)
    with pytest.warns(UserWarning, match="multiply batch_size by 8"):
        built = plugin.build()
    assert isinstance(built, MeshStrategy)
    layout = built.layout
    assert (layout.tp, layout.pp, layout.dp_shard, layout.dp_replicate) == (2, 2, -1, 1)
    assert MegatronLMPlugin(tp_degree=1, use_distributed_optimizer=False).build() == "auto"
