"""Context parallelism on real ranks: the losses and weights of one process, whatever the layout."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_models import make_model
from models import QUIET
from ranks import mixture
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN, data
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from leyden import Trainer
from leyden.callbacks import ActivationCheckpointing, Callback, WeightAveraging
from leyden.core.errors import ConfigurationError
from leyden.strategies import MeshStrategy, sequence_positions
from leyden.strategies.base import RunSettings
from leyden.strategies.window import Window

GLOBAL_BATCH = 4
LENGTH = 13
"""A length that no number of ranks divides."""


class LongGPT(GPT):
    """The GPT of the mesh's tests, with the positions of its part of a sequence."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.counted = SumMetric()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(sequence_positions(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.log("loss", outputs["loss"] / outputs["num_items"], on_step=True, on_epoch=True)
        self.log("tokens", float(outputs["num_items"]), on_step=False, on_epoch=True, reduce_fx="sum")
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = GPT.training_step(self, batch, batch_idx)
        self.log("val_loss", outputs["loss"] / outputs["num_items"], batch_size=outputs["num_items"])
        self.counted.update(outputs["num_items"])
        self.log("val_tokens", self.counted)

    def on_validation_epoch_end(self) -> None:
        self.log("val_tokens_by_compute", self.counted.compute())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def texts(samples: int) -> TensorDataset:
    return TensorDataset(*(tensor[:, :LENGTH] for tensor in data(samples).tensors))


class Encoder(LongGPT):
    """Sees the whole sequence, but for some keys. In evaluation, torch's encoder layers have code of their own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(sequence_positions(tokens.shape[1]))
        x = self.blocks[1](self.blocks[0](x), src_key_padding_mask=tokens % 7 == 6)
        return self.head(self.norm(x))


RUNS: dict[str, dict[str, Any]] = {
    "gather": {},
    "ulysses": {"cp_method": "ulysses"},
    "accumulated": {"accumulate_grad_batches": 3},
    "checkpointed": {"activation_checkpointing_policy": {"Block"}},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "bf16": {"precision": "bf16-mixed"},
    "averaged": {"callbacks": ["average"]},
    "idle": {"samples": 1},
    "encoder": {"kind": "encoder"},
    "by callback": {"callbacks": ["checkpoint"], "cp_method": "ulysses"},
    "clipped by value": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.02, "validates_first": True},
    "watched": {"detect_anomaly": True},
}
OF_STRATEGY = ("cp_method", "activation_checkpointing_policy", "compile", "schedule", "microbatches")
STAGED: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "GPipe", "microbatches": 3},
    "interleaved": {"depth": 4, "schedule": "Interleaved1F1B", "microbatches": 2, "cp_method": "ulysses"},
    "recomputed": {"depth": 4, "schedule": "Interleaved1F1B", **RUNS["checkpointed"], **RUNS["accumulated"]},
}
"""Runs of pipelines."""


def train(
    sizes: dict[str, int] | None,
    plan: Any = None,
    start: Path | None = None,
    save: Path | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Trains for two epochs, whose last global batch has 3 samples, then predicts. With `save`, stops at step 7."""
    torch.manual_seed(0)
    options = {name: arguments.pop(name) for name in OF_STRATEGY if name in arguments}
    dims = {"sequence_dims": {0: 1, 1: 1}, "sequence_padding": {0: 0, 1: -100}}
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes, **options, **dims, plan=plan)
    samples, depth = arguments.pop("samples", 39), arguments.pop("depth", 2)
    kind = Encoder if arguments.pop("kind", "") else LongGPT
    chosen: dict[str, Any] = {"average": WeightAveraging, "checkpoint": lambda: ActivationCheckpointing({"Block"})}
    callbacks = [chosen[name]() for name in arguments.pop("callbacks", ())]
    validates_first, dropout = arguments.pop("validates_first", False), arguments.pop("dropout", 0.0)
    given = (
        {"gradient_clip_val": 1.0, "precision": "64-true", "max_epochs": 2, "max_steps": -1 if save is None else 7}
        | QUIET
        | arguments
    )
    trainer = Trainer(strategy=strategy, callbacks=callbacks, **given)
    size = GLOBAL_BATCH // trainer.strategy.data_size
    module = kind(counts_items=True, depth=depth, dropout=dropout)
    if validates_first:
        trainer.validate(module, DataLoader(texts(7), size))
        trainer.predict(module, DataLoader(texts(GLOBAL_BATCH), size))
    trainer.fit(module, DataLoader(texts(samples), size, shuffle=True), DataLoader(texts(7), size), ckpt_path=start)
    if save is not None:
        trainer.save_checkpoint(save)
        return {}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, DataLoader(texts(GLOBAL_BATCH), size)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "losses": module.losses,
        "metrics": metrics,
        "has_losses": trainer.strategy.outputs.on_ranks(trainer.strategy.ranks)[trainer.global_rank],
        "weights": {name: tensor.double().numpy() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).double().numpy(),
    }


