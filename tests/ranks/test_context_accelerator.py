"""Context parallelism in loops of the user's own, under Accelerate's names: the losses and weights of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks.mesh_gpt import PLAN, data
from ranks.test_context import LongGPT
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Accelerator, FullyShardedDataParallelPlugin
from leyden.core.errors import ConfigurationError
from leyden.strategies import MeshStrategy
from leyden.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig, TorchContextParallelConfig

VOCABULARY, TOKENS, GLOBAL_BATCH = 64, 16, 4
Found = dict[str, Any]


def texts(padded: bool) -> list[dict[str, Tensor]]:
    """Samples with shifted labels, some of which are ignored; every second one begins with padding."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(16):
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        mask = torch.ones_like(tokens)
        mask[: 3 * (index % 2) * padded] = 0
        labels = F.pad(tokens[1:], (0, 1), value=-100)
        labels[5:8] = -100
        rows.append({"input_ids": tokens, "shift_labels": labels} | ({"attention_mask": mask} if padded else {}))
    return rows


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, **changes)).double()


def script(
    sizes: Found,
    padded: bool = True,
    recomputes: bool = False,
    by_items: bool = False,
    whole: bool = False,
    window: int = 1,
) -> Found:
    """A loop as in Accelerate's guide to context parallelism, with a loss over all labels of a batch.

    Args:
        sizes: arguments of the ParallelismConfig; none for one process.
        padded: whether the batch has an attention_mask.
        recomputes: whether backward recomputes the layers.
        by_items: whether Leyden averages the loss, by `num_items`.
        whole: whether the model is called outside of the block.
        window: batches per step.
    """
    torch.manual_seed(0)
    parallelism_config = ParallelismConfig(**sizes) if sizes else None
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism_config, gradient_accumulation_steps=window)
    model: Any = llama()
    if recomputes:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch_size = GLOBAL_BATCH // accelerator.strategy.data_size
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(texts(padded), batch_size))
    losses, sizes_seen = [], set()
    for batch in loader:
        buffers, before = list(batch.values()), copy.deepcopy(batch)
        context = accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={batch["shift_labels"]}
        )
        with accelerator.accumulate(model), nullcontext() if whole else context:
            labels = batch.pop("shift_labels")
            sizes_seen.add(labels.shape[1])
            logits = model(**batch).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            count = (labels != -100).sum()
            if by_items:
                accelerator.backward(loss, num_items=count)
            else:
                accelerator.backward(loss / averaged_over(accelerator, count))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(batch["input_ids"], before["input_ids"]), "not restored"
        assert labels.shape == (batch_size, *sizes_seen), "restored, though it need not be"
        total = accelerator.reduce(torch.stack([loss.detach(), count.double()]), "sum")
        losses.append(float(total[0] / total[1]))
    return {"losses": losses, "length": sizes_seen, **weights_of(accelerator, model)}


def averaged_over(accelerator: Accelerator, count: Tensor) -> Tensor:
    """The recipe for a loss of one's own: gradients are averaged over the ranks, and counts are summed over them."""
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        return count
    group, total = mesh["dp_cp"].get_group(), count.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def weights_of(accelerator: Accelerator, model: nn.Module) -> Found:
    return {"weights": {name: tensor.numpy() for name, tensor in accelerator.get_state_dict(model).items()}}


class Planned(LongGPT):
    """The GPT with its plan of layers to split."""

    def parallel_plan(self) -> dict[str, str]:
        return PLAN


