"""`leyden migrate`: the names it rewrites, those it reports, and that a migrated script runs."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from leyden.compat.migrate.names import OF_FABRIC, TARGETS, WHY, lookup
from leyden.compat.migrate.script import Script, migrated

# The public names of Lightning 2.6, by module.
PUBLIC = {
    "": "Trainer LightningDataModule LightningModule Callback seed_everything __version__",
    "callbacks": (
        "BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint DeviceStatsMonitor "
        "EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateFinder LearningRateMonitor "
        "ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar "
        "StochasticWeightAveraging SpikeDetection ThroughputMonitor Timer TQDMProgressBar EMAWeightAveraging "
        "WeightAveraging"
    ),
    "loggers": "LitLogger CometLogger CSVLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
    "strategies": (
        "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy "
        "Strategy"
    ),
    "profilers": "Profiler AdvancedProfiler PassThroughProfiler PyTorchProfiler SimpleProfiler XLAProfiler",
    "plugins": (
        "AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO BitsandbytesPrecision DeepSpeedPrecision "
        "DoublePrecision HalfPrecision MixedPrecision Precision TransformerEnginePrecision FSDPPrecision XLAPrecision "
        "LayerSync TorchSyncBatchNorm"
    ),
    "plugins.environments": (
        "ClusterEnvironment KubeflowEnvironment LightningEnvironment LSFEnvironment MPIEnvironment SLURMEnvironment "
        "TorchElasticEnvironment XLAEnvironment"
    ),
    "accelerators": "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator find_usable_cuda_devices",
    "tuner": "Tuner",
    "cli": (
        "LightningCLI LightningArgumentParser SaveConfigCallback instantiate_class ReduceLROnPlateau ArgsType "
        "OptimizerCallable LRSchedulerCallable LRSchedulerTypeTuple LRSchedulerTypeUnion"
    ),
    "utilities": (
        "AttributeDict CombinedLoader grad_norm measure_flops move_data_to_device rank_zero_deprecation rank_zero_info "
        "rank_zero_only rank_zero_warn"
    ),
    "utilities.types": "STEP_OUTPUT TRAIN_DATALOADERS EVAL_DATALOADERS OptimizerLRScheduler",
    "utilities.exceptions": "MisconfigurationException SIGTERMException",
}


def migrate(source: str, **arguments: Any) -> str:
    """Returns the migrated source, and checks that a second migration changes nothing."""
    script = Script(source, **arguments)
    after = migrated(source, script.edits)
    again = Script(after, **arguments)
    assert again.edits == []
    return after


@pytest.mark.parametrize("path", sorted(set(TARGETS.values())))
def test_every_migration_target_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    if module == "leyden.cli" or name == "LeydenCLI":
        pytest.importorskip("jsonargparse")
    assert getattr(importlib.import_module(module), name) is not None


def test_every_public_name_of_lightning_has_a_target_or_a_reason() -> None:
    for module, names in PUBLIC.items():
        for name in names.split():
            assert (name in TARGETS) is not (name in WHY), name
            found = lookup(".".join(filter(None, ("lightning.pytorch", module, name))))
            assert found.target == TARGETS.get(name)
            assert found.why == WHY.get(name, "")


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("lightning.LightningModule", "leyden.TrainModule"),
        ("lightning.pytorch.core.module.LightningModule", "leyden.TrainModule"),
        ("pytorch_lightning.callbacks.early_stopping.EarlyStopping", "leyden.callbacks.EarlyStopping"),
        ("pytorch_lightning.utilities.seed.seed_everything", "leyden.seed_everything"),
        ("lightning.fabric.utilities.throughput.measure_flops", "leyden.callbacks.measure_flops"),
        ("lightning.fabric.strategies.FSDPStrategy", None),
        ("lightning.pytorch.utilities.model_summary.ModelSummary", None),
        ("lightning.pytorch.core.saving.save_hparams_to_yaml", None),
        ("lightning.pytorch.demos.boring_classes.BoringModel", None),
        ("lightning.data.StreamingDataset", None),
        ("accelerate.utils.set_seed", "leyden.utils.set_seed"),
        ("accelerate.utils.dataclasses.ProjectConfiguration", "leyden.utils.dataclasses.ProjectConfiguration"),
        ("accelerate.utils.fsdp_utils.FullyShardedDataParallelPlugin", "leyden.utils.FullyShardedDataParallelPlugin"),
        ("accelerate.utils.is_wandb_available", "leyden.utils.is_wandb_available"),
        ("accelerate.test_utils.training", None),
        ("accelerate.test_utils.testing.torch_device", None),
        ("accelerate.dispatch_model", None),
    ],
)
def test_lookup_finds_a_counterpart_or_a_reason(path: str, target: str | None) -> None:
    found = lookup(path)
    assert found.target == target
    assert (found.why == "") is (target is not None)
    assert not found.why.endswith(": "), "the reason names what to do"


def test_modules_with_similar_names_are_not_rewritten() -> None:
    assert "Callback" not in OF_FABRIC
    assert migrate("import torch\nimport lightning_tools as lt\nfrom . import lightning\nlt.Trainer()\n") == (
        "import torch\nimport lightning_tools as lt\nfrom . import lightning\nlt.Trainer()\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import lightning as L\nL.Trainer()\n", "import leyden as L\nL.Trainer()\n"),
        ("import pytorch_lightning as pl\npl.loggers.CSVLogger\n", "import leyden as pl\npl.callbacks.CSVLogger\n"),
        ("import lightning\nlightning.pytorch.Trainer\n", "import leyden\nleyden.Trainer\n"),
        ("import lightning.pytorch as pl; x = pl.Trainer\n", "import leyden as pl; x = pl.Trainer\n"),
        ("from lightning import pytorch as pl\npl.Trainer\n", "import leyden as pl\npl.Trainer\n"),
        (
            "import pytorch_lightning as pl\npl.profilers.SimpleProfiler()\n",
            "import leyden.trainer.profilers\nimport leyden as pl\npl.trainer.profilers.SimpleProfiler()\n",
        ),
        (
            "import lightning.pytorch.callbacks\nlightning.pytorch.callbacks.Timer\n",
            "import leyden.callbacks\nleyden.callbacks.Timer\n",
        ),
        (
            "from lightning.pytorch import loggers\nloggers.CSVLogger\n",
            "from leyden import callbacks as loggers\nloggers.CSVLogger\n",
        ),
        (
            "from lightning.pytorch.utilities import seed\nseed.seed_everything(1)\n",
            "import leyden\nleyden.seed_everything(1)\n",
        ),
        (
            "from lightning import LightningModule as LM, LightningDataModule\nclass D(LightningDataModule): m: LM\n",
            "from leyden import TrainModule as LM, DataModule\nclass D(DataModule): m: LM\n",
        ),
        (  # the script defines its own DataModule
            "from lightning import LightningDataModule\nclass DataModule(LightningDataModule): ...\n",
            "from leyden import DataModule as LightningDataModule\nclass DataModule(LightningDataModule): ...\n",
        ),
        (  # other modules may import the name from here
            "from lightning import LightningModule\n__all__ = ['LightningModule']\n",
            "from leyden import TrainModule as LightningModule\n__all__ = ['LightningModule']\n",
        ),
        (  # Fabric has no counterpart, so both modules are imported
            "import lightning as L\nL.Fabric()\nL.Trainer()\n",
            "import leyden\nimport lightning as L\nL.Fabric()\nleyden.Trainer()\n",
        ),
        (
            "def f():\n    from lightning.pytorch.callbacks import Timer, XLAStatsMonitor\n    return Timer\n",
            "def f():\n    from leyden.callbacks import Timer\n"
            "    from lightning.pytorch.callbacks import XLAStatsMonitor\n    return Timer\n",
        ),
        (
            "from lightning.pytorch.callbacks import (\n    XLAStatsMonitor,  # one\n    Timer,\n    Checkpoint\n)\n",
            "from leyden.callbacks import Timer\n"
            "from lightning.pytorch.callbacks import (\n    XLAStatsMonitor,  # one\n    Checkpoint\n)\n",
        ),
        (
            "from lightning.pytorch.callbacks import (  # these\n    EarlyStopping,  # stops\n    Timer,\n)\n",
            "from leyden.callbacks import (  # these\n    EarlyStopping,  # stops\n    Timer,\n)\n",
        ),
        (
            "if True: from lightning.pytorch.cli import LightningCLI, SaveConfigCallback\nLightningCLI()\n",
            "if True: from leyden.cli import SaveConfigCallback; from leyden import LeydenCLI\nLeydenCLI()\n",
        ),
        (
            "try:\n    import lightning.pytorch as pl\nexcept ImportError:\n    pl = None\npl.LightningModule\n",
            "try:\n    import leyden as pl\nexcept ImportError:\n    pl = None\npl.TrainModule\n",
        ),
        (
            "try:\n    import lightning.pytorch as pl\nexcept: \n    import pytorch_lightning as pl\npl.Trainer\n",
            "try:\n    import leyden as pl\nexcept: \n    import leyden as pl\npl.Trainer\n",
        ),
        (
            "import lightning as L\r\n# é\r\nx = 'é', L.LightningModule\r\n",
            "import leyden as L\r\n# é\r\nx = 'é', L.TrainModule\r\n",
        ),
        (
            "import lightning as L\ndef f(m: 'L.LightningModule', n: \"list['L.Trainer']\"): ...\n",
            "import leyden as L\ndef f(m: 'L.TrainModule', n: \"list['L.Trainer']\"): ...\n",
        ),
        (
            "import accelerate\naccelerate.utils.set_seed(0)\na = accelerate.Accelerator()\n",
            "import leyden\nleyden.utils.set_seed(0)\na = leyden.Accelerator()\n",
        ),
        (
            "from accelerate.logging import get_logger\nfrom accelerate.utils import tqdm\n",
            "from leyden.logging import get_logger\nfrom leyden.utils import tqdm\n",
        ),
    ],
)
def test_imports_and_names_are_rewritten(before: str, after: str) -> None:
    assert migrate(before) == after


def test_names_bound_by_the_script_are_not_rewritten() -> None:
    source = (
        "import lightning as L\nfrom lightning import LightningModule\n"
        "def f(L, LightningModule): return L.LightningModule, LightningModule\n"
        "def g():\n    L = f\n    return [L.Trainer for L in L.pl], (lambda L: L.LightningModule)\n"
        "class A:\n    LightningModule = 1\n    x = LightningModule\n    def h(self): return LightningModule\n"
        "text = 'LightningModule'  # LightningModule\n"
    )
    after = migrate(source)
    assert after == source.replace("import lightning", "import leyden").replace(
        "from lightning import LightningModule", "from leyden import TrainModule"
    ).replace("h(self): return LightningModule", "h(self): return TrainModule")


def test_a_package_keeps_its_exported_names() -> None:
    assert migrate("from lightning import LightningModule\n", exports=True) == (
        "from leyden import TrainModule as LightningModule\n"
    )


def test_remaining_names_are_reported_with_line_and_replacement() -> None:
    source = (
        "import lightning as L\nfrom lightning.pytorch.callbacks import XLAStatsMonitor\n"
        "from lightning.pytorch import *\n"
        "class Net(L.LightningModule):\n    def validation_epoch_end(self, outputs): ...\n"
        "trainer = L.Trainer()\ntrainer.test(datamodule=1)\ntrainer.test(Net())\nL.Trainer.from_argparse_args(1)\n"
        "patch('pytorch_lightning.Trainer')\nL.pytorch.utilities.move_data_to_device(f)\nL = 3\n"
    )
    left = {one.line: str(one) for one in Script(source).left}
    words = {
        1: "something else",
        2: "no counterpart",
        3: "write out",
        5: "on_validation_epoch_end",
        7: "ckpt_path='best'",
    }
    words |= {9: "leyden.LeydenCLI", 10: "leyden.Trainer"}
    assert left.keys() == words.keys()
    assert all(word in left[line] for line, word in words.items())
    (one,) = Script("import lightning as L\nL.pytorch.utilities.move_data_to_device(f)\n").left
    assert (one.line, one.name) == (2, "L.pytorch.utilities.move_data_to_device")
    assert "leyden.utils.send_to_device" in one.why


SCRIPT = '''\
"""Trains a line."""
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.utilities.seed import seed_everything
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = (self.line(x) - 2 * x).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=4)


seed_everything(0)
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, log_every_n_steps=1,
                     callbacks=[EarlyStopping("loss", check_on_train_epoch_end=True), ModelCheckpoint(dirpath="kept")])
trainer.fit(Net(), datamodule=Data())
'''


def test_a_migrated_lightning_script_trains(tmp_path: Path, invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    assert invoke("migrate", "--check", script).returncode == 1
    assert script.read_text() == SCRIPT
    done = invoke("migrate", "--write", script)
    assert (done.returncode, done.stdout) == (0, f"{script}\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert os.listdir(tmp_path) == ["train.py"]
    assert invoke("migrate", "--check", script).returncode == 0
    monkeypatch.chdir(tmp_path)
    trainer = runpy.run_path(str(script))["trainer"]
    assert (type(trainer).__module__, trainer.global_step) == ("leyden.trainer.trainer", 4)
    assert (tmp_path / "kept").is_dir()


def test_a_folder_is_migrated_despite_a_file_with_a_syntax_error(tmp_path: Path, invoke: Any) -> None:
    for name in ("b.py", "pkg/__init__.py", ".hidden/c.py", "venv/lib/d.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import lightning as L\n")
    (tmp_path / "venv/pyvenv.cfg").touch()
    (tmp_path / "a.py").write_text("import lightning as L\ndef f(:\n")
    (tmp_path / "c.yaml").write_text(
        "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.Timer\n"
        "    init_args: {duration: '1'}\n  - class_path: lightning.pytorch.callbacks.XLAStatsMonitor\n"
    )
    done = invoke("migrate", tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path / 'a.py'}:2: not valid Python" in done.stderr
    assert f"{tmp_path / 'c.yaml'}:5: lightning.pytorch.callbacks.XLAStatsMonitor" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("+++")] == [
        f"+++ {tmp_path / name}" for name in ("b.py", "c.yaml", "pkg/__init__.py")
    ]
    assert "+  - class_path: leyden.callbacks.Timer" in done.stdout
    assert (tmp_path / "b.py").read_text() == "import lightning as L\n"
    assert "No such file" in invoke("migrate", tmp_path / "none.py").stderr


def test_a_notebook_is_migrated_cell_by_cell(tmp_path: Path, invoke: Any) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["import lightning as L"]},
        {"cell_type": "code", "metadata": {}, "source": ["%pip install lightning\n", "import lightning as L\n", "L?"]},
        {"cell_type": "code", "metadata": {}, "source": ["%%bash\n", "import lightning as L"]},
        {"cell_type": "code", "metadata": {}, "source": ["x = '%s' \\\n", "  % L.LightningModule\n", "L.Fabric()"]},
        {"cell_type": "code", "metadata": {}, "source": ["def f(:"]},
    ]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1, ensure_ascii=False) + "\n")
    done = invoke("migrate", "--write", path)
    assert f"{path}:cell 3:3: L.Fabric" in done.stderr
    assert f"{path}:cell 4:1: cell: not valid Python" in done.stderr
    after = json.loads(path.read_text())
    assert after["cells"][1]["source"] == [
        "%pip install lightning\n",
        "import leyden\n",
        "import lightning as L\n",
        "L?",
    ]
    assert after["cells"][3]["source"] == ["x = '%s' \\\n", "  % leyden.TrainModule\n", "L.Fabric()"]
    assert [after["cells"][place] == cells[place] for place in (0, 2, 4)] == [True] * 3
    assert json.dumps(after, indent=1, ensure_ascii=False) + "\n" == path.read_text()


def test_a_missing_libcst_names_the_extra(tmp_path: Path, invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("migrate", "script"):
        monkeypatch.delitem(sys.modules, f"leyden.compat.migrate.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "libcst", None)
    done = invoke("migrate", tmp_path)
    assert done.returncode == 2
    assert "leyden[migrate]" in done.stderr