def all_runs(sizes: dict[str, int] | None, plan: Any, names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    found = {name: train(sizes, plan, **(RUNS | STAGED)[name]) for name in names}
    if sizes is not None:
        train(sizes, plan, save=folder / "parts")
        if "watched" in names:
            train(sizes, plan, save=folder / "dropout", dropout=0.2)
            found["dropout"] = train(sizes, plan, dropout=0.2)
            found["dropout resumed"] = train(sizes, plan, start=folder / "dropout", dropout=0.2)
        found["resumed"] = train(sizes, plan, start=folder / "parts")
        found["resumed from one process"] = train(sizes, plan, start=folder / "whole")
    return found


LAYOUTS: list[Any] = [
    ({"dp_shard": 1, "cp": 2}, None, [name for name in RUNS if name != "idle"]),
    ({"dp_shard": 1, "cp": 4}, None, ["gather", "ulysses"]),
    ({"dp_shard": 2, "cp": 2}, None, ["gather", "accumulated", "averaged", "idle"]),
    ({"dp_shard": 1, "cp": 2, "pp": 2}, None, ["gather", "averaged", *STAGED]),
    ({"dp_shard": 1, "cp": 2, "tp": 2}, PLAN, ["gather", "ulysses", "checkpointed"]),
    pytest.param({"dp_shard": 2, "cp": 2, "tp": 2}, SEQUENCE_PLAN, ["gather", "averaged"], marks=pytest.mark.full),
    pytest.param({"dp_replicate": 2, "dp_shard": 1, "cp": 4}, None, ["gather", "accumulated"], marks=pytest.mark.full),
    pytest.param({"dp_shard": 1, "cp": 2, "pp": 2}, None, [*RUNS], marks=pytest.mark.full),
    pytest.param(
        {"dp_shard": 2, "cp": 2, "pp": 2}, None, ["gather", "averaged", "recomputed", "idle"], marks=pytest.mark.full
    ),
    pytest.param({"dp_shard": 1, "cp": 2, "tp": 2, "pp": 2}, PLAN, ["gather", "interleaved"], marks=pytest.mark.full),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("sizes", "plan", "names"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_context_parallel_trains_and_resumes_like_one_process(
    sizes: dict[str, int], plan: Any, names: list[str], tmp_path: Path
) -> None:
    single = all_runs(None, None, names, tmp_path)
    train(None, save=tmp_path / "whole")
    has_all = sizes["dp_shard"] * sizes.get("dp_replicate", 1) == 1
    for rank in run_world(math.prod(sizes.values()), all_runs, sizes, plan, names, tmp_path, timeout=480):
        for name in names:
            check(rank[name], single[name], 2e-2 if name == "bf16" else 1e-9, has_all)
        for resumed, through in {"resumed": "gather", "dropout resumed": "dropout"}.items():
            for name, value in rank.get(resumed, {"weights": {}})["weights"].items():
                assert (value == rank[through]["weights"][name]).all(), f"a resume on the same layout: {name}"
        check_weights(rank["resumed from one process"], single["gather"], 1e-9)
    check_weights(train(None, start=tmp_path / "parts"), single["gather"], 1e-9)


def check(rank: dict[str, Any], single: dict[str, Any], tolerance: float, has_all: bool) -> None:
    if has_all and rank["has_losses"]:
        assert rank["losses"] == pytest.approx(single["losses"], rel=tolerance)
    # On each data rank, this is the value of its own batch.
    own, expected = ({k: v for k, v in found["metrics"].items() if k != "loss_step"} for found in (rank, single))
    assert own == pytest.approx(expected, rel=tolerance)
    assert abs(rank["predicted"] - single["predicted"]).max() < 10 * tolerance
    check_weights(rank, single, 3 * tolerance)


def check_weights(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name, value in expected["weights"].items():
        assert abs(found["weights"][name] - value).max() < tolerance, name


class Mixed(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(mixture.WIDTH, 4, bias=False)
        self.experts = mixture.Experts(4, has_bias=True, scales_inputs=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        mixed: Tensor = self.experts(tokens, index, weights)
        return mixed.view_as(x)


def mix(sizes: dict[str, int] | None) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    module = LongGPT(counts_items=True, width=mixture.WIDTH)
    for block in module.blocks:
        block.up, block.down = nn.Identity(), Mixed()  # type: ignore[assignment]
    options: dict[str, Any] = {"plan": {"blocks.*.down.experts": "expert_parallel"}, "sequence_dims": {0: 1, 1: 1}}
    strategy: Any = MeshStrategy(**sizes, **options) if sizes else "single_device"
    trainer = Trainer(strategy=strategy, max_epochs=1, precision="64-true", gradient_clip_val=1.0, **QUIET)
    trainer.fit(module, DataLoader(data(16), GLOBAL_BATCH))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return module.losses, {name: tensor.numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_experts_are_divided_over_the_ranks_that_divide_sequences(stages: int) -> None:
    losses, weights = mix(None)
    sizes = {"dp_shard": 1, "cp": 2, "ep": 2} | ({"pp": 2, "microbatches": 4} if stages > 1 else {})
    ranks = run_world(2 * stages, mix, sizes)
    assert sum(bool(own) for own, _ in ranks) == 2
    for own, found in ranks:
        # In a pipeline the last stage has the loss.
        assert not own or own == pytest.approx(losses, rel=1e-9)
        check_weights({"weights": found}, {"weights": weights}, 1e-9)


def llama(sizes: dict[str, Any] | None) -> list[tuple[list[float], dict[str, Any], dict[str, float]]]:
    """Trains a Llama on rows that are whole, padded at their end or start, and packed, by each method in turn."""
    from leyden.hf import HFModule

    found = []
    for kind in ("whole", "right", "left", "packed"):
        for method in ("gather", "ulysses") if sizes else ("gather",):
            chosen: dict[str, Any] = {**(sizes or {}), "cp_method": method}
            strategy: Any = MeshStrategy(**chosen) if sizes else "single_device"
            losses = Losses()
            options = {**QUIET, "max_epochs": 1, "precision": "64-true", "callbacks": [losses]}
            trainer = Trainer(strategy=strategy, **options)
            module = HFModule(make_model("llama"), lr=1e-3, label_smoothing=0.1 if kind == "right" else 0.0)
            loader = DataLoader(rows_of(kind), 4)
            trainer.fit(module, loader, loader)
            state = trainer.strategy.full_state_dict(module, rank0_only=False)
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            found.append((losses.found, {name: t.double().numpy() for name, t in state.items()}, metrics))
    return found


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.found.append(float(outputs["loss"]))


def rows_of(kind: str) -> list[dict[str, Tensor]]:
    """Returns rows of 22 tokens, a length that two ranks do not divide."""
    found, places = [], torch.arange(22)
    for index in range(8):
        ids = torch.randint(1, 64, (22,), generator=torch.Generator().manual_seed(index))
        row, padding = {"input_ids": ids, "labels": ids.clone()}, index % 5
        if kind == "packed":
            first = 5 + index % 7
            row["position_ids"] = torch.where(places < first, places, places - first)
            row["labels"][first] = -100
        elif kind in ("right", "left"):
            mask = places < 22 - padding if kind == "right" else places >= padding
            row["attention_mask"], row["labels"] = mask.long(), torch.where(mask, ids, -100)
        found.append(row)
    return found


RECOMPUTED = {"pp": 2, "microbatches": 2, "activation_checkpointing_policy": {"LlamaDecoderLayer"}}


@pytest.mark.parametrize("sizes", [{"dp_shard": 1, "cp": 2}, {"dp_shard": 1, "cp": 2, **RECOMPUTED}], ids=["", "pp"])
def test_models_of_transformers_train_like_one_process_with_padding_and_packed_documents(sizes: dict[str, Any]) -> None:
    pytest.importorskip("transformers", minversion="5")
    single = llama(None)
    ranks = run_world(2 * sizes.get("pp", 1), llama, sizes)
    for index, rank in enumerate(ranks):
        for (losses, weights, metrics), (expected, own, values) in zip(
            rank, [s for s in single for _ in "12"], strict=True
        ):
            # Such a model computes its loss in float32, whatever its precision. Only a last stage has it.
            assert losses == pytest.approx(expected if index >= len(ranks) - 2 else [], rel=1e-6)
            assert metrics == pytest.approx(values, rel=1e-6)
            assert max(abs(weights[name] - value).max() for name, value in own.items()) < 1e-5


# mistakes -------------------------------------------------------------------------------------------------------------
class Mean(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())


class Positions(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        return LongGPT.forward(self, tokens)  # type: ignore[arg-type]


class Shifts(Positions):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self(batch[0])[:, :-1], batch[0][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss, "num_items": labels.numel()}


class EmptyPart(Positions):
    """Multiplies a mean over labels by their number, which is nan on a rank whose part has none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        places = sequence_positions(batch[0].shape[1])
        labels = batch[1].masked_fill((places > 1) & (places < 6), -100).flatten()
        count = int((labels != -100).sum())
        return {"loss": F.cross_entropy(self(batch[0]).flatten(0, 1), labels) * count, "num_items": count}


class Sums(Positions):
    """Mixes each position with those before it."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).cumsum(1) / 8


class Masks(Positions):
    """Makes the mask of pairs of positions itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        x = self.tokens(tokens)[:, None]
        return self.head(F.scaled_dot_product_attention(x, x, x, mask)[:, 0])


class ZeroHead(GPT):
    """Has the loss of a guess, whatever its positions are."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = torch.nn.Linear(32, 64)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)


class Weights(Positions):
    """Asks for the weights of attention, which torch then computes without its own function."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(x + self.attention(x, x, x)[0])


class Cross(Positions):
    """Attends to as many vectors of its own as a rank has positions."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.memory = torch.nn.Parameter(torch.randn(1, 1, 8, 32))

    def forward(self, tokens: Tensor) -> Tensor:
        x, memory = self.tokens(tokens)[:, None], self.memory.expand(len(tokens), 1, 8, 32)
        return self.head(F.scaled_dot_product_attention(x, memory, memory)[:, 0])


class Residual(Positions):
    """Reads the embedding after the blocks, which is another stage's."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


DIMS: dict[str, Any] = {"sequence_dims": {0: 1, 1: 1}, "sequence_padding": {0: 0, 1: -100}}
ONE_HEAD = {"n_heads": 1, "n_kv_heads": 1}
MISTAKES: list[tuple[type[GPT], dict[str, Any], dict[str, Any], str]] = [
    (Mean, DIMS, {}, "context parallelism needs losses by items"),
    (GPT, DIMS, {}, "the loss of a sequence's parts is"),
    (Shifts, DIMS, {}, "num_items of the parts of a sequence add up to"),
    (EmptyPart, DIMS, {}, "the loss of a sequence's parts is nan"),
    (Sums, DIMS, {}, "the loss of a sequence's parts is"),
    (ZeroHead, DIMS, {}, "the loss of a sequence's parts is"),
    (Weights, DIMS, {}, "the loss of a sequence's parts is"),
    (Cross, DIMS, {}, "each rank's part of the sequences has 8 positions, and so have other keys"),
    (Masks, DIMS, {}, "a mask of shape (4, 4) was passed to attention"),
    (Positions, {}, {}, "context parallelism cuts the sequences of a batch"),
    (Positions, {"sequence_dims": {0: 1}}, {}, "the batch's tensor 1 has the shape (4, 13)"),
    (Positions, {"sequence_dims": {0: 1, 1: 1}}, {}, "the sequences of a batch have length 13, which 4 (2 · cp)"),
    (Positions, {"sequence_dims": {0: 2, 1: 1}}, {}, "sequence_dims has 0: 2"),
    (Positions, {"sequence_dims": {0: 0, 1: 1}}, {}, "the sequences of a batch differ in length: {0: 4, 1: 13}"),
    (Positions, {**DIMS, "cp_method": "ulysses"}, ONE_HEAD, "cp_method='ulysses' divides the heads of attention"),
]


def prefixed(**changes: Any) -> Any:
    """Returns a Llama that makes its mask itself, with changes to the causal one beyond the rehearsal's positions."""
    from transformers import LlamaForCausalLM
    from transformers.masking_utils import create_causal_mask

    class Own(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
            embeds = self.model.embed_tokens(input_ids)
            given = {name: make(embeds) for name, make in changes.items()}
            mask = create_causal_mask(self.config, embeds, None, None, position_ids, **given)
            return super().forward(inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, **kwargs)

    return Own(make_model("llama").config)


def sees_block(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (query >= 10) & (key >= 10)


def sees_near(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return query - key < 20


MASK_CHANGES: dict[str, dict[str, Any]] = {
    "or_masks, sees_block": {"or_mask_function": lambda embeds: sees_block},
    "sees_near": {"and_mask_function": lambda embeds: sees_near},
    "blockwise_overlay, or_masks": {"block_sequence_ids": lambda embeds: torch.ones(embeds.shape[:2]).long()},
}


def mask_mistakes() -> list[str]:
    found = []
    for changes in ({}, *MASK_CHANGES.values()):
        model = prefixed(**changes)
        strategy = MeshStrategy(dp_shard=1, cp=2)
        strategy.setup_environment()
        strategy.setup_modules([model])

        def step(batch: Any, batch_idx: int, model: Any = model) -> Any:
            logits = model(batch["input_ids"], batch.get("position_ids")).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, batch["shift_labels"].flatten(), reduction="sum")
            return {"loss": loss, "num_items": logits.shape[0]}

        ids = rows_of("whole")[0]["input_ids"][None, :20]
        try:
            strategy.forward_backward(step, {"input_ids": ids, "shift_labels": ids}, (0,), Window(), NoHooks())
            found.append("no error")
        except ConfigurationError as raised:
            found.append(str(raised))
    return found


def test_masks_that_add_to_causal_attention_are_refused_by_name() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    for plain, *rank in run_world(2, mask_mistakes):
        assert plain == "no error"
        for text, names in zip(rank, MASK_CHANGES, strict=True):
            assert text.startswith(f"the model changes which keys attention sees by {names} (such as"), text


class NoHooks:
    on_before_backward = on_after_backward = ()
    backward = None


def mistakes_of(pp: int) -> list[Any]:
    """Returns the mistakes that reach the first batch. A pipeline refuses any step that does not run the blocks."""
    if pp == 1:
        return MISTAKES
    return [
        (kind, options, *rest)
        for kind, options, *rest in MISTAKES
        if kind not in (Masks, Weights, Cross) and 0 not in options.get("sequence_dims", {}).values()
    ]


def mistakes(pp: int) -> list[tuple[str, bool]]:
    """Returns the error of each first batch, and whether the weights are unchanged."""
    found = []
    for kind, options, shape, _ in mistakes_of(pp):
        torch.manual_seed(0)
        module = kind(counts_items=True, **shape)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        strategy = MeshStrategy(dp_shard=1, cp=2, pp=pp, **options)
        strategy.setup_environment()
        strategy.setup_modules([module])
        batch = tuple(tensor[:4] for tensor in texts(4).tensors)
        error = "no error"
        try:
            step = strategy.setup_step(module.training_step, module)
            strategy.forward_backward(step, batch, (0,), Window(), NoHooks())
        except ConfigurationError as raised:
            error = str(raised)
        held = {p: name for name, p in module.named_parameters() if strategy.held([p])}
        unchanged = [torch.equal(before[name], p.full_tensor()) and p.grad is None for p, name in held.items()]
        found.append((error, bool(unchanged) and all(unchanged)))
    strategy = MeshStrategy(dp_shard=1, cp=2, pp=pp, **DIMS)
    strategy.setup_environment()
    if pp > 1:
        with pytest.raises(ConfigurationError, match="silently wrong in torch for sharded or split weights"):
            MeshStrategy(dp_shard=1, cp=2, pp=pp, schedule="ZBVZeroBubble").schedule  # noqa: B018
        strategy.setup_modules([module := Residual(counts_items=True)])
        step = strategy.setup_step(module.training_step, module)
        with pytest.raises(ConfigurationError, match="stage 1 of the pipeline .* computes with 'tokens'"):
            strategy.forward_backward(step, tuple(texts(4).tensors), (0,), Window(), NoHooks())
    strategy.setup_modules([module := GPT()])
    with pytest.raises(ConfigurationError, match="what this step computes for the first positions"):
        strategy.evaluate(strategy.setup_step(module.predict_step, module), tuple(texts(4).tensors), (0,))
    with pytest.raises(ConfigurationError, match="cp=2: context parallelism makes one loss of the parts"):
        strategy.check_settings(RunSettings(manual=True))
    return found


@pytest.mark.parametrize("pp", [1, 2])
def test_mistakes_are_refused_before_the_first_backward(pp: int) -> None:
    for rank in run_world(2 * pp, mistakes, pp):
        for (text, is_unchanged), (kind, _, _, expected) in zip(rank, mistakes_of(pp), strict=True):
            assert text.startswith(expected), (kind.__name__, text)
            assert is_unchanged, kind.__name__


class LogsOwnPart(LongGPT):
    """Logs a value in one part of the sequences only, or under other names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(counts_items=True)
        self.names = names

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            for name in self.names:
                self.log(name, 1.0)
        return super().training_step(batch, batch_idx)


def log_apart() -> list[str]:
    """Returns the ends of a fit in which the second rank logs nothing, and of those in which it logs less."""
    # With the two of every step, 64 values are as many as one message takes.
    names = [["few"], [], *([f"value {number}" for number in range(count)] for count in (40, 3, 70, 62))]
    found = []
    for own, other in zip(names[::2], names[1::2], strict=True):
        trainer = Trainer(strategy=MeshStrategy(dp_shard=1, cp=2, **DIMS), max_epochs=1, **QUIET)
        module = LogsOwnPart(own if int(os.environ["RANK"]) else other)
        with pytest.raises((ConfigurationError, SystemExit)) as error:
            trainer.fit(module, DataLoader(texts(8), 4))
        found.append(str(error.value))
    return found


def test_values_that_some_ranks_of_a_cp_group_log_are_refused() -> None:
    # Both ranks raise, and the one that raises first names the mistake: nothing hangs, whichever rank logs more.
    for texts_of_ranks in zip(*run_world(2, log_apart), strict=True):
        named = ["the ranks of a cp group called self.log with different names" in text for text in texts_of_ranks]
        assert any(named)
        assert all(is_named or text == "1" for is_named, text in zip(named, texts_of_ranks, strict=True))


class LogsMuch(LongGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("whole", torch.tensor(3 + int(os.environ["RANK"])), batch_size=1)
        is_empty = os.environ["RANK"] == "1"
        self.log("most", math.nan if is_empty else 2.0, batch_size=0 if is_empty else 1, reduce_fx="max")
        self.log("true", torch.tensor(True), reduce_fx="sum", on_step=False, on_epoch=True)
        for number in range(70):
            self.log(f"value {number}", float(number))
        return super().training_step(batch, batch_idx)


def log_much() -> dict[str, float]:
    """Returns the metrics of a fit whose second batch has no label."""
    strategy = MeshStrategy(dp_shard=1, cp=2, sequence_dims={0: -1, 1: -1}, sequence_padding={0: 0, 1: -100})
    trainer = Trainer(strategy=strategy, max_epochs=1, **QUIET)
    tokens, labels = texts(8).tensors
    labels[4:] = -100
    trainer.fit(LogsMuch(counts_items=True), DataLoader(TensorDataset(tokens, labels), 4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_numbers_without_labels_and_whole_numbers_are_logged_as_they_are() -> None:
    for metrics in run_world(2, log_much):
        assert metrics["whole"] == 3.5
        assert metrics["most"] == 2
        assert metrics["true"] == 4
        assert [metrics[f"value {number}"] for number in range(70)] == list(range(70))
        assert math.isnan(metrics["loss_step"])


class Totals(LongGPT):
    """Counts in the step, and logs after the epoch."""

    total = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total += int((batch[1] % 2 == 0).sum())

    def on_validation_epoch_end(self) -> None:
        self.log("even", float(self.total))


def totals() -> None:
    trainer = Trainer(strategy=MeshStrategy(dp_shard=1, cp=2, **DIMS), **QUIET)
    trainer.validate(Totals(counts_items=True), DataLoader(texts(4), 4))


def test_values_that_ranks_have_counted_apart_are_refused() -> None:
    errors = run_world(2, totals, may_fail=True)
    assert any("self.log('even') in on_validation_epoch_end got different values" in str(error) for error in errors)