def own_module(sizes: Found, **arguments: Any) -> Found:
    """A loop with a module of the user's own, whose mean loss counts as many labels on each rank."""
    torch.manual_seed(0)
    config = ParallelismConfig(**sizes) if sizes else None
    accelerator = Accelerator(cpu=True, parallelism_config=config, **arguments)
    model: Any = Planned().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(data(16), GLOBAL_BATCH // accelerator.strategy.data_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, predicted = [], []
    for tokens, _ in loader:
        labels = tokens.roll(-1, 1)
        with accelerator.maybe_context_parallel(buffers=[tokens, labels], buffer_seq_dims=[1, -1]):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        with torch.no_grad():
            predicted.append(accelerator.gather_for_metrics(model(tokens)))
    return {"losses": losses, "predicted": torch.cat(predicted).numpy(), **weights_of(accelerator, model)}


def transformers_trainer(sizes: Found, folder: str, make: Callable[[], nn.Module] = llama) -> Found:
    """transformers' Trainer on Leyden's Accelerator. It cuts its batches by `maybe_context_parallel`."""
    from transformers import Trainer, TrainingArguments

    class Ours(Trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            config = ParallelismConfig(**sizes) if sizes else None
            self.accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=2)
            self.is_fsdp_enabled = self.accelerator.state.fsdp_plugin is not None
            self.gather_function = self.accelerator.gather_for_metrics

    rows = [{"input_ids": row["input_ids"], "labels": row["shift_labels"]} for row in texts(False)]
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "save_strategy": "no"}
    quiet |= {f"per_device_{name}_batch_size": GLOBAL_BATCH // sizes.get("ep_size", 1) for name in ("train", "eval")}
    arguments = TrainingArguments(folder, max_steps=2, learning_rate=0.01, gradient_accumulation_steps=2, **quiet)
    torch.manual_seed(0)
    trainer = Ours(make(), arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    losses = [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    return {"losses": losses, **weights_of(trainer.accelerator, trainer.model_wrapped)}


CASES: dict[str, tuple[Any, Found]] = {
    "padded": (script, {}),
    "recomputed": (script, {"padded": False, "recomputes": True}),
    "by items": (script, {"by_items": True, "window": 2}),
    "outside": (script, {"by_items": True, "whole": True}),
    "own module": (own_module, {}),
}


def by_items(model: Any, batch: Any) -> Found:
    """Returns a summed loss and the number of its items."""
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return {"loss": loss, "num_items": int((labels != -100).sum())}


def in_stages(strategy: Found | None) -> Found:
    """A loop whose pipeline cuts the sequences itself, in windows of two batches."""
    torch.manual_seed(0)
    mesh = "auto" if strategy is None else MeshStrategy(**strategy)
    accelerator = Accelerator(cpu=True, strategy=mesh, gradient_accumulation_steps=2)
    model: Any = LongGPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(16), GLOBAL_BATCH))
    losses, predicted = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            if strategy is None:
                found = by_items(model, batch)
                loss = found["loss"]
                accelerator.backward(loss, num_items=found["num_items"])
            else:
                loss = accelerator.pipeline_step(model, batch, step=by_items)
                with pytest.raises(ConfigurationError, match="maybe_context_parallel with pp: a pipeline cuts"):
                    accelerator.maybe_context_parallel([batch[0]], [1]).__enter__()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
        with torch.no_grad():
            predicted.append(accelerator.gather_for_metrics(model(batch[0])))
    return {"losses": losses, "predicted": torch.cat(predicted).numpy(), **weights_of(accelerator, model)}


def test_a_pipeline_in_a_loop_trains_on_parts_of_sequences_like_one_process() -> None:
    single = in_stages(None)
    strategy = {"dp_shard": 1, "cp": 2, "pp": 2, "microbatches": 2, "sequence_dims": {0: 1, 1: 1}}
    for rank in run_world(4, in_stages, strategy):
        # Every rank gets the loss, in float32.
        check_like_one_process(rank, single, 1e-3)
        assert abs(rank["predicted"] - single["predicted"]).max() < 1e-9


def run_cases(sizes: Found, names: list[str]) -> Found:
    return {name: CASES[name][0](sizes, **CASES[name][1]) for name in names}


def on_two_ranks() -> Found:
    """All cases, and those that exchange heads; what scripts read of the mesh, and what is refused."""
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=False)
    exchanged = {"own module": own_module({"sp_size": 2}, fsdp_plugin=plugin), "padded": script({"sp_size": 2})}
    return {
        **run_cases({"cp_size": 2}, list(CASES)),
        "ulysses": exchanged,
        "mesh": [mesh_names(name) for name in ("cp", "sp")],
        "mistakes": mistakes_of_models(),
    }


