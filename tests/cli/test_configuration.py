"""`LeydenCLI`: objects built from the command line, files and variables, and the configuration that a run saves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import configured
import pytest
import torch
import yaml
from configured import Bare, Composed, Described, OwnNet, OwnNotes, Points
from jsonargparse import lazy_instance
from torch import nn

from leyden import ConfigurationError, LeydenCLI, Trainer
from leyden.callbacks import CSVLogger
from leyden.cli import LeydenArgumentParser, SaveConfigCallback, instantiate_class
from leyden.strategies import DDPStrategy

QUICK = [
    *("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"),
    *("--trainer.num_sanity_val_steps=0", "--trainer.logger=false", "--trainer.enable_checkpointing=false"),
]


@pytest.fixture(autouse=True)
def _isolate_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LEYDEN_")]:
        monkeypatch.delenv(name)


def fit_cli(
    *args: str, model: Any = OwnNet, data: Any = Points, kind: type[LeydenCLI] = LeydenCLI, **kwargs: Any
) -> Any:
    return kind(model, data, args=["fit", *QUICK, *args], **kwargs)


def build_cli(
    *args: str, model: Any = OwnNet, data: Any = Points, kind: type[LeydenCLI] = LeydenCLI, **kwargs: Any
) -> Any:
    return kind(model, data, args=[*QUICK, *args], run=False, **kwargs)


def read_yaml(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text())


def write_yaml(path: str, **values: Any) -> str:
    Path(path).write_text(yaml.safe_dump(values))
    return path


def error_of(capsys: pytest.CaptureFixture[str], call: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_arguments_of_module_data_and_trainer_are_options() -> None:
    cli = build_cli("--model.width=7", "--data.batch_size", "16", "--trainer.max_epochs=3", "--trainer.devices=1")
    assert (cli.model.hparams.width, cli.datamodule.batch_size, cli.trainer.max_epochs) == (7, 16, 3)
    assert cli.subcommand is None
    assert cli.config.model.width == cli.config["model"]["width"] == cli.config["model.width"] == 7


def test_the_saved_configuration_repeats_the_run_exactly() -> None:
    args = [
        "--trainer.logger=true",
        "--seed_everything=7",
        "--model.width=5",
        "--optimizer=AdamW",
        "--optimizer.lr=0.2",
    ]
    first = fit_cli(*args, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", model=Bare)
    torch.rand(3)
    again = LeydenCLI(Bare, Points, args=["fit", "--config=logs/version_0/config.yaml"])
    assert again.trainer.log_dir == "logs/version_1"
    assert Path("logs/version_0/config.yaml").read_text() == Path("logs/version_1/config.yaml").read_text()
    mine, other = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    different = fit_cli(*args[:1], "--seed_everything=8", *args[2:], model=Bare).model.state_dict()
    assert not torch.equal(mine["net.0.weight"], different["net.0.weight"])


def test_subcommands_call_their_before_and_after_hooks() -> None:
    seen: list[str] = []

    class CustomCLI(LeydenCLI):
        def before_fit(self) -> None:
            seen.append(f"before fit {self.trainer.global_step}")

        def after_fit(self) -> None:
            seen.append(f"after fit {self.trainer.global_step}")

        def before_test(self) -> None:
            seen.append("before test")

    fit_cli(kind=CustomCLI)
    for name in ("validate", "test", "predict"):
        CustomCLI(OwnNet, Points, args=[name, *QUICK[:1], *QUICK[2:]])
    assert seen == ["before fit 0", "after fit 4", "before test"]


def test_arguments_of_the_subcommands_method_are_options() -> None:
    cli = fit_cli("--trainer.enable_checkpointing=true", "--max_steps=2")
    assert cli.trainer.global_step == 2
    loaded = OwnNet.load_from_checkpoint(cli.trainer.last_checkpoint)
    assert torch.equal(loaded.net[0].weight, cli.model.net[0].weight)
    resumed = fit_cli("--trainer.enable_checkpointing=true", "--ckpt_path=last", "--trainer.max_epochs=2")
    assert resumed.trainer.global_step == 8
    assert "checkpoints" in resumed.trainer.ckpt_path
    tested = LeydenCLI(OwnNet, Points, args=["test", *QUICK[:1], *QUICK[2:], "--ckpt_path=last", "--model.width=4"])
    assert torch.equal(tested.model.net[0].weight, resumed.model.net[0].weight)


def test_a_saved_configuration_works_for_other_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    fit_cli("--trainer.enable_checkpointing=true", "--max_steps=2", "--model.width=5", "--restore=weights")
    for name in ("validate", "test", "predict"):
        run = LeydenCLI(OwnNet, Points, args=[name, "--config=version_0/config.yaml", "--ckpt_path=last"])
        assert run.model.hparams.width == 5
        assert "restore" not in run.config[name]
    words = ["fit", "--config=test-config.yaml", "--ckpt_path=null", "--max_steps=1"]
    again = LeydenCLI(OwnNet, Points, args=words, save_config_callback=None)
    assert (again.trainer.global_step, again.model.hparams.width) == (1, 5)
    cli = LeydenCLI(OwnNet, Points, args=["--config=test-config.yaml"], run=False)
    assert cli.model.hparams.width == 5
    assert "max_steps" in error_of(capsys, lambda: LeydenCLI(OwnNet, Points, args=["test", "--max_steps=1"]))


def test_a_custom_option_overrides_an_argument_of_the_method() -> None:
    class CustomCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.add_argument("--max_steps", default="many")
            parser.add_argument("--verbose", type=int, default=3)

    cli = fit_cli("--max_steps=few", kind=CustomCLI)
    assert (cli.trainer.global_step, cli.config.fit.max_steps, cli.config.fit.verbose) == (4, "few", 3)


def test_a_method_of_a_custom_trainer_can_be_a_subcommand() -> None:
    seen: list[Any] = []

    class Counting(Trainer):
        def count(self, model: Any, datamodule: Any = None, factor: int = 1) -> None:
            """Count parameters."""
            seen.append((type(datamodule), factor * sum(one.numel() for one in model.parameters())))

    class CustomCLI(LeydenCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {**LeydenCLI.subcommands(), "count": {"model", "datamodule"}}

        def before_count(self) -> None:
            seen.append(self.config.count.factor)

    args = ["count", "--factor=2", "--model.width=1", "--trainer.logger=false"]
    CustomCLI(OwnNet, Points, args=args, trainer_class=Counting)
    assert seen == [2, (Points, 2 * 7)]


def test_a_function_may_replace_the_module_class() -> None:
    def make_net(half: int = 1) -> OwnNet:
        return OwnNet(width=2 * half)

    assert build_cli("--model.half=3", model=make_net).model.hparams.width == 6


def test_a_configured_optimizer_replaces_configure_optimizers_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="OwnNet.configure_optimizers is not called"):
        cli = fit_cli("--optimizer=torch.optim.RMSprop")
    assert type(cli.trainer.optimizers[0]) is torch.optim.RMSprop


def test_a_cli_subclass_fixes_optimizer_and_scheduler_classes_and_the_interval() -> None:
    class CustomCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.Adam)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)

        @staticmethod
        def configure_optimizers(module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]

    cli = fit_cli("--optimizer.lr=1", "--lr_scheduler.gamma=0.5", model=Bare, kind=CustomCLI)
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.5**4


def test_several_optimizers_are_linked_to_arguments() -> None:
    class CustomCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.add_optimizer_args(nested_key="one", link_to="model.first")
            parser.add_optimizer_args(torch.optim.Adam, nested_key="two", link_to="model.second")

    cli = fit_cli("--one=SGD", "--one.lr=0.5", "--two.lr=0.25", model=Described, kind=CustomCLI)
    found = [(type(made), made.param_groups[0]["lr"]) for made in cli.trainer.optimizers]
    assert found == [(torch.optim.SGD, 0.5), (torch.optim.Adam, 0.25)]

    class UnlinkedCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.add_optimizer_args(nested_key="one")
            parser.add_optimizer_args(nested_key="two")

    with pytest.raises(ConfigurationError, match="one and two are optimizers of the same module. Link them"):
        build_cli("--one=SGD", model=Bare, kind=UnlinkedCLI)


def test_modules_receive_optimizer_and_scheduler_callables() -> None:
    encoder = ["--model.encoder=torch.nn.Linear", "--model.encoder.in_features=4", "--model.encoder.out_features=4"]
    cli = fit_cli(*encoder, "--trainer.logger=CSVLogger", model=Composed)
    assert type(cli.trainer.optimizers[0]) is torch.optim.Adam
    assert cli.trainer.lr_scheduler_configs[0].scheduler.step_size == 3
    again = LeydenCLI(Composed, Points, args=["fit", "--config=logs/version_0/config.yaml"])
    assert torch.equal(again.model.encoder.weight, cli.model.encoder.weight)
    given = ["--model.optimizer=SGD", "--model.scheduler=leyden.cli.ReduceLROnPlateau"]
    cli = fit_cli(*encoder, *given, "--model.scheduler.monitor=loss", model=Composed)
    assert type(cli.trainer.optimizers[0]) is torch.optim.SGD
    assert cli.trainer.lr_scheduler_configs[0].monitor == "loss"


RELU = nn.ReLU()
PARTS = [nn.Linear(1, 1)]


def test_a_default_that_cannot_be_serialized_is_omitted() -> None:
    class WithActivation(Bare):
        def __init__(self, activation: Any = RELU, width: int = 2) -> None:
            super().__init__(width)

    fit_cli("--optimizer=SGD", "--model.width=3", "--trainer.logger=true", model=WithActivation)
    assert read_yaml("logs/version_0/config.yaml")["model"] == {"width": 3}


def test_an_argument_containing_an_object_is_omitted_entirely() -> None:
    class WithParts(Bare):
        def __init__(  # type: ignore[no-untyped-def]
            self, parts: list[nn.Module] = PARTS, untyped=(PARTS,), opts: Any = None, width: int = 2
        ) -> None:
            super().__init__(width)
            assert parts is not None and untyped

    cli = build_cli("--optimizer=SGD", model=WithParts)
    assert yaml.safe_load(cli.parser.dump(cli.config))["model"] == {"width": 2}
    assert json.loads(cli.parser.dump(cli.config, format="json"))["model"] == {"width": 2}
    values = {"model": {"opts": {"a": RELU, "b": 1}, "width": 3}}
    cli = LeydenCLI(WithParts, Points, args=values, run=False)
    with pytest.warns(UserWarning, match="--model.opts holds an object that no configuration file can hold"):
        assert yaml.safe_load(cli.parser.dump(cli.config))["model"] == {"width": 3}


def test_an_argument_of_a_chosen_class_containing_an_object_is_omitted_entirely() -> None:
    cli = build_cli("--model=HoldsParts", model=None)
    text = cli.parser.dump(cli.config, skip_none=False)
    assert yaml.safe_load(text)["model"] == {"class_path": "configured.HoldsParts", "init_args": {"width": 4}}


def test_a_forced_callback_has_its_own_options() -> None:
    class CustomCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.add_lightning_class_args(OwnNotes, "notes")
            parser.set_defaults({"notes.text": "forced", "notes.often": 2})

    cli = build_cli(
        "--notes.often=3",
        "--trainer.callbacks=OwnNotes",
        kind=CustomCLI,
        trainer_defaults={"callbacks": OwnNotes("default")},
    )
    notes = [(one.text, one.often) for one in cli.trainer.callbacks if isinstance(one, OwnNotes)]
    assert sorted(notes) == [("default", 1), ("forced", 3), ("nothing", 1)]


def test_options_override_trainer_defaults() -> None:
    defaults = {"max_epochs": 5, "logger": {"class_path": "CSVLogger", "init_args": {"name": "mine"}}}
    cli = LeydenCLI(OwnNet, Points, args=[], run=False, trainer_defaults=defaults)
    assert (cli.trainer.max_epochs, cli.trainer.logger.name) == (5, "mine")

    with pytest.raises(ConfigurationError, match=r"trainer_defaults: options cannot override logger=.*lazy_instance"):
        build_cli(trainer_defaults={"logger": CSVLogger("x")})

    class ExtraArgumentTrainer(Trainer):
        def __init__(self, *, extra: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.extra = extra

    assert (
        build_cli("--trainer.extra=4", trainer_class=ExtraArgumentTrainer, trainer_defaults=defaults).trainer.extra == 4
    )


def test_a_linked_argument_is_not_saved() -> None:
    class InstantiateLinkCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.link_arguments("data.wide", "model.width", apply_on="instantiate")

    cli = fit_cli("--trainer.logger=true", kind=InstantiateLinkCLI)
    assert cli.model.hparams.width == 6
    assert "width" not in read_yaml("logs/version_0/config.yaml")["model"]
    assert InstantiateLinkCLI(OwnNet, Points, args=["fit", "-c", "logs/version_0/config.yaml"]).model


def test_environment_variables_and_default_files_apply_without_a_subcommand(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_yaml("defaults.yaml", model={"width": 8})
    monkeypatch.setenv("PL_CONFIG", path)
    monkeypatch.setenv("PL_MODEL__RATE", "0.25")
    assert build_cli(parser_kwargs={"env_prefix": "PL"}).model.hparams.width == 4
    cli = build_cli(parser_kwargs={"default_env": True, "env_prefix": "PL"})
    assert (cli.model.hparams.width, cli.model.hparams.rate) == (8, 0.25)
    assert build_cli(parser_kwargs={"default_config_files": [path]}).model.hparams.width == 8


def test_a_class_that_nothing_has_imported_is_found_by_name() -> None:
    """Runs in a new process, since a class that is already imported would be found anyway."""
    program = """
