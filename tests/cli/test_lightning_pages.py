"""The examples of Lightning's CLI documentation, in scripts of which only the imports are changed.

Each test covers a section of a page, and is cited in docs/lightning-cli.md. The scripts run as `__main__`, like a
user's, but with the modules and data of the tests.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from same import same_weights

from leyden import ConfigurationError

IMPORTS = """
import torch
from torch import nn
from leyden import DataModule as LightningDataModule, TrainModule as LightningModule, Trainer
from leyden.cli import (
    ArgsType, LRSchedulerCallable, LeydenCLI as LightningCLI, OptimizerCallable, SaveConfigCallback, instantiate_class,
)
from configured import Bare, OwnNet, Points

SHORT = {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1,
         "limit_test_batches": 1, "limit_predict_batches": 1, "num_sanity_val_steps": 0, "logger": False,
         "enable_checkpointing": False, "enable_progress_bar": False}
"""
Run = Callable[[str], dict[str, Any]]
Script = Callable[[str], Run]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Writes main.py; returns a function that runs it with a command line and returns its globals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in os.environ if name.startswith("LEYDEN_")]:
        monkeypatch.delenv(name)

    def write(text: str) -> Run:
        Path("main.py").write_text(IMPORTS + text, encoding="utf-8")

        def run(line: str) -> dict[str, Any]:
            monkeypatch.setattr(sys, "argv", ["main.py", *shlex.split(line)])
            return runpy.run_path("main.py", run_name="__main__")

        return run

    return write


def output_of(capsys: pytest.CaptureFixture[str], call: Callable[[], Any]) -> str:
    """Returns the output of a command that exits successfully without running anything."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call()
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    return printed.out