def mistakes_of_models() -> list[str]:
    """The messages about batches and calls of a model that would compute something else."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    model, tokens, found = accelerator.prepare(llama()), torch.zeros(2, 8, dtype=torch.long), []

    def refused(buffer: Tensor, call: Any) -> None:
        with pytest.raises(ConfigurationError) as error, accelerator.maybe_context_parallel([buffer], [1]):
            call()
        found.append(str(error.value))

    # Attention that is not called by its name in torch.nn.functional.
    refused(tokens, lambda: torch._C._nn.scaled_dot_product_attention(*torch.zeros(3, 2, 1, 4, 8)))
    refused(torch.full((2, 8), accelerator.process_index), model)
    refused(torch.zeros(2, 8), lambda: model(input_ids=tokens))
    refused(tokens, lambda: model(tokens, labels=tokens))
    refused(tokens, lambda: accelerator.maybe_context_parallel([tokens], [1]).__enter__())
    assert tokens.shape == (2, 8), "not restored after an error"
    return found


MESSAGES = (
    "no attention ran over the whole sequence",
    "ranks of a cp group received different batches",
    "got input_ids of length 8 within maybe_context_parallel",
    "shifts its labels",
    "entered within itself",
)


def mesh_names(name: str) -> tuple[Found, int]:
    config = ParallelismConfig(**{f"{name}_size": 2})
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    mesh = accelerator.torch_device_mesh
    dimensions = {*config.active_mesh_dims, *config.dp_shard_cp_dim_names, *config.dp_cp_dim_names}
    return {key: mesh[key].size() for key in (*dimensions, "dp_cp", "dp_shard_cp")}, accelerator.context_parallel_rank


def check_like_one_process(found: Found, single: Found, tolerance: float = 1e-9) -> None:
    """The tolerance is that of the losses, which transformers' Trainer logs in float32."""
    assert found["losses"] == pytest.approx(single["losses"], abs=tolerance)
    for name, value in single["weights"].items():
        assert abs(found["weights"][name] - value).max() < 1e-9, name


