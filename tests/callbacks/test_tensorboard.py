"""TensorBoardLogger: event files, read back with TensorBoard."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from logged import events_in, scalars_in, set_up
from models import QUIET, Squares
from PIL import Image
from programs import run_program
from same import same_weights
from torch import Tensor, nn

from leyden.callbacks.loggers.tensorboard import TensorBoardLogger
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer


def read(logger: TensorBoardLogger) -> Any:
    return events_in(logger.log_dir)


def scalars(logger: TensorBoardLogger, name: str) -> list[tuple[int, float]]:
    return scalars_in(logger.log_dir)[name]


def in_trainer(root: Path, **arguments: Any) -> TensorBoardLogger:
    logger = TensorBoardLogger(**arguments)
    set_up(root, logger)
    return logger


def drawn(logger: TensorBoardLogger, tag: str) -> tuple[int, list[list[int]]]:
    """Returns an image's step and rows of pixels."""
    (event,) = read(logger).Images(tag)
    with Image.open(io.BytesIO(event.encoded_image_string)) as image:
        return event.step, np.asarray(image).reshape(image.height, -1).tolist()


def texts(logger: TensorBoardLogger, key: str) -> list[tuple[int, str]]:
    found = read(logger).Tensors(f"{key}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def test_images_of_every_kind_are_drawn(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="p")
    logger.log_metrics({"loss": 1.0}, 7)
    red = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 1, 2)
    Image.fromarray(np.array([[[255, 0, 0, 128]] * 2], dtype=np.uint8)).save(tmp_path / "red.png")
    images = [
        red.bfloat16().requires_grad_(),
        (red * 255).long(),
        (red * 255).byte().permute(1, 2, 0).numpy(),
        Image.new("P", (2, 1), 0),
        tmp_path / "red.png",
        torch.tensor([[True, False]]),
        np.array([[0.0, 1.0]]),
    ]
    for index, image in enumerate(images):
        logger.log_image(f"seen/{index}", [image])
    logger.log_image("all", images, caption=list("abcdefg"))
    logger.log_image("batch", torch.stack([red, red]), step=9)  # type: ignore[arg-type]
    logger.log_image("turned", [red.numpy()], step=9, dataformats="CHW")
    logger.save()
    for index in range(3):
        assert drawn(logger, f"p-seen/{index}") == (7, [[255, 0, 0] * 2])
    assert drawn(logger, "p-seen/3") == (7, [[0, 0, 0] * 2])
    assert drawn(logger, "p-seen/4") == (7, [[255, 0, 0, 128] * 2])
    assert drawn(logger, "p-seen/5") == (7, [[255] * 3 + [0] * 3])
    assert drawn(logger, "p-seen/6") == (7, [[0] * 3 + [255] * 3])
    assert drawn(logger, "p-turned") == (9, [[255, 0, 0] * 2])
    assert drawn(logger, "p-batch") == (9, [[255, 0, 0] * 2 + [0, 0, 0] * 2 + [255, 0, 0] * 2])
    # Three images in a row, with two black pixels between them; one of them is transparent.
    step, rows = drawn(logger, "p-all")
    clear, opaque, white = [0, 0, 0, 0], [255, 0, 0, 255], [255] * 4
    assert step == 7 and len(rows) == 3 + 2 * 2
    assert rows[0] == (opaque * 2 + clear * 2) * 2 + opaque * 2 and rows[1] == clear * 10
    assert rows[3] == [0, 0, 0, 255] * 2 + clear * 2 + [255, 0, 0, 128] * 2 + clear * 2 + white + [0, 0, 0, 255]
    assert rows[6] == [0, 0, 0, 255] + white + clear * 8
    ((step, captions),) = texts(logger, "p-all/caption")
    assert step == 7 and captions.splitlines()[:3] == ["| image | caption |", "| --- | --- |", "| 0 | a |"]
    for bad, message in [
        ({"masks": [{}]}, "TensorBoard images do not support masks"),
        ({"caption": "a"}, "Pass a list with one caption per image, 1 in total"),
        ({"caption": []}, "got 1 images but 0 values for caption"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            logger.log_image("seen", [red], **bad)
    with pytest.raises(ConfigurationError, match=r"log_image takes a list"):
        logger.log_image("seen", red)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"of shape \(3,\)"):
        logger.log_image("seen", [torch.ones(3)])


def test_texts_and_tables_are_written_as_markdown(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_text("note", "a *text* | alone", step=3)
    logger.log_table("table", ["in", "out"], [["a|b", 1], ["two\nlines", None]])
    logger.log_text("plain", data=[["x"]], step=4)
    logger.log_table("empty", ["in"], [], step=4)
    frame: Any = SimpleNamespace(columns=["n", "x"], itertuples=lambda index: [(1, 0.5), (2, 1.5)])
    logger.log_table("frame", dataframe=frame, step=5)
    logger.save()
    assert texts(logger, "note") == [(3, "a *text* | alone")]
    assert texts(logger, "table") == [(0, "| in | out |\n| --- | --- |\n| a\\|b | 1 |\n| two<br>lines | None |")]
    assert texts(logger, "plain") == [(4, "|  |\n| --- |\n| x |")]
    assert texts(logger, "empty") == [(4, "| in |\n| --- |")]
    assert texts(logger, "frame") == [(5, "| n | x |\n| --- | --- |\n| 1 | 0.5 |\n| 2 | 1.5 |")]
    with pytest.raises(ConfigurationError, match=r"columns='in' must be a list for a table. Use columns=\['in'\]"):
        logger.log_table("table", "in", [["a"]])


def test_figures_are_drawn_and_closed(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    logger, figure = TensorBoardLogger(tmp_path), pyplot.figure(figsize=(1, 1))
    logger.log_figure("kept", figure, step=2, close=False)
    assert pyplot.fignum_exists(figure.number)
    logger.log_figure("figure", figure, step=3)
    assert not pyplot.fignum_exists(figure.number)
    logger.save()
    assert drawn(logger, "figure")[0] == 3


def test_scalars_are_written_with_their_steps_and_prefix(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="mine", prefix="p")
    for step in (10, 20):
        logger.log_metrics({"loss": 1 / step, "bad": float("nan"), "huge": float("inf")}, step)
    logger.save()
    assert logger.log_dir == str(tmp_path / "mine" / "version_0")
    assert scalars(logger, "p-loss") == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]
    assert all(math.isnan(value) for _, value in scalars(logger, "p-bad"))
    assert [value for _, value in scalars(logger, "p-huge")] == [float("inf")] * 2
    logger.finalize("success")


def test_values_can_be_logged_after_finalize(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    logger.finalize("success")
    logger.log_metrics({"a": 2.0}, 2)
    logger.finalize("success")
    assert scalars(logger, "a") == [(1, 1.0), (2, 2.0)]


def test_a_resume_removes_values_logged_after_the_checkpoint(tmp_path: Path) -> None:
    first = in_trainer(tmp_path)
    first.log_metrics({"loss": 1.0}, 1)
    first.log_metrics({"loss": 2.0}, 2)
    state = first.state_dict()
    first.save()
    first.log_metrics({"loss": 3.0}, 3)
    first.log_metrics({"loss": 4.0}, 4)
    first.finalize("failed")
    second = in_trainer(tmp_path)
    second.load_state_dict(state)
    second.log_metrics({"loss": 30.0}, 3)
    second.finalize("success")
    assert second.log_dir == first.log_dir
    assert scalars(second, "loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_resume_keeps_other_writers_files_and_truncates_by_write_order(tmp_path: Path) -> None:
    """A file opened after the checkpoint is removed; a higher step logged before it and another writer's file stay."""
    from torch.utils.tensorboard import SummaryWriter

    logger = in_trainer(tmp_path)
    logger.log_metrics({"val": 7.0}, 70)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    state = logger.state_dict()
    logger.log_metrics({"val": 8.0}, 80)
    logger.finalize("success")
    assert logger.log_dir is not None
    others = SummaryWriter(logger.log_dir)
    others.add_scalar("others", 5.0, 90)
    others.close()
    second = in_trainer(tmp_path)
    second.load_state_dict(state)
    second.log_metrics({"val": 9.0}, 80)
    second.finalize("success")
    assert scalars(second, "val") == [(70, 7.0), (80, 9.0)]
    assert scalars(second, "loss") == [(1, 1.0)]
    assert scalars(second, "others") == [(90, 5.0)]


def test_a_resume_from_a_later_checkpoint_works_after_one_from_an_earlier(tmp_path: Path) -> None:
    """The file is shorter than in the later checkpoint. It is not padded, and the removed part stays in the backup."""
    logger = in_trainer(tmp_path)
    states = {}
    for step in (1, 2, 3):
        logger.log_metrics({"loss": float(step)}, step)
        states[step] = logger.state_dict()
    logger.finalize("success")
    for step, value in ((1, 10.0), (3, 30.0)):
        again = in_trainer(tmp_path)
        again.load_state_dict(states[step])
        again.log_metrics({"loss": value}, step + 1)
        again.finalize("success")
    assert scalars(again, "loss") == [(1, 1.0), (4, 30.0)]
    assert again.log_dir is not None
    assert len([path for path in Path(again.log_dir).iterdir() if path.name.startswith("replaced.")]) == 2


@pytest.mark.parametrize("behind", [3600.0, 0.4])
def test_a_resume_by_a_clock_that_is_behind_adds_events_after_the_earlier_ones(
    tmp_path: Path, behind: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, offset = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: clock() + offset)
    logger, states = in_trainer(tmp_path), []
    for step in (1, 2, 3, 4):
        logger.log_metrics({"loss": float(step)}, step)
        logger.finalize("interrupted")
        states.append(logger.state_dict())
        # Each start has a clock that is further behind.
        offset -= behind
        logger = in_trainer(tmp_path)
        logger.load_state_dict(states[-1])
    logger.experiment.add_text("note", "late")
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    assert [event.step for event in read(logger).Scalars("loss")] == [1, 2, 3, 4]
    times = [event.wall_time for event in read(logger).Scalars("loss")]
    assert times == sorted(times)
    names = [path.name for path in logger._event_files()]
    assert len(names) == 5 and all(str(path.stat().st_size) != "0" for path in logger._event_files())
    assert read(logger).Tensors("note/text_summary")


def test_a_resume_leaves_other_runs_in_the_folder_alone(tmp_path: Path) -> None:
    def make_logger() -> TensorBoardLogger:
        return TensorBoardLogger(tmp_path, version="exp")

    first, second = make_logger(), make_logger()
    first.log_metrics({"a": 1.0}, 1)
    state = first.state_dict()
    first.finalize("success")
    second.log_metrics({"b": 2.0}, 1)
    second.finalize("success")
    again = make_logger()
    again.load_state_dict(state)
    again.log_metrics({"a": 3.0}, 2)
    again.finalize("success")
    assert scalars(again, "a") == [(1, 1.0), (2, 3.0)]
    assert scalars(again, "b") == [(1, 2.0)]


# For n = 0, 1, … a forked child resumes and dies by SIGKILL at its n-th call to the file system; then the parent
# resumes undisturbed. Children are forked so that TensorBoard is imported only once.
KILLED_DURING_RESUME = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tensorboard import TensorBoardLogger, scalars

CALLS = {"open", "write", "flush", "fsync", "__exit__", "link", "replace", "rename", "unlink", "truncate"}
CALLS |= {"listdir", "scandir"}

def die_at(count):
    left = [count]
    def before(frame, event, function):
        left[0] -= event == "c_call" and function.__name__ in CALLS
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(before)

os.chdir(sys.argv[1])
logger = TensorBoardLogger("whole")
for step in (1, 2):
    logger.log_metrics({"loss": float(step)}, step)
state = logger.state_dict()
logger.log_metrics({"loss": 3.0}, 3)
logger.finalize("failed")
del logger

for count in range(1000):
    shutil.copytree("whole", "run")
    pid = os.fork()
    if pid == 0:
        os.rename("whole", f"whole-{count}"), os.rename("run", "whole")
        killed = TensorBoardLogger("whole")
        die_at(count)
        killed.load_state_dict(state)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    again = TensorBoardLogger("whole")
    again.load_state_dict(state)
    assert again.version == 0
    assert scalars(again, "loss") == [(1, 1.0), (2, 2.0)], (count, scalars(again, "loss"))
    assert not [name for name in os.listdir(again.log_dir) if name.startswith(".")], os.listdir(again.log_dir)
    shutil.rmtree("whole"), os.rename(f"whole-{count}", "whole")
    if os.WIFEXITED(status):
        break
print(count)
"""


def test_a_kill_at_any_moment_of_a_resume_loses_no_value(tmp_path: Path) -> None:
    done = run_program(["-c", KILLED_DURING_RESUME, tmp_path, Path(__file__).parent])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_a_resume_logs_equal_hyperparameters_once(tmp_path: Path) -> None:
    first = in_trainer(tmp_path)
    first.log_hyperparams({"lr": 0.1})
    first.log_metrics({"loss": 1.0}, 1)
    state = first.state_dict()
    first.finalize("failed")
    second = in_trainer(tmp_path)
    second.load_state_dict(state)
    second.log_hyperparams({"lr": 0.1})
    second.log_metrics({"loss": 2.0}, 2)
    second.finalize("success")
    assert scalars(second, "hp_metric") == [(0, -1.0)]
    third = in_trainer(tmp_path)
    third.load_state_dict(state)
    third.log_hyperparams({"lr": 0.2})
    third.finalize("success")
    assert scalars(third, "hp_metric") == [(0, -1.0), (1, -1.0)]


def test_a_state_without_event_files_still_loads(tmp_path: Path) -> None:
    logger = in_trainer(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    state = logger.state_dict()
    logger.finalize("success")
    del state["event_files"], state["mark"]
    again = in_trainer(tmp_path)
    again.load_state_dict(state)
    again.log_metrics({"loss": 2.0}, 2)
    again.finalize("success")
    assert scalars(again, "loss") == [(1, 1.0), (2, 2.0)]


def test_an_open_logger_can_return_to_a_checkpoint(tmp_path: Path) -> None:
    logger = in_trainer(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    state = logger.state_dict()
    logger.log_metrics({"loss": 2.0}, 2)
    logger.load_state_dict(state)
    logger.log_metrics({"loss": 20.0}, 2)
    logger.finalize("success")
    assert scalars(logger, "loss") == [(1, 1.0), (2, 20.0)]


def test_hyperparameters_and_their_metrics_are_written(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"optim": {"lr": 0.1}, "layers": [1, 2], "name": None}, {"val_loss": 0.5})
    logger.finalize("success")
    assert scalars(logger, "val_loss") == [(0, 0.5)]
    summary = read(logger).summary_metadata["_hparams_/session_start_info"]
    data = plugin_data_pb2.HParamsPluginData.FromString(summary.plugin_data.content)
    found = data.session_start_info.hparams
    assert found["optim/lr"].number_value == 0.1
    assert found["layers"].string_value == "[1, 2]"
    assert found["name"].string_value == "None"


@pytest.mark.parametrize("default", [True, False])
def test_default_hp_metric_writes_hp_metric(tmp_path: Path, default: bool) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=default)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"x": 1.0}, 1)
    logger.finalize("success")
    assert ("hp_metric" in read(logger).Tags()["scalars"]) is default


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.layers[1].eval()
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*weights_only.*")
def test_logging_the_graph_has_no_side_effects(tmp_path: Path) -> None:
    net = Net()
    before = copy.deepcopy(net)
    random_numbers = torch.get_rng_state()
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    trainer: Any = SimpleNamespace(world_size=1, strategy=SimpleNamespace(replicates=True))
    logger.on_fit_start(trainer, net)  # type: ignore[arg-type]
    logger.finalize("success")
    assert read(logger).Tags()["graph"] is True
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert same_weights(net, before)
    assert [net.training, net.layers[1].training, net.layers[2].training] == [True, False, True]


class Trained(Squares):
    def __init__(self) -> None:
        super().__init__(Net())
        self.example_input_array = torch.ones(2, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*weights_only.*")
def test_a_fit_logs_the_graph_and_trains_to_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for log_graph in (True, False):
        torch.manual_seed(0)
        module, logger = Trained(), TensorBoardLogger(tmp_path, log_graph=log_graph)
        trainer = Trainer(**{**QUIET, "logger": logger}, max_epochs=2, default_root_dir=tmp_path)
        trainer.fit(module, [torch.rand(5, 4)] * 3)
        assert read(logger).Tags()["graph"] is log_graph
        weights.append(torch.cat([value.flatten().float() for value in module.state_dict().values()]))
    assert torch.equal(weights[0], weights[1])


def test_no_graph_is_written_by_default(tmp_path: Path) -> None:
    TensorBoardLogger(tmp_path).log_graph(Net())
    assert list(tmp_path.iterdir()) == []


def test_log_graph_without_an_example_input_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="needs module.example_input_array"):
        TensorBoardLogger(tmp_path, log_graph=True).log_graph(nn.Linear(1, 1))


def test_sub_dir_and_summary_writer_arguments_are_passed_on(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, sub_dir="train", filename_suffix=".mine", max_queue=1)
    logger.experiment.add_text("note", "hello")  # type: ignore[no-untyped-call]
    logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "logs" / "version_0" / "train")
    files = [entry.name for entry in Path(logger.log_dir).iterdir()]
    assert [name.endswith(".mine") for name in files] == [True]
    with pytest.raises(ConfigurationError, match="save_dir, name and version"):
        TensorBoardLogger(tmp_path, log_dir="x")


def test_tensorboard_is_imported_at_the_first_write(tmp_path: Path) -> None:
    code = (
        "import sys; from leyden.callbacks import TensorBoardLogger as L; l = L(sys.argv[1]); l.log_dir;"
        "assert 'tensorboard' not in sys.modules; l.log_metrics({'a': 1.0}, 1); l.finalize('success');"
        "assert 'tensorboard' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_open_logger_pickles_and_its_copy_continues_writing(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"x": 1.0}, step=1)
    for other in (pickle.loads(pickle.dumps(logger)), copy.deepcopy(logger)):
        assert other.log_dir == logger.log_dir
        other.log_metrics({"x": 2.0}, step=2)
        other.finalize("success")
    logger.log_metrics({"x": 3.0}, step=3)
    logger.finalize("success")
    assert sorted(step for step, _ in scalars(logger, "x")) == [1, 2, 2, 3]


def test_a_graph_can_be_logged_outside_a_run(tmp_path: Path) -> None:
    class Inner(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.log("seen", 1.0)
            return self.layer(x)  # type: ignore[no-any-return]

    class Outer(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.example_input_array = Inner(), torch.ones(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    module, logger = Outer(), TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(module)
    logger.finalize("success")
    assert any("inner" in node.name for node in read(logger).Graph().node)
    with pytest.raises(LeydenError, match="not attached"):
        _ = module.trainer