def error_of(capsys: pytest.CaptureFixture[str], call: Callable[[], Any]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 2
    return capsys.readouterr().err


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


# intermediate ---------------------------------------------------------------------------------------------------------
def test_a_script_with_a_module_and_data_has_four_subcommands(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script(
        """
def cli_main():
    return LightningCLI(OwnNet, Points, trainer_defaults=SHORT, save_config_callback=None)

if __name__ == "__main__":
    cli = cli_main()
"""
    )
    text = output_of(capsys, lambda: run("--help"))
    assert all(word in text for word in ("{fit,validate,test,predict}", "--config", "--print_config"))
    for name in ("fit", "validate", "test", "predict"):
        assert run(name)["cli"].subcommand == name
    text = output_of(capsys, lambda: run("fit --help"))
    assert "learning rate. (type: float, default: 0.1)" in " ".join(text.split())
    cli = run("fit --model.rate 0.5 --model.width 3 --data.count 16 --trainer.logger False")["cli"]
    assert (cli.model.hparams.rate, cli.model.hparams.width, len(cli.datamodule.data)) == (0.5, 3, 16)


# intermediate 2 -------------------------------------------------------------------------------------------------------
def test_modules_and_data_in_the_script_are_chosen_by_name(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    run = script(
        """
class ManyUnits(OwnNet):
    def configure_optimizers(self):
        print("the wide one")
        return super().configure_optimizers()

class FewUnits(OwnNet):
    '''A net with another argument.

    Args:
        bend: how far.
    '''
    def __init__(self, bend: int = 1):
        super().__init__()

class OneSet(Points):
    def train_dataloader(self):
        print("set one")
        return super().train_dataloader()

class OtherSet(Points):
    '''Points with another argument.

    Args:
        size: number of samples.
    '''
    def __init__(self, size: int = 3):
        super().__init__(size)

cli = LightningCLI(trainer_defaults=SHORT, save_config_callback=None)
"""
    )
    cli = run("fit --model ManyUnits --data OneSet")["cli"]
    assert [type(part).__name__ for part in (cli.model, cli.datamodule)] == ["ManyUnits", "OneSet"]
    printed = capsys.readouterr().out
    assert "the wide one" in printed and "set one" in printed
    cli = run("fit --model FewUnits --model.bend=2 --data=OtherSet --data.size 16")["cli"]
    assert (type(cli.model).__name__, len(cli.datamodule.data)) == ("FewUnits", 16)
    assert "how far" in output_of(capsys, lambda: run("fit --model.help FewUnits"))
    assert "number of samples" in output_of(capsys, lambda: run("fit --data.help OtherSet"))
    assert "--optimizer.lr_decay" in output_of(capsys, lambda: run("fit --optimizer.help Adagrad"))
    assert "--lr_scheduler.step_size" in output_of(capsys, lambda: run("fit --lr_scheduler.help StepLR"))


def test_optimizers_and_schedulers_in_the_script_are_chosen_by_name(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script(
        """
class RequiredClosureAdam(torch.optim.Adam):
    def step(self, closure):
        print("required-closure")
        super().step(closure)

class OptionalClosureAdam(torch.optim.Adam):
    def step(self, closure=None):
        print("optional-closure")
        return super().step(closure)

class OwnCosine(torch.optim.lr_scheduler.CosineAnnealingLR):
    def step(self):
        print("cosine")
        super().step()

cli = LightningCLI(Bare, Points, trainer_defaults=SHORT, save_config_callback=None)
"""
    )
    assert type(run("fit --optimizer AdamW")["cli"].trainer.optimizers[0]) is torch.optim.AdamW
    made = run("fit --optimizer SGD --optimizer.lr=0.01")["cli"].trainer.optimizers[0]
    assert (type(made), made.defaults["lr"]) == (torch.optim.SGD, 0.01)
    capsys.readouterr()
    for name, word in (("RequiredClosureAdam", "required-closure"), ("OptionalClosureAdam", "optional-closure")):
        cli = run(f"fit --optimizer {name}")["cli"]
        assert capsys.readouterr().out.split().count(word) == 2
        assert cli.trainer.global_step == 2
    run("fit --optimizer SGD --lr_scheduler OwnCosine --lr_scheduler.T_max=5")
    assert "cosine" in capsys.readouterr().out
    cli = run("fit --optimizer=Adam --lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=val_loss")["cli"]
    assert cli.trainer.lr_scheduler_configs[0].monitor == "val_loss"
    assert "T_max" in error_of(capsys, lambda: run("fit --optimizer=Adam --lr_scheduler CosineAnnealingLR"))


def test_optimizers_with_required_and_optional_closures_train_alike(script: Script) -> None:
    run = script(
        """
class RequiredClosureSGD(torch.optim.SGD):
    def step(self, closure):
        super().step(closure)

class OptionalClosureSGD(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

cli = LightningCLI(Bare, Points, trainer_defaults=SHORT, save_config_callback=None, seed_everything_default=3)
"""
    )
    one, other = (
        run(f"fit --optimizer {name} --optimizer.lr 0.1")["cli"].model
        for name in ("RequiredClosureSGD", "OptionalClosureSGD")
    )
    assert same_weights(one, other)


def test_classes_of_an_imported_package_are_chosen_by_short_name(script: Script) -> None:
    write("my_code/__init__.py", "")
    write("my_code/parts.py", "from configured import Bare\n\nclass ImportedNet(Bare):\n    pass\n")
    write("my_code/unimported.py", "from configured import OwnNet\n\nclass UnimportedNet(OwnNet):\n    pass\n")
    run = script("import my_code.parts\ncli = LightningCLI(datamodule_class=Points, trainer_defaults=SHORT)\n")
    assert type(run("fit --model ImportedNet --optimizer SGD")["cli"].model).__name__ == "ImportedNet"
    assert type(run("fit --model my_code.unimported.UnimportedNet")["cli"].model).__name__ == "UnimportedNet"


# advanced: files ------------------------------------------------------------------------------------------------------
def test_a_printed_configuration_can_be_edited_run_and_repeated(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script("cli = LightningCLI(OwnNet, Points)\n")
    printed = yaml.safe_load(output_of(capsys, lambda: run("fit --print_config")))
    assert printed["model"] == {"width": 4, "rate": 0.1}
    assert printed["data"] == {"count": 32, "batch_size": 8}
    assert printed["ckpt_path"] is None
    printed["trainer"].update(accelerator="cpu", max_epochs=1, limit_train_batches=1, enable_progress_bar=False)
    write("mine.yaml", yaml.safe_dump(printed))
    first = run("fit --config mine.yaml --trainer.max_epochs 2")["cli"]
    assert first.trainer.current_epoch == 2
    saved = Path(first.trainer.log_dir, "config.yaml")
    again = run(f"fit --config {saved}")["cli"]
    assert again.trainer.log_dir != first.trainer.log_dir
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))
    for flag, words in (("skip_unset", "ckpt_path"), ("skip_default", "max_epochs")):
        assert words not in output_of(capsys, lambda flag=flag: run(f"fit --print_config={flag}"))


def test_print_config_shows_the_settings_of_the_chosen_module(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script("cli = LightningCLI(datamodule_class=Points)\n")
    assert "model" not in (yaml.safe_load(output_of(capsys, lambda: run("fit --print_config=skip_unset"))) or {})
    printed = yaml.safe_load(output_of(capsys, lambda: run("fit --model OwnNet --print_config")))
    assert printed["model"] == {"class_path": "configured.OwnNet", "init_args": {"width": 4, "rate": 0.1}}


def test_the_configuration_is_saved_under_another_name_and_to_the_logger(script: Script) -> None:
    run = script(
        """
from leyden.callbacks import Logger

class ToLogger(SaveConfigCallback):
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.logger, Logger):
            config = self.parser.dump(self.config)
            trainer.logger.log_hyperparams({"config": config})

cli = LightningCLI(OwnNet, Points, trainer_defaults={**SHORT, "logger": True}, save_config_callback=ToLogger,
                   save_config_kwargs={"config_filename": "name.yaml"})
"""
    )
    folder = Path(run("fit --trainer.logger=CSVLogger --trainer.logger.save_dir=runs")["cli"].trainer.log_dir)
    assert "width: 4" in yaml.safe_load((folder / "hparams.yaml").read_text())["config"]
    assert yaml.safe_load((folder / "name.yaml").read_text())["model"]["width"] == 4


def test_class_path_describes_objects_and_dict_kwargs_are_passed_unchecked(script: Script) -> None:
    run = script(
        """
class WithCriterion(OwnNet):
    def __init__(self, criterion: torch.nn.Module, many: dict | None = None):
        super().__init__()
        self.criterion = criterion

cli = LightningCLI(trainer_defaults=SHORT, run=False, seed_everything_default=False)
"""
    )
    write(
        "config.yaml",
        """
model:
  class_path: WithCriterion
  init_args:
    criterion:
      class_path: torch.nn.CrossEntropyLoss
      init_args:
        reduction: sum
trainer:
  profiler:
    class_path: leyden.trainer.profilers.PyTorchProfiler
    dict_kwargs:
      profile_memory: true
""",
    )
    cli = run("--config config.yaml")["cli"]
    assert (type(cli.model.criterion), cli.model.criterion.reduction) == (torch.nn.CrossEntropyLoss, "sum")
    assert type(cli.trainer.profiler).__name__ == "PyTorchProfiler"


def test_several_files_and_group_files_are_composed(script: Script) -> None:
    run = script("cli = LightningCLI(OwnNet, Points, run=False)\n")
    write("one.yaml", "trainer:\n  max_epochs: 10\n  min_epochs: 3\n")
    write("two.yaml", "trainer:\n  max_epochs: 20\n")
    cli = run("--config one.yaml --config two.yaml")["cli"]
    assert (cli.trainer.max_epochs, cli.trainer.fit_loop.min_epochs) == (20, 3)
    write("trainer.yaml", "max_epochs: 10\n")
    write("model.yaml", "width: 7\n")
    write("data.yaml", "count: 9\n")
    cli = run("--trainer trainer.yaml --model model.yaml --data data.yaml")["cli"]
    assert (cli.trainer.max_epochs, cli.model.hparams.width, len(cli.datamodule.data)) == (10, 7, 9)


# advanced 2: sections, texts, variables, defaults, interpolation ------------------------------------------------------
def test_a_file_may_have_sections_for_subcommands(script: Script) -> None:
    run = script("cli = LightningCLI(OwnNet, Points, trainer_defaults=SHORT, save_config_callback=None)\n")
    write("config.yaml", "fit:\n  trainer:\n    max_steps: 1\ntest:\n  trainer:\n    max_epochs: 10\n")
    assert run("--config config.yaml fit")["cli"].trainer.global_step == 1
    assert run("--config config.yaml test")["cli"].trainer.max_epochs == 10


def test_a_configuration_may_be_remote_or_inline(script: Script) -> None:
    import fsspec

    with fsspec.open("memory://bucket/config.yaml", "w") as file:
        file.write("model:\n  width: 6\n")
    run = script("cli = LightningCLI(OwnNet, Points, trainer_defaults=SHORT, save_config_callback=None)\n")
    assert run("fit --config memory://bucket/config.yaml")["cli"].model.hparams.width == 6
    texts = """--trainer "max_epochs: 1
limit_train_batches: 1" --model "{width: 5}" """
    cli = run(f"fit {texts}")["cli"]
    assert (cli.trainer.global_step, cli.model.hparams.width) == (1, 5)


def test_environment_variables_set_options_and_appear_in_help(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "cli = LightningCLI(OwnNet, Points, trainer_defaults=SHORT, save_config_callback=None, parser_kwargs=%s)\n"
    for prefix, kwargs in (("LEYDEN", {"default_env": True}), ("PL", {"default_env": True, "env_prefix": "PL"})):
        run = script(text % kwargs)
        help_text = output_of(capsys, lambda run=run: run("fit --help"))
        assert f"ENV:   {prefix}_FIT__MODEL__WIDTH" in help_text
        with monkeypatch.context() as patch:
            patch.setenv(f"{prefix}_FIT__MODEL__RATE", "0.5")
            patch.setenv(f"{prefix}_FIT__MODEL__WIDTH", "6")
            patch.setenv(f"{prefix}_FIT__SEED_EVERYTHING", "12")
            cli = run("fit --model.width 7")["cli"]
        assert (cli.model.hparams.rate, cli.model.hparams.width, cli.config.fit.seed_everything) == (0.5, 7, 12)


def test_default_files_apply_to_all_subcommands_or_to_one(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Precedence follows the FAQ: code, default files, a file named by a variable, variables, the command line."""
    text = "cli = LightningCLI(OwnNet, Points, trainer_defaults=SHORT, save_config_callback=None, parser_kwargs=%s)\n"
    write("all.yaml", "fit:\n  model:\n    width: 5\n    rate: 0.5\ntest:\n  model:\n    width: 9\n")
    run = script(text % {"default_config_files": ["all.yaml"]})
    assert [run(name)["cli"].model.hparams.width for name in ("fit", "test")] == [5, 9]
    write("fit.yaml", "model:\n  width: 6\n  rate: 0.5\ndata:\n  count: 16\n  batch_size: 4\n")
    kwargs = {"default_env": True, "fit": {"default_env": True, "default_config_files": ["fit.yaml"]}}
    run = script(text % kwargs)
    assert [run(name)["cli"].model.hparams.width for name in ("fit", "test")] == [6, 4]
    write("variable.yaml", "model:\n  rate: 0.25\ndata:\n  count: 24\n  batch_size: 2\n")
    monkeypatch.setenv("LEYDEN_FIT__CONFIG", "variable.yaml")
    monkeypatch.setenv("LEYDEN_FIT__DATA__COUNT", "40")
    monkeypatch.setenv("LEYDEN_FIT__DATA__BATCH_SIZE", "8")
    cli = run("fit --data.batch_size 10")["cli"]
    hparams = cli.model.hparams
    assert (hparams.width, hparams.rate, len(cli.datamodule.data), cli.datamodule.batch_size) == (6, 0.25, 40, 10)


def test_settings_share_a_value_by_interpolation(script: Script) -> None:
    pytest.importorskip("omegaconf")
    run = script(
        """
class Coder(OwnNet):
    def __init__(self, encoders: int = 12, decoders: list[int] = [2, 4]):
        super().__init__()
        self.save_hyperparameters()

cli = LightningCLI(Coder, run=False, parser_kwargs={"parser_mode": "omegaconf"})
"""
    )
    write("config.yaml", "model:\n  encoders: 12\n  decoders:\n  - ${model.encoders}\n  - 4\n")
    assert run("--config config.yaml")["cli"].model.hparams.decoders == [12, 4]


# advanced 3: classes as arguments, from Python ------------------------------------------------------------------------
def test_callbacks_are_appended_by_options_and_saved_with_class_paths(script: Script) -> None:
    run = script("cli = LightningCLI(OwnNet, Points, run=False)\ncli.trainer.callbacks\n")
    write(
        "config.yaml",
        """
trainer:
  callbacks:
    - class_path: leyden.callbacks.EarlyStopping
      init_args:
        monitor: val_loss
        patience: 5
    - class_path: LearningRateMonitor
      init_args:
        logging_interval: epoch
""",
    )
    words = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val_loss --trainer.callbacks.patience=5 "
    words += "--trainer.callbacks+=LearningRateMonitor --trainer.callbacks.logging_interval=epoch"
    for line in ("--config config.yaml", words):
        cli = run(line)["cli"]
        found = {type(one).__name__: one for one in cli.trainer.callbacks}
        assert (found["EarlyStopping"].patience, found["LearningRateMonitor"].logging_interval) == (5, "epoch")
        paths = [one["class_path"] for one in yaml.safe_load(cli.parser.dump(cli.config))["trainer"]["callbacks"]]
        assert paths == ["leyden.callbacks.EarlyStopping", "leyden.callbacks.LearningRateMonitor"]


def test_class_paths_may_be_nested(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        "my_parts.py",
        '''
import torch
from configured import OwnNet, Points

class Inner(torch.nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.layers = layers

class Outer(OwnNet):
    def __init__(self, encoder: torch.nn.Module, decoder: torch.nn.Module):
        """A net of two parts.

        Args:
            encoder: encodes inputs.
            decoder: decodes outputs.
        """
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

class SmallPoints(Points):
    def __init__(self, size: int = 16):
        super().__init__(size)
''',
    )
    run = script(
        "cli = LightningCLI(OwnNet, Points, subclass_mode_model=True, subclass_mode_data=True, trainer_defaults=SHORT,"
        "save_config_callback=None)\n"
    )
    write(
        "config.yaml",
        """
model:
  class_path: my_parts.Outer
  init_args:
    encoder:
      class_path: my_parts.Inner
      init_args:
        layers: 3
    decoder:
      class_path: my_parts.Inner
data:
  class_path: my_parts.SmallPoints
trainer:
  callbacks:
    - class_path: leyden.callbacks.EarlyStopping
      init_args:
        monitor: val_loss
        patience: 5
""",
    )
    cli = run("fit --config config.yaml")["cli"]
    assert (cli.model.encoder.layers, cli.model.decoder.layers, len(cli.datamodule.data)) == (3, 2, 16)
    assert "decodes outputs" in output_of(capsys, lambda: run("fit --model.help my_parts.Outer"))
    printed = yaml.safe_load(output_of(capsys, lambda: run("fit --model my_parts.Outer --print_config")))
    assert set(printed["model"]["init_args"]) == {"encoder", "decoder"}
    assert "subclass of OwnNet" in error_of(capsys, lambda: run("fit --model configured.Bare --data Points"))
    run = script("from my_parts import Outer\ncli = LightningCLI(Outer, run=False)\n")
    write(
        "one.yaml", "model:\n  encoder:\n    class_path: my_parts.Inner\n  decoder:\n    class_path: my_parts.Inner\n"
    )
    assert run("--config one.yaml")["cli"].model.encoder.layers == 2


def test_optimizer_and_scheduler_classes_may_be_fixed(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    run = script(
        """
class CustomCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(torch.optim.Adam)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)

cli = CustomCLI(Bare, Points, trainer_defaults=SHORT, save_config_callback=None)
"""
    )
    text = output_of(capsys, lambda: run("fit --help"))
    assert "--optimizer.amsgrad" in text and "--lr_scheduler.gamma" in text
    write("config.yaml", "optimizer:\n  lr: 0.5\nlr_scheduler:\n  gamma: 0.5\n")
    for line in ("fit --config config.yaml", "fit --optimizer.lr=0.5 --lr_scheduler.gamma=0.5"):
        [made] = run(line)["cli"].trainer.optimizers
        assert (type(made), made.param_groups[0]["lr"]) == (torch.optim.Adam, 0.25)


TWO_OPTIMIZERS = """
class TwoOptimizers(Bare):
    def __init__(self, first: {kind}, second: {kind}):
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = first, second
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [{make}, {make_second}]
"""


def test_several_optimizers_are_configured_by_links_or_callables(script: Script) -> None:
    described = TWO_OPTIMIZERS.format(
        kind="dict",
        make="instantiate_class(self.parameters(), self.first)",
        make_second="instantiate_class(self.parameters(), self.second)",
    )
    run = script(
        described
        + """
class CustomCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(nested_key="optimizer1", link_to="model.first")
        parser.add_optimizer_args(nested_key="optimizer2", link_to="model.second")

cli = CustomCLI(TwoOptimizers, Points, trainer_defaults=SHORT, save_config_callback=None)
"""
    )
    lines = [
        f"fit --optimizer1={path}Adam --optimizer1.lr=0.25 --optimizer2={path}AdamW --optimizer2.lr=0.125"
        for path in ("", "torch.optim.")
    ]
    found = [run(line)["cli"] for line in lines]
    injected = TWO_OPTIMIZERS.format(
        kind="Made", make="self.first(self.parameters())", make_second="self.second(self.parameters())"
    )
    run = script(
        "from typing import Callable, Iterable\nfrom torch.optim import Optimizer\n"
        "Made = Callable[[Iterable], Optimizer]\n"
        + injected
        + "cli = LightningCLI(TwoOptimizers, Points, trainer_defaults=SHORT, auto_configure_optimizers=False)\n"
    )
    found.append(
        run("fit --model.first=Adam --model.first.lr=0.25 --model.second=AdamW --model.second.lr=0.125")["cli"]
    )
    for cli in found:
        made = [(type(one), one.param_groups[0]["lr"]) for one in cli.trainer.optimizers]
        assert made == [(torch.optim.Adam, 0.25), (torch.optim.AdamW, 0.125)]
    again = run(f"fit --config {found[-1].trainer.run_folder}/config.yaml --trainer.default_root_dir=again")["cli"]
    assert [type(one) for one in again.trainer.optimizers] == [torch.optim.Adam, torch.optim.AdamW]


def test_optimizer_and_scheduler_callables_may_have_defaults(script: Script) -> None:
    run = script(
        """
class Injected(Bare):
    def __init__(
        self,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.5),
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

cli = LightningCLI(Injected, Points, trainer_defaults=SHORT, auto_configure_optimizers=False,
                   save_config_callback=None)
"""
    )
    cli = run("fit")["cli"]
    assert (type(cli.trainer.optimizers[0]), cli.trainer.optimizers[0].defaults["lr"]) == (torch.optim.SGD, 0.5)
    assert type(cli.trainer.lr_scheduler_configs[0].scheduler).__name__ == "ConstantLR"
    cli = run("fit --model.optimizer=Adam --model.scheduler=StepLR --model.scheduler.step_size=3")["cli"]
    assert type(cli.trainer.optimizers[0]) is torch.optim.Adam
    assert cli.trainer.lr_scheduler_configs[0].scheduler.step_size == 3


def test_a_cli_runs_from_python_with_a_list_or_a_dict(script: Script) -> None:
    run = script(
        """
def cli_main(args: ArgsType = None):
    return LightningCLI(OwnNet, Points, trainer_defaults=SHORT, run=False, args=args)

if __name__ == "__main__":
    cli = cli_main()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
"""
    )
    assert run("--trainer.max_epochs=2 --model.width=5")["cli"].trainer.current_epoch == 2
    main = runpy.run_path("main.py", run_name="elsewhere")["cli_main"]
    assert main(["--trainer.max_epochs=100", "--model.width=6"]).model.hparams.width == 6
    args: dict[str, Any] = {"trainer": {"max_epochs": 100}, "model": {}}
    for width, epochs in ((8, 100), (12, 100), (12, 200)):
        args["model"]["width"], args["trainer"]["max_epochs"] = width, epochs
        cli = main(args)
        assert (cli.model.hparams.width, cli.trainer.max_epochs) == (width, epochs)
    assert args == {"trainer": {"max_epochs": 200}, "model": {"width": 12}}


# expert ---------------------------------------------------------------------------------------------------------------
def test_a_custom_argument_is_available_in_before_fit_and_after_fit(script: Script) -> None:
    run = script(
        """
sent = []

class CustomCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--notification_email", default="will@email.com")

    def before_fit(self):
        sent.append((self.config["fit"]["notification_email"], "begins", self.config["fit"]["trainer"].max_epochs))

    def after_fit(self):
        sent.append((self.config["fit"]["notification_email"], "has ended", self.trainer.global_step))

cli = CustomCLI(OwnNet, Points, trainer_defaults=SHORT, save_config_callback=None)
"""
    )
    assert run("fit --notification_email=me@here")["sent"] == [("me@here", "begins", 1), ("me@here", "has ended", 2)]


def test_a_forced_callback_has_options(script: Script) -> None:
    run = script(
        """
from leyden.callbacks import EarlyStopping

class CustomCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_lightning_class_args(EarlyStopping, "my_early_stopping")
        parser.set_defaults({"my_early_stopping.monitor": "val_loss", "my_early_stopping.patience": 5})

cli = CustomCLI(OwnNet, Points, trainer_defaults=SHORT, save_config_callback=None)
"""
    )
    write("config.yaml", "my_early_stopping:\n  patience: 6\n")
    for line, patience in (("fit", 5), ("fit --config config.yaml", 6)):
        [found] = [one for one in run(line)["cli"].trainer.callbacks if type(one).__name__ == "EarlyStopping"]
        assert (found.monitor, found.patience) == ("val_loss", patience)


def test_a_class_argument_may_default_to_a_dict_or_a_lazy_instance(script: Script) -> None:
    text = """
from jsonargparse import lazy_instance

class Backbone(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.layers = layers

class WithBackbone(OwnNet):
    def __init__(self, backbone: torch.nn.Module):
        super().__init__()
        self.backbone = backbone

class CustomCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.set_defaults({"model.backbone": %s})

cli = CustomCLI(WithBackbone, run=False)
"""
    described = '{"class_path": "__main__.Backbone", "init_args": {"layers": 24}}'
    for default in (described, "lazy_instance(Backbone, layers=24)"):
        run = script(text % default)
        assert run("")["cli"].model.backbone.layers == 24
        assert run("--model.backbone.layers=3")["cli"].model.backbone.layers == 3


def test_arguments_are_linked_at_parsing_or_instantiation(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    run = script(
        """
class LinkedNet(OwnNet):
    def __init__(self, num_classes: int, batch_size: int = 8):
        super().__init__()
        self.num_classes, self.batch_size = num_classes, batch_size

class CustomCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.link_arguments("data.wide", "model.num_classes", apply_on="instantiate")

cli = CustomCLI(LinkedNet, Points, trainer_defaults=SHORT, save_config_callback=None)
"""
    )
    cli = run("fit --data.batch_size=4")["cli"]
    assert (cli.model.batch_size, cli.model.num_classes) == (4, 6)
    text = output_of(capsys, lambda: run("fit --help"))
    assert "data.batch_size --> model.batch_size" in text
    assert "data.wide --> model.num_classes" in text
    assert 'must be given via "data.batch_size"' in error_of(capsys, lambda: run("fit --model.batch_size=3"))


# the FAQ and the migration guide --------------------------------------------------------------------------------------
def test_jsonargparse_debug_shows_the_traceback_of_an_invalid_command(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = script("cli = LightningCLI(OwnNet, Points, trainer_defaults=SHORT)\n")
    assert "Traceback" not in error_of(capsys, lambda: run("fit --model.width=wide"))
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(Exception, match="width") as found:
        run("fit --model.width=wide")
    assert not isinstance(found.value, SystemExit)


def test_a_seed_of_none_does_not_seed(script: Script) -> None:
    run = script("cli = LightningCLI(OwnNet, run=False, seed_everything_default=None)\n")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert run("")["cli"].config.seed_everything is None
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), expected)


# the reference --------------------------------------------------------------------------------------------------------
def test_the_documented_methods_can_be_overridden(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    run = script(
        """
seen = []

class CustomCLI(LightningCLI):
    def init_parser(self, **kwargs):
        seen.append("init_parser")
        return super().init_parser(**kwargs)

    def add_default_arguments_to_parser(self, parser):
        seen.append("defaults")
        super().add_default_arguments_to_parser(parser)

    def add_core_arguments_to_parser(self, parser):
        seen.append("core")
        super().add_core_arguments_to_parser(parser)

    def parse_arguments(self, parser, args):
        seen.append("parse")
        super().parse_arguments(parser, args)

    def before_instantiate_classes(self):
        seen.append(("before", self.subcommand))

    def instantiate_classes(self):
        super().instantiate_classes()
        seen.append(type(self.model).__name__)

    def after_instantiate_classes(self):
        seen.append(("after", type(self.trainer).__name__))

    def setup_parser(self, add_subcommands, main_kwargs, subparser_kwargs):
        seen.append((add_subcommands, sorted(main_kwargs), subparser_kwargs))
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)

    def instantiate_trainer(self, **kwargs):
        return super().instantiate_trainer(max_epochs=3, **kwargs)

    @staticmethod
    def subcommands():
        return {"test": {"model", "dataloaders", "datamodule"}}

cli = CustomCLI(OwnNet, Points, trainer_defaults=SHORT,
          parser_kwargs={"description": "A custom CLI.", "test": {"exit_on_error": True}},
          save_config_kwargs={"overwrite": True})
"""
    )
    assert "A custom CLI." in output_of(capsys, lambda: run("--help"))
    found = run("test --verbose=false")
    assert found["cli"].trainer.max_epochs == 3
    first, *others = found["seen"]
    assert first == (True, ["description"], {"test": {"exit_on_error": True}})
    made = [("before", "test"), "OwnNet", ("after", "Trainer")]
    assert others == ["init_parser", "init_parser", "defaults", "core", "parse", *made]


def test_a_parser_works_without_a_cli() -> None:
    from configured import OwnNet

    from leyden.callbacks import EarlyStopping
    from leyden.cli import LeydenArgumentParser

    parser = LeydenArgumentParser(description="mine", env_prefix="MINE", default_env=False)
    added = parser.add_lightning_class_args(OwnNet, "net")
    assert {"net.width", "net.rate"} <= set(added)
    parser.add_lightning_class_args(EarlyStopping, "stop")
    parser.add_optimizer_args(torch.optim.SGD, "optimizer", "AUTOMATIC")
    parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR, "scheduler")
    values = parser.parse_args(["--net.width=3", "--stop.monitor=loss", "--optimizer.lr=2", "--scheduler.step_size=5"])
    assert (values.net.width, values.optimizer.lr, values.scheduler.step_size) == (3, 2.0, 5)
    flat = LeydenArgumentParser()
    flat.add_lightning_class_args(OwnNet, None)
    assert flat.parse_args(["--width=5"]).width == 5
    with pytest.raises(ConfigurationError, match="is not a Trainer, TrainModule"):
        parser.add_lightning_class_args(dict, "other")


def test_the_page_cites_exactly_the_tests_in_this_file() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lightning-cli.md").read_text(encoding="utf-8")
    here = {name for name in globals() if name.startswith("test_")}
    assert set(re.findall(r"`(test_\w+)`", page)) == here - {"test_the_page_cites_exactly_the_tests_in_this_file"}
