"""fp8 in one process: which layers it converts, what they compute, that nothing else changes, and what is refused."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import QUIET
from same import same_weights
from torch import Tensor, nn
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

import leyden.strategies.precision
from leyden import Callback, ConfigurationError, Trainer, TrainModule
from leyden.core.errors import MissingExtraError
from leyden.strategies.precision import Float8Precision, find_precision, fp8
from leyden.strategies.precision.fp8_config import precision_of_config, without_effect

BY_ROWS = pytest.mark.skipif(
    not fp8._cpu_supports_rowwise(), reason=f"on a CPU torch {torch.__version__} supports only one scale per operand"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.odd, self.back = nn.Linear(32, 24), nn.Linear(24, 32)
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.attention(x, x, x)[0]
        return self.last(self.back(self.odd(x)))


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.evaluated: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch).float() - batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluated.append(self.net(batch).float())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int = 5) -> list[Tensor]:
    """Returns batches of 3 × 7 tokens, not a multiple of 16."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 7, 16, generator=generator) for _ in range(count)]


def build() -> Regression:
    torch.manual_seed(0)
    return Regression()


def fitted(precision: Any, folder: Path, module: Regression | None = None, **arguments: Any) -> Regression:
    module = build() if module is None else module
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": folder, "precision": precision, **arguments})
    trainer.fit(module, batches(), batches(1))
    return module


def converted(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, Float8Linear)]


# which layers ---------------------------------------------------------------------------------------------------------
BLOCKS = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, BLOCKS),
        ({"first_and_last": True}, ["first", *BLOCKS, "last"]),
        ({"skip": ["blocks.1"]}, BLOCKS[:2]),
        ({"skip": ["blocks.0.0", nn.GELU]}, BLOCKS[1:]),
        ({"skip": ["GELU", "Sequential"]}, []),
        ({"choose": lambda module, name: module.in_features == 32}, ["blocks.0.0", "blocks.1.0", "last"]),
    ],
)
@pytest.mark.filterwarnings("ignore:precision='fp8' converts no Linear")
def test_arguments_choose_the_converted_layers(arguments: Any, expected: list[str]) -> None:
    assert converted(Float8Precision(**arguments).convert_module(Net())) == expected


def test_every_unconverted_layer_has_a_reason() -> None:
    chosen = Float8Precision(skip=["blocks.0"]).layers.of(Net())
    assert chosen.left["first"] == chosen.left["last"] == "first or last"
    assert chosen.left["odd"] == chosen.left["back"] == "not divisible by 16"
    assert chosen.left["attention.out_proj"] == "of the class NonDynamicallyQuantizableLinear"
    assert chosen.left["blocks.0.2"] == "skipped"


def test_a_model_without_an_fp8_layer_is_reported(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"converts no Linear of Sequential \(2 first or last\), so it runs in bf16-mixed"
    ):
        Float8Precision().convert_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))


def test_skipping_an_unknown_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"skip='block': Net has no such module\. Did you mean 'blocks'\?"):
        Float8Precision(skip=["block"]).convert_module(Net())


# computation ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", pytest.param("rowwise", marks=BY_ROWS), pytest.param("rowwise_with_gw_hp", marks=BY_ROWS)],
)
def test_a_converted_layer_matches_torchaos_float8linear(recipe: Any) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 48)), torch.randn(2, 16, 32)
    expected = nn.Sequential(nn.Linear(32, 48))
    expected.load_state_dict(net.state_dict())
    theirs = Float8Linear.from_float(expected[0], config=Float8LinearConfig.from_recipe_name(recipe))
    precision = Float8Precision(recipe, first_and_last=True)
    parameters = list(net.parameters())
    precision.convert_module(net)
    assert precision.forward_context is not None
    with precision.forward_context():
        ours = net(x)
    wanted = theirs(x.bfloat16())
    (ours.float().square().mean()).backward()
    (wanted.float().square().mean()).backward()
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, wanted)
    assert [p.dtype for p in net.parameters()] == [torch.float32] * 2
    assert all(new is old for new, old in zip(net.parameters(), parameters, strict=True))
    for mine, other in zip(net.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, other.grad)
    # The result differs from that of bf16.
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(ours, nn.functional.linear(x, *parameters))
    # Outside the run's context it computes as a plain layer, as in every mixed precision.
    assert torch.equal(net(x), nn.functional.linear(x, *parameters))