import sys
from configured import OwnNet
from leyden import LeydenCLI
assert "leyden.strategies.mesh.mesh_strategy" not in sys.modules
cli = LeydenCLI(OwnNet, args=["--config=run.yaml"], run=False)
assert type(cli.trainer.strategy).__name__ == "MeshStrategy", cli.trainer.strategy
"""
    write_yaml("run.yaml", trainer={"accelerator": "cpu", "strategy": "MeshStrategy", "logger": False})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_configuration_may_be_a_dict_or_a_namespace() -> None:
    values = {"trainer": {"max_epochs": 4, "logger": False}, "model": {"width": 3}}
    cli = LeydenCLI(OwnNet, Points, args=values, run=False)
    assert (cli.trainer.max_epochs, cli.model.hparams.width) == (4, 3)
    assert LeydenCLI(OwnNet, Points, args=cli.config, run=False).model.hparams.width == 3
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    run = LeydenCLI(OwnNet, Points, args={"subcommand": "fit", "fit": {"trainer": {**quiet, "max_steps": 1}}})
    assert run.trainer.global_step == 1


def test_saved_numbers_keep_their_type() -> None:
    options = ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1.0", "--trainer.val_check_interval=2"]
    cli = fit_cli(*options, "--trainer.precision=bf16-mixed", "--trainer.hang_timeout=false", "--trainer.logger=true")
    kept = read_yaml("logs/version_0/config.yaml")["trainer"]
    assert [kept[name] for name in ("limit_train_batches", "limit_val_batches", "val_check_interval")] == [2, 1.0, 2]
    assert [type(kept[name]) for name in ("limit_train_batches", "limit_val_batches")] == [int, float]
    assert kept["hang_timeout"] is False
    assert cli.trainer.global_step == 2


def test_help_shows_options_of_nested_classes(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            LeydenCLI(None, None, args=["fit", *args])
        assert not ended.value.code
        return capsys.readouterr().out

    text = shown("--help")
    assert "--trainer.accumulate_grad_batches" in text
    assert "batches per optimizer step" in text
    text = shown("--trainer.help")
    assert "--trainer.accumulate_grad_batches" in text
    assert "--model" not in text
    assert "of the hidden layer" in shown("--model.help", "OwnNet")
    assert "samples of a batch" in shown("--data.help=configured.Points")
    assert "--trainer.callbacks.save_top_k" in shown("--trainer.callbacks.help=ModelCheckpoint")
    assert "--optimizer.momentum" in shown("--optimizer.help", "SGD")
    assert "--trainer.strategy.ddp_comm_hook" in shown("--trainer.strategy.help=DDPStrategy")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fit"], "required: --model"),
        (["fit", "--model=OwnNett"], "No class OwnNett is imported. Give its full path"),
        (["fit", "--model=configured.OwnNett"], "module 'configured' has no attribute 'OwnNett'"),
        (["fit", "--model=OwnNet", "--model.width=wide"], "Expected a <class 'int'>"),
        (["fit", "--model=OwnNet", "--trainer.epochs=3"], "unrecognized arguments: --trainer.epochs=3"),
        (["fit", "--config=gone.yaml"], "gone.yaml"),
        (["train", "--model=OwnNet"], "invalid choice: 'train'"),
    ],
)
def test_an_invalid_command_line_prints_a_short_error(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = error_of(capsys, lambda: LeydenCLI(args=args))
    assert words in text
    assert len(text.splitlines()) <= 6


def test_a_class_of_another_kind_raises() -> None:
    with pytest.raises(ConfigurationError, match="model: the class Linear is not a Trainer, TrainModule"):
        LeydenCLI(nn.Linear, run=False, args=[])


def test_a_scheduler_without_an_optimizer_raises() -> None:
    with pytest.raises(ConfigurationError, match="needs an optimizer. Give --optimizer too"):
        build_cli("--lr_scheduler=StepLR", "--lr_scheduler.step_size=2")


def test_launch_settings_fill_arguments_left_at_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_LAUNCHED_FROM", "flags")
    monkeypatch.setenv("LEYDEN_PRECISION", "bf16-mixed")
    assert build_cli().trainer.precision == "bf16-mixed"
    assert build_cli("--trainer.precision=64-true").trainer.precision == "64-true"


@pytest.mark.parametrize(("seed", "kept"), [("true", 3), ("false", False), ("11", 11)])
def test_seed_everything_resolves_to_a_number(seed: str, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_SEED", "3")
    torch.manual_seed(77)
    cli = build_cli(f"--seed_everything={seed}")
    assert cli.config.seed_everything == kept
    torch.manual_seed(77 if kept is False else kept)
    assert torch.equal(OwnNet().net[0].weight, cli.model.net[0].weight)


def test_a_missing_jsonargparse_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "leyden.cli.configuration.argument_parser")
    with pytest.raises(ImportError, match=r"LeydenCLI needs the package 'jsonargparse': pip install 'leyden\[cli\]'"):
        LeydenCLI(OwnNet, Points, run=False, args=[])


def test_instantiate_class_builds_an_object_from_its_description() -> None:
    made = instantiate_class((4, 2), {"class_path": "torch.nn.Linear", "init_args": {"bias": False}})
    assert (made.in_features, made.bias) == (4, None)
    with pytest.raises(ConfigurationError, match="torch.nn has no Liner. Did you mean 'Linear'"):
        instantiate_class((), {"class_path": "torch.nn.Liner"})


# the configuration that a run saves -----------------------------------------------------------------------------------
def test_another_runs_configuration_is_not_overwritten() -> None:
    named = ["--trainer.logger=CSVLogger", "--trainer.logger.version=mine"]
    fit_cli("--model.width=5", *named)
    assert read_yaml("logs/mine/config.yaml")["model"]["width"] == 5
    before = os.stat("logs/mine/config.yaml").st_mtime_ns
    fit_cli("--model.width=5", *named)
    with pytest.raises(ConfigurationError, match="config.yaml is the configuration of another run. Use another folder"):
        fit_cli("--model.width=6", *named)
    assert os.stat("logs/mine/config.yaml").st_mtime_ns == before
    fit_cli("--model.width=6", *named, save_config_kwargs={"overwrite": True})
    assert read_yaml("logs/mine/config.yaml")["model"]["width"] == 6
    fit_cli("--model.width=7", *named, save_config_kwargs={"config_filename": "wide.yaml"})
    assert read_yaml("logs/mine/wide.yaml")["model"]["width"] == 7


def test_a_resumed_run_keeps_the_earlier_configuration() -> None:
    options = ["--trainer.enable_checkpointing=true", "--trainer.resume=auto", "--trainer.logger=CSVLogger"]
    fit_cli(*options)
    fit_cli(*options)
    assert sorted(path.name for path in Path("logs/version_0").glob("config*")) == ["config.yaml"]
    fit_cli(*options, "--trainer.max_epochs=2")
    assert [path.name for path in Path("logs").iterdir()] == ["version_0"]
    assert read_yaml("logs/version_0/config-1.yaml")["trainer"]["max_epochs"] == 1
    assert read_yaml("logs/version_0/config.yaml")["trainer"]["max_epochs"] == 2


MULTIFILE: dict[str, Any] = {"save_config_kwargs": {"multifile": True}}


def part_options() -> list[str]:
    """Writes a file for the module and one for the data into a folder `parts`; returns their options."""
    Path("parts").mkdir(exist_ok=True)
    write_yaml("parts/model.yaml", width=5)
    write_yaml("parts/data.yaml", batch_size=4)
    return ["--model=parts/model.yaml", "--data=parts/data.yaml"]


def test_multifile_saves_each_file_by_name_and_a_resumed_run_keeps_them() -> None:
    options = [*part_options(), "--trainer.enable_checkpointing=true", "--trainer.resume=auto"]
    first = fit_cli(*options, "--model.rate=0.5", **MULTIFILE)
    saved = {name: Path("version_0", name).read_text() for name in ("config.yaml", "model.yaml", "data.yaml")}
    assert read_yaml("version_0/config.yaml")["model"] == "model.yaml"
    assert read_yaml("version_0/model.yaml") == {"width": 5, "rate": 0.5}
    again = LeydenCLI(
        OwnNet, Points, args=["fit", "--config=version_0/config.yaml", "--trainer.default_root_dir=again"]
    )
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))
    fit_cli(*options, "--model.rate=0.5", **MULTIFILE)
    assert not Path("version_0/config-1").exists()
    resumed = fit_cli(*options, "--same_run=true", "--model.rate=0.25", "--trainer.max_epochs=2", **MULTIFILE)
    assert resumed.trainer.global_step == 16
    assert (read_yaml("version_0/model.yaml")["rate"], read_yaml("version_0/config.yaml")["trainer"]["max_epochs"]) == (
        0.25,
        2,
    )
    assert {path.name: path.read_text() for path in Path("version_0/config-1").iterdir()} == saved
    before = LeydenCLI(OwnNet, Points, args=["--config=version_0/config-1/config.yaml"], run=False)
    assert (before.model.hparams.rate, before.trainer.max_epochs) == (0.5, 1)
    assert [path.name for path in Path("version_0").glob(".*")] == []


def test_multifile_overwrites_neither_another_runs_files_nor_user_files() -> None:
    named = ["--trainer.logger=CSVLogger", "--trainer.logger.version=mine"]
    fit_cli(*part_options(), *named, **MULTIFILE)
    with pytest.raises(ConfigurationError, match="model.yaml is the configuration of another run. Use another folder"):
        fit_cli(*part_options(), "--model.width=6", *named, **MULTIFILE)
    assert read_yaml("logs/mine/model.yaml")["width"] == 5
    fit_cli(*part_options(), "--model.width=6", *named, save_config_kwargs={"multifile": True, "overwrite": True})
    assert read_yaml("logs/mine/model.yaml")["width"] == 6
    Path("logs/mine/config.yaml").unlink()
    write_yaml("logs/mine/model.yaml", width=7)
    for resume in ("auto", "null"):
        with pytest.raises(ConfigurationError, match="model.yaml is not part of a saved configuration"):
            fit_cli("--model=logs/mine/model.yaml", *named, f"--trainer.resume={resume}", **MULTIFILE)
    assert read_yaml("logs/mine/model.yaml") == {"width": 7}


def test_multifile_requires_distinct_file_names() -> None:
    Path("other").mkdir()
    options = [*part_options(), f"--data={write_yaml('other/model.yaml', batch_size=2)}"]
    with pytest.raises(ConfigurationError, match="two files of the configuration are called model.yaml. Rename one"):
        fit_cli(*options, **MULTIFILE)
    options = [f"--model={write_yaml('parts/config.yaml', width=2)}"]
    with pytest.raises(ConfigurationError, match="a part of the configuration is called config.yaml, like the main"):
        fit_cli(*options, **MULTIFILE)
    assert not list(Path().glob("*.yaml"))


def test_multifile_evaluations_do_not_overwrite_the_files_of_fit() -> None:
    fit_cli(*part_options(), **MULTIFILE)
    for rate in ("0.5", "0.25"):
        args = ["test", *QUICK[:1], *QUICK[2:], *part_options(), f"--model.rate={rate}"]
        LeydenCLI(OwnNet, Points, args=args, **MULTIFILE)
    rates = [
        read_yaml(f"{folder}model.yaml")["rate"] for folder in ("version_0/", "test-config/", "test-config/config-1/")
    ]
    assert rates == [0.1, 0.25, 0.5]
    [callback] = [
        one
        for one in LeydenCLI(OwnNet, Points, args=part_options(), run=False, **MULTIFILE).trainer.callbacks
        if isinstance(one, SaveConfigCallback)
    ]
    sent = ForkingPickler.loads(ForkingPickler.dumps(callback))
    assert set(sent._texts()) == {"", "model.yaml", "data.yaml"}
    assert yaml.safe_load(sent.parser.dump(sent.config))["model"]["width"] == 5


def test_evaluations_save_their_own_configuration_and_fast_dev_run_saves_none() -> None:
    fit_cli()
    for width in ("3", "5"):
        LeydenCLI(OwnNet, Points, args=["test", *QUICK[:1], *QUICK[2:], f"--model.width={width}"])
    assert {path.name for path in Path().glob("*.yaml")} == {"test-config.yaml", "test-config-1.yaml"}
    assert read_yaml("test-config.yaml")["model"]["width"] == 5
    Path("version_0/config.yaml").unlink()
    fit_cli("--trainer.fast_dev_run=true")
    fit_cli(save_config_callback=None)
    assert list(Path().rglob("config.yaml")) == []


def test_a_callback_subclass_also_saves_the_configuration_to_the_logger() -> None:
    class ToLogger(SaveConfigCallback):
        def save_config(self, trainer: Any, module: Any, stage: str) -> None:
            trainer.logger.log_hyperparams({"config": self.parser.dump(self.config), "stage": stage})

    fit_cli("--trainer.logger=CSVLogger", "--model.width=5", save_config_callback=ToLogger)
    logged = json.loads(Path("logs/version_0/hparams.json").read_text())
    assert logged["stage"] == "fit"
    assert yaml.safe_load(logged["config"])["model"]["width"] == 5
    assert Path("logs/version_0/config.yaml").exists()
    Path("logs/version_0/config.yaml").unlink()
    fit_cli("--trainer.logger=CSVLogger", save_config_callback=ToLogger, save_config_kwargs={"save_to_log_dir": False})
    assert list(Path("logs").glob("*/config.yaml")) == []
    with pytest.raises(ConfigurationError, match="saves no configuration at all"):
        fit_cli(save_config_kwargs={"save_to_log_dir": False})


class Login(OwnNet):
    """A module with secrets.

    Args:
        api_key: of a service.
        login: of another.
        urls: of data.
    """

    def __init__(self, api_key: str = "", login: dict[str, Any] | None = None, urls: list[str] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.given = api_key, login, urls


SECRET = "hunter2-of-mine"
AGAIN = "--trainer.default_root_dir=again"
SECRETS = [f"--model.api_key={SECRET}", f"--model.login={{password: {SECRET}, pad_token: 5}}"]


class KeptElsewhere(SaveConfigCallback):
    def save_config(self, trainer: Any, module: Any, stage: str) -> None:
        Path("kept.yaml").write_text(self.parser.dump(self.config))


@pytest.mark.parametrize("subclass_mode", [False, True])
def test_secrets_are_masked_in_the_saved_configuration_and_asked_for(
    subclass_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"model": Login, "subclass_mode_model": subclass_mode}
    options = ["--model=Login", *SECRETS] if subclass_mode else SECRETS
    first = fit_cli(*options, "--model.urls+=s3://b/x?a=1&sig=" + SECRET, save_config_callback=KeptElsewhere, **own)
    assert first.model.given[:2] == (SECRET, {"password": SECRET, "pad_token": 5})
    for file in ("version_0/config.yaml", "kept.yaml"):
        assert SECRET not in Path(file).read_text() and "pad_token: 5" in Path(file).read_text()
    assert Path("version_0/config.yaml").stat().st_mode & 0o777 == 0o600
    again = ["--config=version_0/config.yaml", AGAIN, "--model.urls=[]"]
    named = r"--model\.api_key is masked .*pass --model\.api_key=…, or set .* LEYDEN_FIT__MODEL__API_KEY"
    with pytest.raises(ConfigurationError, match=named):
        fit_cli(*again, **own)
    with pytest.raises(ConfigurationError, match=r"--model\.login\.password .*LEYDEN_FIT__MODEL__LOGIN__PASSWORD"):
        fit_cli(*again, "--model.api_key=mine", **own)
    monkeypatch.setenv("LEYDEN_FIT__MODEL__LOGIN__PASSWORD", "of the environment")
    repeated = fit_cli(*again, "--model.api_key=mine", **own)
    assert repeated.model.given == ("mine", {"password": "of the environment", "pad_token": 5}, [])
    with pytest.raises(ConfigurationError, match=r"--model\.urls\[0\] is masked .* into the file"):
        fit_cli("--config=version_0/config.yaml", "--model.api_key=mine", **own)
    sent = ForkingPickler.dumps(first.trainer.callbacks[-1])
    assert SECRET.encode() not in bytes(sent)


def test_secrets_are_masked_in_each_file_of_a_configuration() -> None:
    Path("parts").mkdir()
    write_yaml("parts/model.yaml", api_key=SECRET, urls=["s3://b"])
    write_yaml("parts/data.yaml", batch_size=4)
    fit_cli("--model=parts/model.yaml", "--data=parts/data.yaml", model=Login, **MULTIFILE)
    assert read_yaml("version_0/model.yaml") == {"api_key": "***masked***", "login": None, "urls": ["s3://b"]}
    modes = {name: Path("version_0", name).stat().st_mode & 0o777 for name in ("model.yaml", "data.yaml")}
    assert modes["model.yaml"] == 0o600 != modes["data.yaml"]
    cli = LeydenCLI(Login, Points, args=["fit", "--config=version_0/config.yaml", f"--model.api_key={SECRET}", AGAIN])
    assert cli.model.given == (SECRET, None, ["s3://b"])


def test_a_fit_prints_the_files_that_it_trusts(capsys: pytest.CaptureFixture[str]) -> None:
    write_yaml("run.yaml", seed_everything=3)
    fit_cli()
    assert "trusted" not in capsys.readouterr().out
    fit_cli("--config=run.yaml", "--trainer.default_root_dir=again")
    assert f"configuration: {Path('run.yaml').resolve()}, trusted like code" in capsys.readouterr().out


def test_a_saved_configuration_builds_the_module_with_run_false() -> None:
    class CustomCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.add_argument("--ckpt_path", default="mine")

    fit_cli("--model.width=5", "--optimizer=Adam")
    cli = LeydenCLI(OwnNet, Points, args=["--config=version_0/config.yaml"], run=False)
    assert (cli.model.hparams.width, cli.config.ckpt_path) == (5, None)
    assert type(cli.model.configure_optimizers()) is torch.optim.Adam
    assert build_cli(kind=CustomCLI).config.ckpt_path == "mine"


def test_a_cli_with_run_false_saves_one_configuration_for_fit_and_test() -> None:
    cli = build_cli()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.test(cli.model, datamodule=cli.datamodule)
    assert {str(path) for path in Path().rglob("*.yaml")} == {"version_0/config.yaml"}


def test_a_configuration_is_pickled_as_text_for_spawned_ranks() -> None:
    class CustomCLI(LeydenCLI):
        def add_arguments_to_parser(self, parser: LeydenArgumentParser) -> None:
            parser.link_arguments("data.batch_size", "model.width", compute_fn=lambda size: 2 * size)

    cli = build_cli("--data.batch_size=3", kind=CustomCLI)
    [callback] = [one for one in cli.trainer.callbacks if isinstance(one, SaveConfigCallback)]
    sent = ForkingPickler.loads(ForkingPickler.dumps(callback))
    assert yaml.safe_load(sent.parser.dump(sent.config))["data"]["batch_size"] == 3
    assert sent.config.data.batch_size == 3


def test_an_error_in_a_constructor_is_raised_unchanged_with_its_cause() -> None:
    for model, args in ((configured.Caused, []), (None, ["--model=configured.Caused"])):
        with pytest.raises(RuntimeError, match="no table") as found:
            build_cli(*args, model=model)
        assert isinstance(found.value.__cause__, LookupError)


def test_trainer_defaults_take_a_lazy_strategy() -> None:
    strategy = lazy_instance(DDPStrategy, find_unused_parameters=True)
    cli = LeydenCLI(OwnNet, Points, args=[], run=False, trainer_defaults={"strategy": strategy, "accelerator": "cpu"})
    assert cli.trainer.strategy.ddp_arguments == {"find_unused_parameters": True}


def test_configure_optimizers_returns_lists_as_in_lightning() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert LeydenCLI.configure_optimizers(OwnNet(), optimizer) is optimizer
    assert LeydenCLI.configure_optimizers(OwnNet(), optimizer, scheduler) == ([optimizer], [scheduler])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--trainr.max_epochs=3", r"Did you mean --trainer\.max_epochs\?"),
        ("--ckpt_pth=x", r"Did you mean --ckpt_path\?"),
        ("--optimizr=SGD", r"Did you mean --optimizer\?"),
        ("--trainer.nothing_alike=3", r"nothing_alike=3\n"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        LeydenCLI(OwnNet, Points, args=["fit", word])
    assert re.search(meant, capsys.readouterr().err)


def test_an_unknown_key_or_subcommand_suggests_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("trainer:\n  max_epoc: 3\n")
    for args, meant in ((["fit", "--config", str(tmp_path / "c.yaml")], "trainer.max_epochs?"), (["ftt"], "fit?")):
        with pytest.raises(SystemExit):
            LeydenCLI(OwnNet, Points, args=args)
        assert f"Did you mean {meant}" in capsys.readouterr().err