def test_loops_train_on_parts_of_sequences_like_one_process() -> None:
    pytest.importorskip("transformers", minversion="5")
    single = run_cases({}, list(CASES))
    for number, rank in enumerate(run_world(2, on_two_ranks)):
        for name, expected in single.items():
            check_like_one_process(rank[name], expected)
        for name, found in rank["ulysses"].items():
            check_like_one_process(found, single[name])
        for found in (rank["own module"], rank["ulysses"]["own module"]):
            assert abs(found["predicted"] - single["own module"]["predicted"]).max() < 1e-9
        assert rank["padded"]["length"] == {TOKENS // 2} and rank["outside"]["length"] == {TOKENS}
        for name, (dimensions, index) in zip(("cp", "sp"), rank["mesh"], strict=True):
            assert (dimensions, index) == ({name: 2, "dp_cp": 2, "dp_shard_cp": 2}, number)
        for message, expected in zip(rank["mistakes"], MESSAGES, strict=True):
            assert expected in message


@pytest.mark.full
def test_transformers_trainer_trains_on_parts_of_sequences_like_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    single = transformers_trainer({}, str(tmp_path))
    for rank in run_world(2, transformers_trainer, {"cp_size": 2}, str(tmp_path)):
        check_like_one_process(rank, single, 1e-6)


def with_data_ranks() -> Found:
    sizes = {"cp_size": 2, "dp_shard_size": 2}
    return run_cases(sizes, ["padded", "by items", "own module"]) | {
        "replicas": script({"cp_size": 2, "dp_replicate_size": 2}),
        "split": own_module({"cp_size": 2, "tp_size": 2}),
    }


@pytest.mark.full
def test_cp_groups_read_the_batches_of_one_data_rank() -> None:
    single = run_cases({}, ["padded", "by items", "own module"])
    single |= {"replicas": single["padded"], "split": single["own module"]}
    for rank in run_world(4, with_data_ranks):
        for name, found in rank.items():
            check_like_one_process(found, single[name])
        for name in ("own module", "split"):
            assert abs(rank[name]["predicted"] - single[name]["predicted"]).max() < 1e-9


def loop() -> Any:
    """The part of a strategy that cuts, without ranks: what is refused is refused before they communicate."""
    return MeshStrategy(dp_shard=1, cp=2).own_loop


TEXT = torch.zeros(2, 8)
MISTAKES: dict[str, tuple[Found, str]] = {
    "dims": ({"buffers": [TEXT, TEXT], "dims": [1]}, "2 buffers and 1 buffer_seq_dims: pass"),
    "none": ({"buffers": [], "dims": []}, "0 buffers and 0 buffer_seq_dims: pass"),
    "dimension": ({"dims": [2]}, r"buffers\[0\] has the shape \(2, 8\), and buffer_seq_dims\[0\] is 2: pass"),
    "no tensor": ({"buffers": [[1, 2]]}, r"buffers\[0\] is a list, .*: pass tensors"),
    "length": ({"buffers": [torch.zeros(2, 6)]}, "length 6, which 4 .2 · cp. does not divide: pad"),
    "lengths": ({"buffers": [TEXT, torch.zeros(2, 4)], "dims": [1, 1]}, r"lengths \[8, 4\]: pad them"),
    "gradient": (
        {"buffers": [TEXT.clone().requires_grad_()]},
        "requires a gradient, .*: pass what it is computed from",
    ),
    "kept": ({"kept": {torch.zeros(2, 8)}}, "not among the buffers: add it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_buffers_that_cannot_be_cut_are_refused(name: str) -> None:
    given, message = MISTAKES[name]
    arguments: Found = {"buffers": [TEXT], "dims": [1], "kept": set()} | given
    with pytest.raises(ConfigurationError, match=message), loop().in_parts(*arguments.values()):
        pass


def test_a_parallelism_config_divides_sequences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built: Any = ParallelismConfig(cp_size=2, dp_shard_size=2, tp_size=2).build()
    assert (str(built.layout), built._sequences[0]) == ("dp_shard 2 × cp 2 × tp 2", "gather")
    with caplog.at_level("INFO", "leyden"):
        built = ParallelismConfig(sp_size=4, sp_handler=DeepSpeedSequenceParallelConfig(256)).build()
    assert (str(built.layout), built._sequences[0]) == ("cp 4", "ulysses")
    assert "sp_size=4 divides sequences by MeshStrategy(cp=4, cp_method='ulysses'), without DeepSpeed" in caplog.text
    config = ParallelismConfig(cp_size=4, dp_shard_size=2)
    assert (config.cp_enabled, config.sp_enabled, config.total_size, config.data_parallel_size) == (True, False, 8, 2)
    assert (config.non_data_parallel_size, config.active_mesh_dims) == (4, ["dp_shard", "cp"])
    assert config.dp_shard_cp_dim_names == config.dp_cp_dim_names == ["dp_shard", "cp"]
    assert config.cp_handler == TorchContextParallelConfig("allgather")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert ParallelismConfig().cp_size == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    with pytest.raises(ConfigurationError, match="around a ring .* leave it out.* set sp_size in place of cp_size"):
        ParallelismConfig()


CONFIGS: dict[str, tuple[Any, str]] = {
    "both": (lambda: ParallelismConfig(cp_size=2, sp_size=2), "cp_size=2 and sp_size=2 both divide sequences"),
    "ring": (lambda: TorchContextParallelConfig("alltoall"), "around a ring"),
    "unknown": (lambda: TorchContextParallelConfig("gossip"), "'gossip' is not known: use 'allgather'"),
    "handler": (lambda: ParallelismConfig(cp_handler="allgather"), "Pass a TorchContextParallelConfig"),
    "attention": (
        lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2"),
        "Load the model with attn_implementation='sdpa'",
    ),
    "file": (
        lambda: MeshStrategy.from_accelerate(
            {"parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "alltoall"}
        ),
        "around a ring",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_sequences_that_does_not_work_is_refused(name: str) -> None:
    make, message = CONFIGS[name]
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_accelerates_file_divides_sequences(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "leyden"):
        strategy = MeshStrategy.from_accelerate(
            {"parallelism_config_dp_shard_size": 2, "parallelism_config_sp_size": 2}
        )
    assert caplog.text.count("sp_size=2 divides sequences by MeshStrategy(cp=2, cp_method='ulysses')") == 1
    assert (str(strategy.layout), strategy._sequences[0]) == ("dp_shard 2 × cp 2", "ulysses")
    strategy = MeshStrategy.from_accelerate({"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 1})
    assert (strategy.layout.cp, strategy._sequences[0]) == (2, "gather")