def test_conversion_keeps_layers_hooks_and_names(tmp_path: Path) -> None:
    plain, module = build(), build()
    seen: list[str] = []
    layer = module.net.blocks[0][0]
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    fitted("fp8", tmp_path, module, num_sanity_val_steps=0)
    assert module.net.blocks[0][0] is layer and isinstance(layer, Float8Linear)
    assert len(seen) == 6
    assert list(module.state_dict()) == list(plain.state_dict())
    assert converted(module.net) == BLOCKS
    # A later run in another precision has plain layers again, and equals that of a module never converted.
    twin = build()
    twin.load_state_dict(module.state_dict())
    fitted("bf16-mixed", tmp_path, module)
    fitted("bf16-mixed", tmp_path, twin)
    assert converted(module) == [] and same_weights(module, twin) and not hasattr(layer, "linear_mm_config")


def test_the_startup_line_says_how_many_layers_run_in_fp8(tmp_path: Path, capsys: Any) -> None:
    fitted("fp8", tmp_path)
    assert "precision fp8: tensorwise in 4 of 9 Linear layers, emulated by the CPU" in capsys.readouterr().out


def test_in_evaluation_chooses_fp8_or_bf16(tmp_path: Path) -> None:
    results = {}
    for in_evaluation in (True, False):
        module = build()
        trainer = Trainer(**QUIET, precision=Float8Precision(in_evaluation=in_evaluation), default_root_dir=tmp_path)
        trainer.validate(module, batches(1), verbose=False)
        [results[in_evaluation]] = module.evaluated
    plain = build()
    Trainer(**QUIET, precision="bf16-mixed", default_root_dir=tmp_path).validate(plain, batches(1), verbose=False)
    assert torch.equal(results[False], plain.evaluated[0])
    assert not torch.equal(results[True], plain.evaluated[0])


