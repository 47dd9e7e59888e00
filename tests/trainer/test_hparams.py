"""Hyperparameters: recorded, saved, logged, and used by load_from_checkpoint to build modules."""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden import CheckpointError, ConfigurationError, DataModule, Trainer, TrainModule
from leyden.callbacks import CSVLogger
from leyden.checkpoint.format.codec import decode
from leyden.checkpoint.format.tensors import TensorCollector
from leyden.trainer.hparams import Hyperparameters


@dataclass
class Options:
    width: int = 3
    rate: float = 0.5


class Base(TrainModule):
    def __init__(self, width: int, rate: float = 0.1, *, deep: bool = False, **extra: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


class Derived(Base):
    def __init__(self, width: int, name: str = "a", **rest: Any) -> None:
        super().__init__(width, **rest)


class Chosen(TrainModule):
    def __init__(self, given: Any, *names: str, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(given, *names, **options)


def saved(module: TrainModule, quiet: Any, tmp_path: Path) -> Path:
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(module, [torch.ones(1, 2)])
    return trainer.save_checkpoint(tmp_path / "saved")


def test_init_arguments_are_saved() -> None:
    assert Base(3, 0.2, deep=True, more=1).hparams == {"width": 3, "rate": 0.2, "deep": True, "more": 1}
    assert Derived(4, name="b", rate=9).hparams == {"width": 4, "name": "b", "rate": 9, "deep": False}


@pytest.mark.parametrize(
    ("given", "kept"),
    [({"x": 1}, {"x": 1}), (argparse.Namespace(y=2), {"y": 2}), (Options(5), {"width": 5, "rate": 0.5})],
    ids=["dict", "Namespace", "dataclass"],
)
def test_explicit_hyperparameters_are_saved_by_name(given: Any, kept: dict[str, Any]) -> None:
    assert Chosen(given).hparams == kept
    assert Chosen(given, ignore="rate").hparams == {name: value for name, value in kept.items() if name != "rate"}


def test_save_hyperparameters_selects_names_and_skips_ignored_ones() -> None:
    class Selected(TrainModule):
        def __init__(self, a: int = 1, b: int = 2, net: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters("a", "b", ignore=["b"])

    class AllExceptNet(TrainModule):
        def __init__(self, a: int = 1, net: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="net")

    assert Selected(net=torch.nn.Linear(1, 1)).hparams == AllExceptNet(net=torch.nn.Linear(1, 1)).hparams == {"a": 1}


def test_changing_hparams_leaves_hparams_initial_unchanged() -> None:
    module = Chosen({"a": 1})
    module.hparams.a = 5
    assert (module.hparams["a"], module.hparams_initial) == (5, {"a": 1})


def test_a_misspelled_hyperparameter_gets_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"no hyperparameter 'aa'\. Did you mean 'a'\?"):
        _ = Chosen({"a": 1}).hparams.aa


def test_saving_hyperparameters_after_deleting_an_argument_raises() -> None:
    class DeletesArgument(TrainModule):
        def __init__(self, width: int = 1, depth: int = 2) -> None:
            super().__init__()
            del depth
            self.save_hyperparameters()

    with pytest.raises(
        ConfigurationError, match=r"'depth' was deleted\. Call save_hyperparameters\(\) first in __init__"
    ):
        DeletesArgument()


def test_load_from_checkpoint_rebuilds_the_module(quiet: Any, tmp_path: Path) -> None:
    module = Derived(3, name="b", rate=0.25, deep=True, more=[1, (2, 3)])
    path = saved(module, quiet, tmp_path)
    loaded = Derived.load_from_checkpoint(path)
    assert loaded.hparams == module.hparams and torch.equal(loaded.net.weight, module.net.weight)
    assert Derived.load_from_checkpoint(path, name="c", rate=1.0).hparams.name == "c"
    with pytest.raises(ConfigurationError, match=r"do not fit Derived.*net\.weight"):
        Derived.load_from_checkpoint(path, width=9)


def test_ignored_arguments_must_be_passed_to_load_from_checkpoint(quiet: Any, tmp_path: Path) -> None:
    class Wraps(Base):
        def __init__(self, net: torch.nn.Module, rate: float = 0.1) -> None:
            TrainModule.__init__(self)
            self.save_hyperparameters(ignore="net")
            self.net = net

    path = saved(Wraps(torch.nn.Linear(2, 1), 0.3), quiet, tmp_path)
    loaded = Wraps.load_from_checkpoint(path, net=torch.nn.Linear(2, 1))
    assert loaded.hparams == {"rate": 0.3}
    with pytest.raises(ConfigurationError, match=r"Wraps needs net"):
        Wraps.load_from_checkpoint(path)


def test_hparams_file_overrides_saved_hyperparameters(quiet: Any, tmp_path: Path) -> None:
    path = saved(Base(3), quiet, tmp_path)
    (tmp_path / "hparams.json").write_text(json.dumps({"width": 3, "rate": 7.0}))
    assert Base.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.json").hparams.rate == 7.0
    CSVLogger(tmp_path, name="", version="run").log_hyperparams({"width": 3, "rate": 1e-05})
    assert Base.load_from_checkpoint(path, hparams_file=tmp_path / "run/hparams.yaml").hparams.rate == 1e-05
    (tmp_path / "some.yml").write_text("width: 3\nrate: 0.5\n")
    assert Base.load_from_checkpoint(path, hparams_file=str(tmp_path / "some.yml")).hparams.rate == 0.5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "x: !!python/object/apply:os.getcwd []", "not a YAML file of hyperparameters: could not determine"),
        ("a.yaml", "x: [1", "not a YAML file of hyperparameters: while parsing"),
        ("a.yaml", "", "not a YAML file of hyperparameters by name"),
        ("a.yml", "1: 2", "not a YAML file of hyperparameters by name"),
        ("a.json", "[1]", "not a JSON file of hyperparameters by name"),
        ("a.json", "{", "not a JSON file of hyperparameters: "),
    ],
)
def test_an_invalid_hparams_file_raises(quiet: Any, tmp_path: Path, name: str, text: str, message: str) -> None:
    path = saved(Base(3), quiet, tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Base.load_from_checkpoint(path, hparams_file=tmp_path / name)


def test_loading_with_missing_weights_needs_strict_false(quiet: Any, tmp_path: Path) -> None:
    class Longer(Base):
        def __init__(self, width: int, **rest: Any) -> None:
            super().__init__(width, **rest)
            self.more = torch.nn.Linear(1, 1)

    path = saved(Base(3), quiet, tmp_path)
    with pytest.raises(ConfigurationError, match=r"more\.weight.*strict_loading = False"):
        Longer.load_from_checkpoint(path)
    assert Longer.load_from_checkpoint(path, strict=False).hparams.width == 3


def test_on_load_checkpoint_receives_entries_from_on_save_checkpoint(quiet: Any, tmp_path: Path) -> None:
    class SavesWords(Base):
        words: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["words"] = ["a", "b"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.words = checkpoint["words"]

    assert SavesWords.load_from_checkpoint(saved(SavesWords(1), quiet, tmp_path)).words == ["a", "b"]


def test_a_foreign_checkpoint_loads_with_trust(tmp_path: Path) -> None:
    module = Base(2)
    torch.save({"state_dict": module.state_dict(), "epoch": 3}, tmp_path / "other.ckpt")
    loaded = Base.load_from_checkpoint(tmp_path / "other.ckpt", trust=True, width=2)
    assert torch.equal(loaded.net.weight, module.net.weight)


class Packed(TrainModule):
    """Takes all hyperparameters as one argument."""

    def __init__(self, config: Any, scale: int = 1) -> None:
        super().__init__()
        self.net, self.scale = torch.nn.Linear(config.width, config["width"]), scale


class Sized(DataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.seen = size, 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_lightning_checkpoints_restore_hyperparameters_and_datamodules(tmp_path: Path) -> None:
    """The entries are those that Lightning 2.6 writes."""
    module, path = Base(2), tmp_path / "other.ckpt"
    entries = {"epoch": 3, "state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.6", "loops": {}}
    command_line = {"_class_path": "os.system", "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    data = {"datamodule_hyper_parameters": {"size": 5}, "datamodule_hparams_name": "kwargs", "Sized": {"seen": 7}}
    torch.save(
        {**entries, **data, "hparams_name": "kwargs", "hyper_parameters": {"width": 2, **command_line}},
        path,
    )
    assert torch.equal(Base.load_from_checkpoint(path, trust=True).net.weight, module.net.weight)
    found = Sized.load_from_checkpoint(path, trust=True)
    assert (found.size, found.seen) == (5, 7)
    assert Sized.load_from_checkpoint(path, trust=True, size=6).size == 6
    with pytest.raises(CheckpointError, match="trust=True"):
        Sized.load_from_checkpoint(path)
    torch.save({**entries, "hparams_name": "config", "hyper_parameters": {"width": 2}}, path)
    whole = Packed.load_from_checkpoint(path, trust=True, scale=3)
    assert (whole.scale, whole.net.in_features) == (3, 2)


def test_module_and_datamodule_hyperparameters_are_logged(quiet: Any) -> None:
    from leyden.callbacks import Logger

    class Data(DataModule):
        def __init__(self, size: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return [torch.ones(1, 2)]

    class RecordsHyperparams(Logger):
        given: Any = None

        @property
        def name(self) -> str:
            return "records"

        @property
        def version(self) -> int:
            return 0

        def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

        def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
            self.given = dict(params)

    logger = RecordsHyperparams()
    Trainer(**{**quiet, "logger": logger}, max_epochs=1).fit(Base(1, rate=0.5), datamodule=Data())
    assert logger.given == {"size": 2, "width": 1, "rate": 0.5, "deep": False}


class Counted(DataModule):
    def __init__(self, size: int, root: str = "data") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.served = 0

    def train_dataloader(self) -> Any:
        self.served += 1
        return [torch.ones(1, 2)] * self.hparams.size

    def state_dict(self) -> dict[str, Any]:
        return {"served": self.served}

    def load_state_dict(self, state: Any) -> None:
        self.served = state["served"]


def test_load_from_checkpoint_rebuilds_a_datamodule(quiet: Any, tmp_path: Path) -> None:
    trainer = Trainer(**quiet, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Base(1), datamodule=Counted(3, root="here"))
    trainer.save_checkpoint(tmp_path / "c")
    loaded = Counted.load_from_checkpoint(tmp_path / "c", weights_only=False)
    assert (loaded.hparams.size, loaded.hparams.root, loaded.served) == (3, "here", 2)
    assert Counted.load_from_checkpoint(str(tmp_path / "c"), root="there").hparams.root == "there"
    (tmp_path / "own.json").write_text('{"size": 5}')
    assert Counted.load_from_checkpoint(tmp_path / "c", hparams_file=tmp_path / "own.json").hparams.size == 5
    assert Base.load_from_checkpoint(tmp_path / "c").hparams.width == 1
    with pytest.raises(ConfigurationError, match=r"call it on the class, Counted\.load_from_checkpoint"):
        loaded.load_from_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError):
        Counted.load_from_checkpoint(tmp_path / "none")


def test_a_datamodule_missing_from_the_checkpoint_needs_its_arguments(quiet: Any, tmp_path: Path) -> None:
    path = saved(Base(1), quiet, tmp_path)
    with pytest.raises(ConfigurationError, match="Counted needs size, which the checkpoint does not have"):
        Counted.load_from_checkpoint(path)
    assert Counted.load_from_checkpoint(path, size=2).served == 0


def test_to_onnx_writes_a_file(quiet: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")

    class Forward(Base):
        def forward(self, x: Any) -> Any:
            return self.net(x)

    module = Forward(3)
    module.example_input_array = torch.ones(1, 2)
    module.to_onnx(tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").stat().st_size > 0 and module.training


def test_logged_hyperparameters_of_module_and_datamodule_must_agree(quiet: Any, tmp_path: Path) -> None:
    class Net(Base):
        def __init__(self, rate: Any = 0.1, logs: bool = True) -> None:
            TrainModule.__init__(self)
            self.save_hyperparameters(ignore="logs", logger=logs)
            self.net = torch.nn.Linear(2, 1)

        def configure_optimizers(self) -> None:
            return None

    class Data(DataModule):
        def __init__(self, rate: Any = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return [torch.ones(1, 2)]

    def fit(net: Net, data: Data, logger: Any) -> None:
        Trainer(**{**quiet, "logger": logger}, max_epochs=1).fit(net, datamodule=data)

    with pytest.raises(ConfigurationError, match=r"Data and Net both have .* 'rate'.*\(0\.2 and 0\.1\)"):
        fit(Net(), Data(0.2), CSVLogger(tmp_path))
    for one, other in ((torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(3)), (float("nan"), 1.0)):
        with pytest.raises(ConfigurationError, match="different values"):
            fit(Net(one), Data(other), CSVLogger(tmp_path))
    for one, other in ((torch.ones(2), torch.ones(2)), (float("nan"), float("nan")), ([1], [1])):
        fit(Net(one), Data(other), CSVLogger(tmp_path))
    # Checkpoints store the two separately, and when only one is logged they cannot conflict.
    fit(Net(), Data(0.2), False)
    fit(Net(logs=False), Data(0.2), CSVLogger(tmp_path))


class Late(TrainModule):
    """Builds its weights in configure_model, once."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Linear(2, self.hparams.width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_configure_model_runs_before_weights_are_loaded(quiet: Any, tmp_path: Path) -> None:
    module = Late(5)
    loaded = Late.load_from_checkpoint(saved(module, quiet, tmp_path))
    assert loaded.training and torch.equal(loaded.net.weight, module.net.weight) and loaded.net.weight.shape == (5, 2)


def test_non_strict_loading_lists_mismatches_and_needs_one_match(quiet: Any, tmp_path: Path) -> None:
    class Renamed(Base):
        def __init__(self, **rest: Any) -> None:
            super().__init__(**rest)
            self.other, self.net = self.net, torch.nn.Identity()

    class Deeper(Base):
        def __init__(self, **rest: Any) -> None:
            super().__init__(**rest)
            self.strict_loading = False
            self.head = torch.nn.Linear(1, 1)
            self.net.register_parameter("bias", None)

    path = saved(Base(3), quiet, tmp_path)
    with pytest.raises(ConfigurationError, match=r"Unexpected key.*as it was saved\.$"):
        Renamed.load_from_checkpoint(path)
    with pytest.raises(
        ConfigurationError,
        match=r"No weight of the checkpoint fits Renamed\. The checkpoint has net\.bias, net\.weight",
    ):
        Renamed.load_from_checkpoint(path, strict=False)
    listed = r"not in Deeper: net\.bias; unchanged.*: head\.bias, head\.weight"
    with pytest.warns(UserWarning, match=listed):
        Deeper.load_from_checkpoint(path)
    with pytest.warns(UserWarning, match=listed):
        Trainer(**quiet, max_epochs=2).fit(Deeper(width=3), [torch.ones(1, 2)], ckpt_path=path, restore="weights")


class Layered(Base):
    """Ignores arguments that no checkpoint can hold; its base class saves all arguments."""

    def __init__(self, act: Any, tokens: Any = None, width: int = 1) -> None:
        super().__init__(width)
        self.save_hyperparameters(ignore=["act", "tokens"])


def test_a_base_class_does_not_save_arguments_its_subclass_ignores(recwarn: pytest.WarningsRecorder) -> None:
    assert Layered(torch.nn.ReLU, object()).hparams == {"width": 1, "rate": 0.1, "deep": False}

    class First(Base):
        def __init__(self, name: str, act: Any) -> None:
            Hyperparameters.save_hyperparameters(self, ignore=("act", "name"))
            super().__init__(2)

    assert First("a", object()).hparams == {"width": 2, "rate": 0.1, "deep": False}
    assert [str(warning.message) for warning in recwarn] == []


def test_a_subclass_that_ignores_a_plain_argument_of_its_base_keeps_the_bases_value() -> None:
    class Narrow(Base):
        def __init__(self, width: int, extra: int = 5, **rest: Any) -> None:
            super().__init__(width, **rest)
            self.save_hyperparameters(ignore=["width", "rate", "deep"])

    assert Narrow(2, rate=0.5).hparams == {"width": 2, "rate": 0.5, "deep": False, "extra": 5}


@dataclass(eq=False)
class Declared(TrainModule):
    """A module that is a dataclass."""

    width: int = 3
    sizes: list[int] = field(default_factory=lambda: [1, 2])

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, self.width)

    training_step = Base.training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(eq=False)
class DeclaredFurther(Declared):
    rate: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()


def test_a_dataclass_keeps_its_fields(quiet: Any, tmp_path: Path) -> None:
    assert Declared(4).hparams == {"width": 4, "sizes": [1, 2]}
    assert DeclaredFurther(sizes=[7]).hparams == {"width": 3, "sizes": [7], "rate": 0.5}
    assert Declared.load_from_checkpoint(saved(Declared(5, [3]), quiet, tmp_path)).hparams == {"width": 5, "sizes": [3]}


class Configured(Base):
    """Takes parts of a configuration."""

    def __init__(self, model: Any, layers: Any) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, model.width * layers[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.model.rate)


def test_configurations_of_omegaconf_are_kept_as_such(quiet: Any, tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        {"base": 2, "model": {"width": "${base}", "rate": 0.1, "extra": "???"}, "layers": [1, {"n": 2}]}
    )
    logger = CSVLogger(tmp_path)
    module = Configured(config.model, config.layers)
    assert module.hparams.model.width == 2 and isinstance(module.hparams.layers, omegaconf.ListConfig)
    path = saved(module, {**quiet, "logger": logger}, tmp_path)
    loaded = Configured.load_from_checkpoint(path)
    assert loaded.hparams.model == {"width": 2, "rate": 0.1, "extra": "???"} and loaded.hparams.layers[1].n == 2
    assert logger.log_dir is not None
    written = json.loads((Path(logger.log_dir) / "hparams.json").read_text())
    assert written["layers"] == [1, {"n": 2}] and written["model"]["width"] == 2


def test_a_single_configuration_of_omegaconf_is_restored_as_one(quiet: Any, tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    given = omegaconf.OmegaConf.create({"width": 2, "rate": 0.3, "nested": {"a": [1]}})
    loaded = Whole.load_from_checkpoint(saved(Whole(given), quiet, tmp_path))
    assert isinstance(loaded.given, omegaconf.DictConfig) and loaded.given == given


def test_a_checkpoint_cannot_bring_an_interpolation_of_omegaconf() -> None:
    pytest.importorskip("omegaconf")
    forged = {"$": "omegaconf", "value": {"a": "${oc.env:HOME}"}}
    with pytest.raises(CheckpointError, match=r"oc\.env:HOME"):
        decode(forged, TensorCollector())


def test_modules_classes_and_partials_stay_in_hparams_but_out_of_checkpoints(quiet: Any, tmp_path: Path) -> None:
    class Template(Base):
        def __init__(self, net: Any, act: Any = torch.nn.ReLU, optimizer: Any = None, width: int = 1) -> None:
            TrainModule.__init__(self)
            self.save_hyperparameters(logger=False)
            self.net, self.act, self.rate = net, act, 0.1

        def configure_optimizers(self) -> Any:
            # The style of Hydra templates.
            return self.hparams.optimizer(self.parameters())

    given: dict[str, Any] = {"act": torch.nn.GELU, "optimizer": functools.partial(torch.optim.SGD, lr=0.5)}
    expected = r"keeps net \(a Linear\), act \(the class GELU\), optimizer \(partial\(SGD, lr=0\.5\)\).*ignore=\["
    with pytest.warns(UserWarning, match=expected):
        module = Template(torch.nn.Linear(2, 1), **given)
    assert module.hparams == {"net": module.net, **given, "width": 1}
    assert module.hparams_initial == {"width": 1}
    path = saved(module, quiet, tmp_path)
    with pytest.raises(ConfigurationError, match="Template needs net"):
        Template.load_from_checkpoint(path)
    expected = r"was trained with act=the class GELU, which checkpoints cannot hold, but is built with the default"
    with pytest.warns(UserWarning, match=expected):
        Template.load_from_checkpoint(path, net=torch.nn.Linear(2, 1), optimizer=None)


def test_unserializable_arguments_warn_or_raise_when_a_run_starts(quiet: Any) -> None:
    class Open(Base):
        def __init__(self, act: Any) -> None:
            super().__init__(1)

    assert Open(torch.nn.ReLU).hparams == {"width": 1, "rate": 0.1, "deep": False, "act": torch.nn.ReLU}
    with pytest.warns(UserWarning, match=r"Open\.save_hyperparameters keeps act \(the class ReLU\)"):
        Trainer(**quiet, max_epochs=1).fit(Open(torch.nn.ReLU), [torch.ones(1, 2)])
    with pytest.raises(ConfigurationError, match=r"Open\.save_hyperparameters cannot keep the argument 'act'"):
        Trainer(**quiet, max_epochs=1).fit(Open(object()), [torch.ones(1, 2)])


class Whole(Base):
    """Takes all of its hyperparameters as one argument."""

    def __init__(self, hparams: Any) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters(hparams)
        self.given = hparams
        self.net = torch.nn.Linear(2, self.hparams.width)


class Typed(Whole):
    def __init__(self, options: Options) -> None:
        super().__init__(options)


@pytest.mark.parametrize("given", [{"width": 2, "rate": 0.3}, argparse.Namespace(width=2, rate=0.3)], ids=type)
def test_a_single_hparams_argument_is_restored_with_its_type(given: Any, quiet: Any, tmp_path: Path) -> None:
    path = saved(Whole(given), quiet, tmp_path)
    loaded = Whole.load_from_checkpoint(path)
    assert type(loaded.given) is type(given) and loaded.given == given
    assert Whole.load_from_checkpoint(path, rate=0.7).hparams == {"width": 2, "rate": 0.7}


def test_a_dataclass_argument_is_restored_from_its_annotation(quiet: Any, tmp_path: Path) -> None:
    assert Typed.load_from_checkpoint(saved(Typed(Options(2)), quiet, tmp_path)).given == Options(2)


def test_an_unknown_argument_of_load_from_checkpoint_warns(quiet: Any, tmp_path: Path) -> None:
    path = saved(Late(3), quiet, tmp_path)
    with pytest.warns(
        UserWarning,
        match=r"Late has no argument 'widht' and is built without it\. Did you mean 'width'\? Known: width\.",
    ):
        assert Late.load_from_checkpoint(path, widht=9).hparams.width == 3


def test_map_location_accepts_every_form_that_torch_load_does(quiet: Any, tmp_path: Path) -> None:
    path = saved(Base(3), quiet, tmp_path)
    where: tuple[Any, ...] = ("meta", torch.device("meta"), {"cpu": "meta"})
    assert [Base.load_from_checkpoint(path, map_location=at).device.type for at in where] == ["meta"] * 3
    for at in (None, "cpu", {"cuda:1": "cuda:0"}, lambda storage, location: storage, lambda storage, location: None):
        assert Base.load_from_checkpoint(path, map_location=at, weights_only=True).device.type == "cpu"


def test_load_from_checkpoint_on_an_instance_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"does not change this one.*class, Base\.load_from_checkpoint"):
        Base(1).load_from_checkpoint(tmp_path)


def test_weights_only_never_runs_code_from_a_file(tmp_path: Path) -> None:
    torch.save({"state_dict": Base(2).state_dict(), "more": argparse.Namespace()}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="holds more than weights"):
        Base.load_from_checkpoint(tmp_path / "other.ckpt", trust=True, weights_only=True, width=2)
    with pytest.warns(UserWarning, match="unpickled in full"):
        Base.load_from_checkpoint(tmp_path / "other.ckpt", trust=True, width=2)
    with pytest.raises(CheckpointError, match="trust=True"):
        Base.load_from_checkpoint(tmp_path / "other.ckpt", weights_only=True, width=2)


class Payload:
    """An object that torch's safe loader rejects."""


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_weights_only_decides_how_a_foreign_pickle_is_read(quiet: Any, tmp_path: Path, stage: str) -> None:
    class Net(Base):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("sum", self.net.weight.sum())

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net.weight.sum()

        def configure_optimizers(self) -> None:
            return None

    weights = {"net.weight": torch.ones(3, 2), "net.bias": torch.zeros(3)}
    torch.save({"state_dict": weights}, tmp_path / "plain.ckpt")
    torch.save({"state_dict": weights, "more": Payload()}, tmp_path / "full.ckpt")
    run = getattr(Trainer(**quiet, max_epochs=1), stage)

    def weight_after(name: str, **options: Any) -> float:
        net = Net(3)
        run(net, [torch.ones(1, 2)], ckpt_path=tmp_path / name, **options)
        return float(net.net.weight.detach().sum())

    with pytest.raises(CheckpointError, match="is a pickle"):
        weight_after("plain.ckpt")
    assert weight_after("plain.ckpt", weights_only=True) == 6.0 == weight_after("plain.ckpt", weights_only=False)
    with pytest.raises(CheckpointError, match="holds more than weights"):
        weight_after("full.ckpt", weights_only=True)
    with pytest.warns(UserWarning, match="is unpickled in full"):
        assert weight_after("full.ckpt", weights_only=False) == 6.0
    with pytest.raises(ConfigurationError, match="weights_only='yes'"):
        weight_after("plain.ckpt", weights_only="yes")


def test_weights_only_does_not_affect_leyden_checkpoints(quiet: Any, tmp_path: Path) -> None:
    path, trainer = saved(Base(3), quiet, tmp_path), Trainer(**quiet, max_epochs=2)
    with pytest.warns(UserWarning, match=r"weights_only=True only affects .* restore='weights'"):
        trainer.fit(Base(3), [torch.ones(1, 2)], ckpt_path=path, weights_only=True)
    assert trainer.global_step == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(Base(3), [torch.ones(1, 2)], ckpt_path=path, weights_only=False)
        trainer.fit(Base(3), [torch.ones(1, 2)], ckpt_path=path, weights_only=True, restore="weights")
