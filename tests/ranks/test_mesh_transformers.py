"""Models of `transformers` on the mesh, split by their own plans, train like one process."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from models import QUIET
from ranks.share import Messages
from ranks.world import run_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.callbacks import ExpertBalancing
from leyden.checkpoint.hugging_face import HuggingFaceFolder
from leyden.checkpoint.merge import merge
from leyden.strategies import MeshStrategy
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.simulated import simulated

pytest.importorskip("transformers", minversion="5")

VOCABULARY, TOKENS, GLOBAL_BATCH, STEPS = 64, 12, 4, 20
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**{**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}))


def qwen(**changes: Any) -> nn.Module:
    """A model that normalizes the queries and keys of each head; a rank has some of the heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 8, **changes}))


def mixed_qwen(**changes: Any) -> nn.Module:
    """A mixture of experts whose first layer is dense."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    own = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **own, "mlp_only_layers": [0], **changes}))


def deepseek(**changes: Any) -> nn.Module:
    """A mixture whose routers add a bias to their scores, and choose groups of experts first."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    own = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {**SHAPE, **latent, **own, "moe_intermediate_size": 16, "num_key_value_heads": 4, **changes}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))


class Adapted(nn.Module):
    """A frozen linear layer with LoRA, under peft's names."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted() -> nn.Module:
    """A frozen Llama with trainable adapters."""
    model = llama(tie_word_embeddings=True).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "v_proj", "o_proj", "down_proj")):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Adapted(module))  # type: ignore[arg-type]
    return model


MODELS: dict[str, Any] = {
    "adapted": adapted,
    "deepseek": deepseek,
    "llama": llama,
    "mixtral": mixtral,
    "mixed qwen": mixed_qwen,
    "qwen": qwen,
}


class Causal(TrainModule):
    """Trains a language model by its own loss, from a batch of tokens, attention masks and labels.

    Args:
        kind: name of the model in `MODELS`.
        recomputes: whether backward recomputes the activations of its layers.
        late: whether configure_model builds the model, on the meta device if the strategy shards.
        momentum: momentum of the optimizer.
        **changes: options of the model's config.
    """

    def __init__(
        self, kind: str, recomputes: bool = False, late: bool = False, momentum: float = 0.0, **changes: Any
    ) -> None:
        super().__init__()
        self.build = lambda: MODELS[kind](**changes)
        self.recomputes, self.momentum = recomputes, momentum
        self.losses: list[float] = []
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        self.model: Any = self.build()
        if self.recomputes:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, mask, labels = batch
        return self.model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # In a pipeline the last stage has the loss.
        if outputs is not None:
            self.losses.append(float(outputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=self.momentum)


def data() -> TensorDataset:
    """Every sample begins with two padding tokens, and its last three labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, TOKENS), generator=generator)
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[:, :2], labels[:, :2], labels[:, -3:] = 0, -100, -100
    return TensorDataset(tokens, mask, labels)


Sizes: TypeAlias = "dict[str, int] | None"
"""Sizes of the mesh; None for one process."""


def trainer_of(sizes: Sizes, **arguments: Any) -> Trainer:
    """Returns a Trainer for 20 steps, which splits by the model's own plan."""
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes)
    return Trainer(strategy=strategy, max_epochs=1, gradient_clip_val=1.0, **QUIET, **arguments)


def loader(trainer: Trainer) -> DataLoader[Any]:
    return DataLoader(data(), GLOBAL_BATCH // trainer.strategy.data_size)


def train(sizes: Sizes, kind: str, arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module, trainer = Causal(kind, **changes), trainer_of(sizes, **arguments)
    trainer.fit(module, loader(trainer))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    # Parameters of other pipeline stages take the memory of one number here.
    own = [(name, p) for name, p in module.named_parameters() if local(p).untyped_storage().nbytes() > p.itemsize]
    return {
        "losses": module.losses,
        "data_rank": trainer.strategy.data_rank,
        "weights": {name: tensor.detach().double().numpy() for name, tensor in state.items()},
        "bytes": sum(local(p).untyped_storage().nbytes() for p in set(module.parameters())),
        "without a gradient": [name for name, p in own if p.requires_grad and p.grad is None],
        "is another stage": not module.losses,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True, "attn_implementation": "eager"}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "normed heads": ("qwen", {}),
    "recomputed": ("llama", {"tie_word_embeddings": False, "recomputes": True}),
    "experts": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "experts one by one": ("mixtral", {"experts_implementation": "eager"}),
    "adapters": ("adapted", {}),
}


def train_all(sizes: Sizes, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: train(sizes, kind, {}, **changes) for name, (kind, changes) in cases.items()}


def check_like_one_process(found: dict[str, Any], expected: dict[str, Any], name: str, tolerance: float = 1e-5) -> None:
    if not found["is another stage"]:
        assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance), name
    assert not found["without a gradient"], name
    for key, value in expected["weights"].items():
        assert abs(found["weights"][key] - value).max() < tolerance, (name, key)