# the Trainer ----------------------------------------------------------------------------------------------------------
class StopAt(Callback):
    """Saves a checkpoint at a step and stops the run there."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=BY_ROWS)])
def test_a_run_with_accumulation_and_clipping_resumes_exactly(recipe: Any, tmp_path: Path) -> None:
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    whole = fitted(Float8Precision(recipe), tmp_path, **settings)
    stop = StopAt(4, tmp_path / "at-4")
    part = fitted(Float8Precision(recipe), tmp_path, callbacks=[stop], **settings)
    assert not same_weights(part, whole)
    resumed = build()
    trainer = Trainer(**{**QUIET, **settings, "precision": Float8Precision(recipe), "default_root_dir": tmp_path})
    trainer.fit(resumed, batches(), batches(1), ckpt_path=stop.path)
    assert trainer.global_step == 6 and same_weights(resumed, whole)
    assert not same_weights(whole, fitted("bf16-mixed", tmp_path, **settings))


def test_accumulated_gradients_match_the_plain_loop(tmp_path: Path) -> None:
    module, by_hand = build(), build()
    Trainer(**QUIET, max_epochs=1, precision="fp8", accumulate_grad_batches=2, default_root_dir=tmp_path).fit(
        module, batches()
    )
    precision = Float8Precision()
    precision.convert_module(by_hand)
    optimizer, data = by_hand.configure_optimizers(), batches()
    assert precision.forward_context is not None
    for window in (data[:2], data[2:4], data[4:]):
        optimizer.zero_grad()
        for batch in window:
            with precision.forward_context():
                loss = by_hand.training_step(batch, 0)
            (loss / len(window)).backward()
        optimizer.step()
    assert same_weights(module, by_hand)


def test_a_compiled_module_trains_like_the_plain_one(tmp_path: Path) -> None:
    module = build()
    torch._dynamo.reset()
    compiled: Any = torch.compile(module, backend="aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    fitted("fp8", tmp_path, compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    plain = fitted("fp8", tmp_path)
    for name, value in module.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=2e-3), name


# learning -------------------------------------------------------------------------------------------------------------
def example() -> ModuleType:
    """The module examples/lm.py."""
    spec = importlib.util.spec_from_file_location("lm", Path(__file__).parents[2] / "examples" / "lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, *rest: Any) -> None:
        self.seen.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def trained(precision: Any, folder: Path, steps: int = 200) -> list[float]:
    """Returns the losses of a small GPT on the plays."""
    lm, losses = example(), Losses()
    torch.manual_seed(0)
    alphabet, loader, _ = lm.make_loaders(32, 8)
    trainer = Trainer(
        **QUIET,
        precision=precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[losses],
        default_root_dir=folder,
    )
    trainer.fit(lm.CharacterGPT(alphabet, 32, 64, depth=2), loader)
    return losses.seen


def check_learned(fp8: list[float], bf16: list[float]) -> None:
    ends = [sum(losses[-20:]) / 20 for losses in (fp8, bf16)]
    assert len(fp8) == len(bf16) == 200 and fp8 != bf16
    assert ends[1] < 0.65 * bf16[0]
    assert abs(ends[0] / ends[1] - 1) < 0.02, ends


def test_onednn_is_disabled_only_during_fp8_products_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's fp8 kernel takes seconds per step on CPUs with AVX512-FP16."""
    product, seen = torch._scaled_mm, []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled())
        return product(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    layer, x = nn.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
    model = nn.Sequential(nn.Linear(32, 32), layer, nn.Linear(32, 32))
    precision = Float8Precision(first_and_last=True)
    precision.convert_module(model)
    with precision.forward_context():
        model(x).float().sum().backward()
    assert len(seen) == 3 * 3 and not any(seen)
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.full
def test_a_gpt_learns_as_well_as_in_bf16(tmp_path: Path) -> None:
    check_learned(trained("fp8", tmp_path), trained("bf16-mixed", tmp_path))


@pytest.mark.full
@BY_ROWS
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_a_gpt_learns_as_well_with_rowwise_recipes(recipe: Any, tmp_path: Path) -> None:
    check_learned(trained(Float8Precision(recipe), tmp_path), trained("bf16-mixed", tmp_path))


# refusals -------------------------------------------------------------------------------------------------------------
def test_devices_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("mps", "xla"):
        with pytest.raises(
            ConfigurationError, match=f"needs a GPU with fp8 units.*Use precision='bf16-mixed' on {kind}"
        ):
            Float8Precision().check(torch.device(kind))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigurationError, match=r"NVIDIA A100 has compute capability 8\.0, but fp8 needs 8\.9"):
        Float8Precision().check(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    Float8Precision().check(torch.device("cuda"))


def test_rowwise_scaling_is_refused_on_a_cpu_without_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 and 2.10 have no such support."""
    if fp8._cpu_supports_rowwise():
        monkeypatch.setattr(fp8, "_cpu_supports_rowwise", lambda: False)
    cpu = torch.device("cpu")
    rows = Float8LinearConfig.from_recipe_name("rowwise")
    for made in (Float8Precision("rowwise_with_gw_hp"), Float8Precision(config=rows)):
        with pytest.raises(ConfigurationError, match=r"one scale per .*Use recipe='tensorwise', a GPU, or a newer"):
            made.check(cpu)
    with pytest.raises(ConfigurationError, match="one scale per row"):
        Trainer(**QUIET, precision=Float8Precision("rowwise")).fit(build(), batches())
    Float8Precision().check(cpu)
    Float8Precision(config=Float8LinearConfig()).check(cpu)
    Float8Precision(config=replace(rows, emulate=True)).check(cpu)


def test_a_torchao_incompatible_with_torch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip does not know which torch a torchao is built for: here its import fails as 0.18's does with torch 2.9."""
    monkeypatch.delitem(sys.modules, "leyden.strategies.precision.float8_linear", raising=False)
    monkeypatch.delattr(leyden.strategies.precision, "float8_linear", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.float8.float8_linear", None)
    with pytest.raises(
        ConfigurationError, match=r"torchao [\d.]+ is incompatible with torch [\d.]+.*: import of torchao"
    ) as caught:
        Trainer(**QUIET, precision="fp8").fit(build(), batches())
    assert "pip install 'torchao==" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "rowise"}, "Did you mean 'rowwise'"),
        (
            {"recipe": "rowwise", "enable_fsdp_float8_all_gather": True},
            "needs recipe='tensorwise', not 'rowwise'",
        ),
        ({"enable_fsdp_float8_all_gather": True, "in_evaluation": False}, "in_evaluation=False evaluates in bf16"),
        ({"skip": "head"}, r"Pass classes or names, such as skip=\['head'\]"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Float8Precision(**settings)


def test_a_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        MissingExtraError, match=r"precision='fp8' needs the package 'torchao': pip install 'leyden\[fp8\]'"
    ):
        Trainer(precision="fp8")
    with pytest.raises(MissingExtraError, match=r"pip install transformer-engine\[pytorch\]"):
        Trainer(precision="transformer-engine")


# the keys of fp8_config -----------------------------------------------------------------------------------------------
def test_torchao_keys_of_a_config_become_settings() -> None:
    made = precision_of_config({"backend": "ao", "pad_inner_dim": False, "fp8_enable_fsdp_float8_all_gather": True})
    assert isinstance(made, Float8Precision) and (made.pad_inner_dim, made.gathers) == (False, True)
    evaluates = precision_of_config({"fp8_backend": "AO", "fp8_use_autocast_during_eval": False})
    assert isinstance(evaluates, Float8Precision) and not evaluates.in_evaluation


def test_invalid_keys_of_a_config_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="fp8_backend: MSAMP: MS-AMP.*AO"):
        precision_of_config({"fp8_opt_level": "O2"})
    with pytest.raises(ConfigurationError, match="fp8_backend: 'T' is not known"):
        precision_of_config({"fp8_backend": "T"})
    with pytest.raises(ConfigurationError, match=r"the key 'fp8_margn' is not known\. Did you mean 'margin'"):
        precision_of_config({"fp8_margn": 0})
    assert without_effect({"fp8_enable_fsdp_float8_all_gather": True}, is_fsdp=True) == {}
    assert list(without_effect({"fp8_enable_fsdp_float8_all_gather": True, "fp8_interval": 1}, is_fsdp=False)) == [
        "fp8_enable_fsdp_float8_all_gather",
        "fp8_interval",
    ]


