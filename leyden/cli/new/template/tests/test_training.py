"""A batch can be learned by heart, and the configuration trains."""

from pathlib import Path

from leyden import LeydenCLI, Trainer

from project_name.data import Digits
from project_name.module import Classifier

CONFIG = Path(__file__).parents[1] / "config.yaml"


def test_a_batch_is_learned_by_heart(tmp_path: Path) -> None:
    """If not, the loss, the gradients or the optimizer are wrong."""
    data = Digits()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(Classifier(dropout=0), [batch] * 50)
    assert trainer.callback_metrics["train_loss"] < 0.05


def test_the_configuration_trains(tmp_path: Path) -> None:
    options = ["--trainer.max_epochs=3", f"--trainer.default_root_dir={tmp_path}"]
    cli = LeydenCLI(run=False, args=["--config", str(CONFIG), *options])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.callback_metrics["val_acc"] > 0.9