def test_models_split_by_their_own_plans_train_like_one_process() -> None:
    single = train_all(None, CASES)
    whole = 6 * 1024
    for rank in run_world(2, train_all, {"tp": 2}, CASES):
        for name, expected in single.items():
            check_like_one_process(rank[name], expected, name)
            # Norms, routers and half of the adapters are whole on each rank.
            assert rank[name]["bytes"] < expected["bytes"] / 2 + whole, name


DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "experts in groups": ("mixtral", {"experts_implementation": "grouped_mm"}),
    "experts one by one": ("mixtral", {"experts_implementation": "eager", "recomputes": True}),
    "some dense layers": ("mixed qwen", {"late": True}),
    "biases": ("deepseek", {"recomputes": True}),
}


def train_divided(sizes: Sizes) -> dict[str, Any]:
    """Adds the number of all-to-alls."""
    found = {}
    for name, (kind, changes) in DIVIDED.items():
        arguments = {"callbacks": ExpertBalancing(0.01)} if name == "biases" else {}
        with Messages() as messages:
            found[name] = train(sizes, kind, arguments, **changes)
        found[name]["sent"] = messages.counts.get("all_to_all_single", 0)
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"ep": 2},
        {"ep": 2, "pp": 2, "microbatches": 2},
        *(pytest.param(s, marks=pytest.mark.full) for s in ({"dp_shard": 4, "ep": 2}, {"ep": 2, "tp": 2})),
    ],
    ids=str,
)
def test_experts_divided_by_their_own_plan_train_like_one_process(sizes: dict[str, int]) -> None:
    single = train_divided(None)
    biases = [value for key, value in single["biases"]["weights"].items() if key.endswith("e_score_correction_bias")]
    assert len(biases) == 1 and biases[0].any()
    for rank in run_world(2 if sizes == {"ep": 2} else 4, train_divided, sizes):
        # One of them recomputes its layers, by the model's own gradient checkpointing.
        assert rank["experts one by one"]["sent"] == rank["experts in groups"]["sent"] > 0
        for name, expected in single.items():
            # Losses of data ranks are those of their own samples; the weights follow from all of them.
            check_like_one_process({**rank[name], "is another stage": True}, expected, name)


PIPELINED = {name: case for name, case in CASES.items() if name != "experts"}
"""All cases but that of an auxiliary loss over all routers, of which each stage has only some."""


@pytest.mark.parametrize(
    "sizes", [{"pp": 2}, pytest.param({"pp": 2, "tp": 2, "dp_shard": 1}, marks=pytest.mark.full)], ids=str
)
def test_models_split_into_pipeline_stages_train_like_one_process(sizes: dict[str, int]) -> None:
    single = train_all(None, PIPELINED)
    for rank in run_world(2 * sizes.get("tp", 1), train_all, {**sizes, "microbatches": 2}, PIPELINED):
        for name, expected in single.items():
            check_like_one_process(rank[name], expected, name)
            # A stage holds one of two blocks, and the embedding or the head.
            assert rank[name]["bytes"] < 0.7 * expected["bytes"], name


PRECISIONS = {"bf16-mixed": 0.03, "bf16-true": 0.06, "64-true": 1e-9}
"""Tolerances for the losses of a few steps: bf16 has eight bits, and the ranks sum in another order."""


def train_in_precisions(sizes: Sizes) -> dict[str, Any]:
    """Trains in each precision, with windows of two batches; on a mesh, the strategy recomputes activations."""
    sizes_and_policy: Any = (
        None if sizes is None else {**sizes, "activation_checkpointing_policy": {"LlamaDecoderLayer"}}
    )
    window = {"accumulate_grad_batches": 2}
    return {
        precision: train(sizes_and_policy, "llama", {"precision": precision, **window}, tie_word_embeddings=False)
        for precision in PRECISIONS
    }


@pytest.mark.full
def test_precisions_with_windows_and_recomputation_train_like_one_process() -> None:
    single = train_in_precisions(None)
    for rank in run_world(2, train_in_precisions, {"tp": 2}):
        for precision, tolerance in PRECISIONS.items():
            check_like_one_process(rank[precision], single[precision], precision, tolerance)


def train_compiled(sizes: Sizes) -> dict[str, Any]:
    sizes_and_compile: Any = None if sizes is None else {**sizes, "compile": {"backend": "aot_eager"}}
    return train(sizes_and_compile, "llama", {"limit_train_batches": 3}, tie_word_embeddings=False)