# Transformer Engine, as a fake with its documented names --------------------------------------------------------------
@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Calls of a fake Transformer Engine with the documented names; the real one needs a GPU."""
    from contextlib import contextmanager
    from importlib.machinery import ModuleSpec

    recorded: dict[str, Any] = {"linear": [], "recipes": [], "contexts": []}

    class Linear(nn.Module):
        def __init__(
            self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None, device: Any = "cuda"
        ) -> None:
            super().__init__()
            recorded["linear"].append((in_features, out_features, bias, params_dtype, device))
            self.weight = nn.Parameter(torch.zeros(out_features, in_features))
            self.weight.tensor_model_parallel = False  # type: ignore[attr-defined]
            self.bias = nn.Parameter(torch.zeros(out_features)) if bias else torch.Tensor()
            self.fp8_meta = {"recipe": None}

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)) + 1

        def get_extra_state(self) -> Tensor:
            raise AssertionError("extra state is a pickle")

    class Recipe:
        def __init__(self, **arguments: Any) -> None:
            recorded["recipes"].append((type(self).__name__, arguments))

    @contextmanager
    def autocast(enabled: bool, recipe: Any) -> Any:
        recorded["contexts"].append((enabled, type(recipe).__name__))
        yield

    names = (
        "transformer_engine",
        "transformer_engine.common",
        "transformer_engine.common.recipe",
        "transformer_engine.pytorch",
    )
    made = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    recipes: Any = made["transformer_engine.common.recipe"]
    recipes.Format = type("Format", (), {"HYBRID": "hybrid", "E4M3": "e4m3"})
    for name in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"):
        setattr(recipes, name, type(name, (Recipe,), {}))
    engine: Any = made["transformer_engine.pytorch"]
    engine.Linear, engine.autocast = Linear, autocast
    return recorded


def test_transformer_engine_is_called_by_its_documented_names(
    fake_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    precision: Any = find_precision("transformer-engine")
    with pytest.raises(ConfigurationError, match="needs a CUDA GPU. On cpu use precision='bf16-mixed', or fp8"):
        precision.check(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    precision.check(torch.device("cuda"))
    net = Net()
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    layer, weight = net.blocks[0][0], net.blocks[0][0].weight
    precision.convert_module(net)
    assert fake_engine["linear"][0] == (32, 64, True, torch.float32, "cuda") and len(fake_engine["linear"]) == 4
    assert net.blocks[0][0] is layer and layer.weight is weight and weight.tensor_model_parallel is False
    assert type(layer).__mro__[1].__name__ == "Linear" and layer.fp8_meta == {"recipe": None}
    # The state dict has no extra key, which would hold a pickle.
    assert net.state_dict().keys() == weights.keys()
    assert all(torch.equal(net.state_dict()[name], weights[name]) for name in weights)
    precision._device_type = "cpu"
    with precision.forward_context():
        net(torch.randn(2, 16))
    with torch.no_grad(), precision.forward_context():
        pass
    assert fake_engine["contexts"] == [(True, "Float8CurrentScaling"), (False, "Float8CurrentScaling")]
    assert precision.describe([net]) == "Float8CurrentScaling in 4 of 9 Linear layers"
    find_precision("32").convert_module(net)
    assert type(layer) is nn.Linear and "fp8_meta" not in vars(layer)


def test_config_keys_choose_transformer_engines_recipe(fake_engine: dict[str, Any]) -> None:
    for config in (
        {"fp8_backend": "TE"},
        {"margin": 2, "fp8_amax_history_len": 16, "amax_compute_algo": "max", "fp8_format": "E4M3"},
        {"backend": "TE", "use_mxfp8_block_scaling": True},
    ):
        made: Any = precision_of_config(config)
        made._recipe()
    assert fake_engine["recipes"] == [
        ("Float8CurrentScaling", {"fp8_format": "hybrid"}),
        ("DelayedScaling", {"fp8_format": "e4m3", "margin": 2, "amax_history_len": 16, "amax_compute_algo": "max"}),
        ("MXFP8BlockScaling", {"fp8_format": "hybrid"}),
    ]
    with pytest.raises(ConfigurationError, match="E5M2 alone is too coarse"):
        precision_of_config({"fp8_backend": "TE", "fp8_format": "E5M2"})
    with pytest.raises(ConfigurationError, match="scales by blocks, but margin belongs to delayed scaling"):
        precision_of_config({"use_mxfp8_block_scaling": True, "margin": 1})