@pytest.mark.full
def test_blocks_compiled_on_a_mesh_train_like_one_process() -> None:
    single = train_compiled(None)
    for rank in run_world(2, train_compiled, {"tp": 2}):
        check_like_one_process(rank, single, "compiled")


SAVED_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
}


def bytes_read() -> int:
    """Returns the bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def continue_all(sizes: Sizes, folder: Path, to: Path) -> dict[str, Any]:
    """Trains models from folders of transformers; saves them to other folders, with checkpoints beside them."""
    found = {}
    for name, (kind, changes) in SAVED_MODELS.items():
        torch.manual_seed(1)
        module, trainer = Causal(kind, late=True, momentum=0.5, **changes), trainer_of(sizes)
        trainer.fit(module, loader(trainer), ckpt_path=folder / name, restore="weights")
        state = trainer.strategy.full_state_dict(module.model)
        if trainer.strategy.ranks.is_global_zero:
            module.model.save_pretrained(to / name, state_dict=state)
        trainer.save_checkpoint(to / f"{name}.leyden")
        before, reader = bytes_read(), HuggingFaceFolder(folder / name).within(module)
        reader.fill({key: tensor for key, tensor in module.state_dict().items() if key in reader.names()})
        read = bytes_read() - before
        found[name] = {"losses": module.losses, "data_rank": trainer.strategy.data_rank, "read": read}
        again, resumed = Causal(kind, late=True, momentum=0.5, **changes), trainer_of(sizes)
        resumed.fit(again, loader(resumed), ckpt_path=to / f"{name}.leyden")
        assert not again.losses, "a finished run trained on"
        for before, after in zip(momenta(trainer, module), momenta(resumed, again), strict=True):
            assert torch.equal(before, after)
    return found


def momenta(trainer: Trainer, module: nn.Module) -> list[torch.Tensor]:
    """Returns this rank's part of each parameter's momentum."""
    optimizer = trainer.optimizers[0]
    return [local(optimizer.state[parameter]["momentum_buffer"]) for parameter in module.parameters()]


@pytest.mark.full
def test_folders_of_transformers_are_loaded_into_shards_trained_and_saved_back(tmp_path: Path) -> None:
    for name, (kind, changes) in SAVED_MODELS.items():
        MODELS[kind](**changes).save_pretrained(tmp_path / "start" / name)  # type: ignore[operator]
    single = continue_all(None, tmp_path / "start", tmp_path / "single")
    ranks = run_world(4, continue_all, {"dp_shard": 2, "tp": 2}, tmp_path / "start", tmp_path / "ranks")
    for name, (kind, changes) in SAVED_MODELS.items():
        readers = {rank[name]["data_rank"]: rank[name]["losses"] for rank in ranks}
        losses = [sum(column) / len(column) for column in zip(*readers.values(), strict=True)]
        assert losses == pytest.approx(single[name]["losses"], abs=1e-5)
        size = (tmp_path / "start" / name / "model.safetensors").stat().st_size
        # More than half, since rows of a rowwise layer are read in full width.
        assert max(rank[name]["read"] for rank in ranks) < 0.6 * size
        model = type(MODELS[kind](**changes))
        expected = model.from_pretrained(tmp_path / "single" / name).state_dict()  # type: ignore[attr-defined]
        merged = tmp_path / "ranks" / name / "merged"
        merge(tmp_path / "ranks" / f"{name}.leyden", merged / "model.safetensors", "model")
        shutil.copy(tmp_path / "ranks" / name / "config.json", merged)
        for folder in (merged.parent, merged):
            found = model.from_pretrained(folder).state_dict()  # type: ignore[attr-defined]
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.allclose(found[key], value, rtol=0, atol=1e-5), (name, key)


def gpt_oss(**changes: Any) -> nn.Module:
    """A model whose plan splits its head alone."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**{**SHAPE, "num_local_experts": 4, "head_dim": 8, **changes}))


def share_of(make: Any) -> tuple[str, list[str]]:
    model = make()
    with warnings.catch_warnings(record=True) as caught, simulated(Layout(1, 1, 2)) as strategy:
        warnings.simplefilter("always")
        strategy.setup_modules([model])
        return strategy.details, [
            str(warning.message) for warning in caught if "the plan splits" in str(warning.message)
        ]


@pytest.mark.parametrize(
    ("make", "details", "warned"),
    [
        (llama, "tp 2 of 2 ranks, 99% of the parameters split", []),
        (gpt_oss, "tp 2 of 2 ranks, 4% of the parameters split", ["splits 4% of", "model.layers.*.mlp.experts ("]),
    ],
)
def test_fit_shows_the_share_that_a_plan_splits_and_warns_below_half(
    make: Any, details: str, warned: list[str]
) -> None:
    [(shown, messages)] = run_world(1, share_of, make)
    assert shown == details
    assert len(messages) == bool(warned)
    assert all(words in message for message in messages for words in warned)
