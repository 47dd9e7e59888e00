"""Records of a run's start: what loggers write, and what is read from the git repository of the code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line

from leyden import Trainer
from leyden.callbacks import CSVLogger, Logger, ModelCheckpoint, TensorBoardLogger, Timer
from leyden.core.errors import ConfigurationError
from leyden.trainer.reporting import repository
from leyden.trainer.reporting.record import start_of
from leyden.trainer.reporting.repository import Repository

KEY = "hf_" + "a1b2c3d4" * 4


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=me", "-c", "user.email=me@host")
    ran = subprocess.run(["git", *identity, "-C", folder, *words], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a git repository with one commit, which holds the running script."""
    folder = tmp_path / "code"
    (folder / "conf").mkdir(parents=True)
    (folder / "train.py").write_bytes(b"lr = 0.1\r\nepochs = 3\r\n")
    (folder / "conf/model ä.yaml").write_text("width: 8\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False)
    return folder


def starts(folder: Path) -> list[tuple[dict[str, Any], str]]:
    found = []
    for path in sorted(folder.glob("starts/*")):
        patch = path / "diff.patch"
        text = patch.read_bytes().decode() if patch.exists() else ""
        found.append((json.loads((path / "run.json").read_text(encoding="utf-8")), text))
    return found


def fit(**given: Any) -> Trainer:
    ckpt_path = given.pop("ckpt_path", None)
    trainer = Trainer(**{**QUIET, "max_steps": 2, **given})
    trainer.fit(Line(), [torch.ones(2, 2)] * 4, ckpt_path=ckpt_path)
    return trainer


def test_applying_the_diff_to_the_commit_gives_the_code_that_ran(code: Path, tmp_path: Path) -> None:
    (code / "train.py").write_bytes(b"lr = 0.2\r\nepochs = 3\r\n")
    (code / "conf/model ä.yaml").unlink()
    (code / "new.py").write_text("staged = True\n")
    git(code, "add", "new.py")
    (code / "not added.py").write_text("x = 1\n")
    found = Repository.of(code / "conf")
    assert found is not None and found.diff is not None
    assert (found.commit, found.branch, found.dirty) == (git(code, "rev-parse", "HEAD"), "trunk", True)
    assert (found.untracked, found.left_out, found.masked) == (["not added.py"], [], 0)
    (tmp_path / "patch").write_bytes(found.diff.encode())
    git(tmp_path, "clone", "-q", "code", "again")
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert sorted(os.listdir(tmp_path / "again")) == [".git", "new.py", "train.py"]
    assert (tmp_path / "again/train.py").read_bytes() == (code / "train.py").read_bytes()


def test_the_diff_omits_secrets_and_large_or_binary_files(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "MOST_BYTES", 20_000)
    for name in (".env", "conf/secrets.yaml", "big.txt", "blob.bin", "ssh.txt", "latin.txt"):
        (code / name).write_text("\n")
    git(code, "add", ".")
    git(code, "commit", "-qm", "second")
    lines = [
        'os.environ["API_KEY"] = "word0"',
        'login(password="word1", name="me")',
        "password = (",
        '    "word2"',
        ")",
    ]
    quoted = ['API_KEY = "word8"', *(f"({number})" for number in range(8)), "(y)"]
    (code / "quoted.py").write_text("\n".join(quoted))
    git(code, "add", "quoted.py")
    git(code, "commit", "-qm", "third")
    (code / "quoted.py").write_text("\n".join([*quoted[:-1], "(z)"]))
    (code / "train.py").write_text("\n".join([*lines, f"url = 'https://me:word3@host'; {KEY}", "api_key = read(path)"]))
    (code / "conf/model ä.yaml").write_text("access_token: word4\nwidth: 8\n")
    (code / ".env").write_text("ANYTHING=word5\n")
    (code / "conf/secrets.yaml").write_text("it: word6\n")
    (code / "big.txt").write_text("number\n" * 1000)
    (code / "blob.bin").write_bytes(bytes(range(256)))
    (code / "ssh.txt").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nword7\n")
    (code / "latin.txt").write_bytes("größe\n".encode("latin-1"))
    withheld = Repository.of(code)
    assert withheld is not None and withheld.diff is None
    assert sorted(withheld.private) == [".env", "conf/secrets.yaml", "ssh.txt"]
    assert {"train.py", "big.txt", ".env"} < set(withheld.left_out)
    found = Repository.of(code, beside_secrets=True)
    assert found is not None and found.diff is not None and found.private == withheld.private
    assert "word" not in found.diff.replace("password", "") and KEY not in found.diff
    assert '+os.environ["API_KEY"] = "***"' in found.diff and "+api_key = read(path)" in found.diff
    assert sorted(found.left_out) == [".env", "big.txt", "blob.bin", "conf/secrets.yaml", "latin.txt", "ssh.txt"]
    assert found.masked == 5


def test_no_repository_is_found_if_none_exists_or_git_is_missing_or_hangs(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert Repository.of(tmp_path / "plain") is None
    assert Repository.of(tmp_path / "missing") is None
    program = tmp_path / "bin/git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setattr(repository, "SECONDS", 0.1)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert Repository.of(code) is None
    monkeypatch.setenv("PATH", str(tmp_path / "plain"))
    assert Repository.of(code) is None


def test_the_diff_of_a_repository_without_commits_has_the_staged_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "new.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    found = Repository.of(tmp_path)
    assert found is not None and found.diff is not None
    assert (found.commit, found.dirty) == (None, True)
    assert found.diff.endswith("@@ -0,0 +1 @@\n+x = 1\n")


def test_loggers_that_share_a_folder_record_each_start_once(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "train.py", "--api_key", "xyzzy", "--lr=0.1"])
    (code / "train.py").write_text("lr = 0.2\n")
    runs = tmp_path / "runs"
    loggers = [CSVLogger(runs), TensorBoardLogger(runs)]
    timer = Timer("00:01:00:00")
    checkpoint = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(logger=loggers, callbacks=[timer, checkpoint], enable_checkpointing=True)
    [(record, diff)] = starts(runs / "logs/version_0")
    assert record["command"].endswith("train.py --api_key '***' --lr=0.1") and "xyzzy" not in json.dumps(record)
    assert (record["step"], record["ckpt_path"], record["world_size"], record["device"]) == (0, None, 1, "cpu")
    resolved = {
        "accelerator": "cpu",
        "strategy": "single_device",
        "devices": 1,
        "precision": "32-true",
        "max_steps": 2,
        "max_epochs": -1,
        "log_every_n_steps": 50,
    }
    assert {name: record["arguments"][name] for name in resolved} == resolved
    assert record["arguments"]["callbacks"][0] == timer.state_key
    assert len(record["arguments"]["logger"]) == 2
    assert record["versions"]["torch"] == str(torch.__version__) and "numpy" in record["versions"]
    assert (record["git"]["commit"], record["git"]["branch"]) == (git(code, "rev-parse", "HEAD"), "trunk")
    assert "+lr = 0.2" in diff

    git(code, "commit", "-qam", "second")
    again = fit(logger=CSVLogger(runs), max_steps=4, ckpt_path=tmp_path / "saved/step=1", record_run="no_diff")
    [first, (record, diff)] = starts(runs / "logs/version_0")
    assert first[0]["step"] == 0 and (record["step"], diff) == (1, "")
    assert (record["ckpt_path"], record["git"]["dirty"]) == (str(tmp_path / "saved/step=1"), False)
    # Evaluations are not recorded; another fit is.
    again.predict(Line(), [torch.ones(2, 2)])
    again.fit(Line(), [torch.ones(2, 2)] * 4, max_steps=1)
    assert [(one["step"], one["arguments"]["max_steps"]) for one, _ in starts(runs / "logs/version_0")] == [
        *((0, 2), (1, 4)),
        (0, 1),
    ]


def test_git_is_not_called_unless_a_logger_records_the_run(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    called = tmp_path / "called"
    (tmp_path / "git").write_text(f"#!/bin/sh\necho called > {called}\n")
    (tmp_path / "git").chmod(0o755)

    class Silent(Logger):
        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None: ...

    fit(logger=Silent())
    fit(logger=CSVLogger(tmp_path / "off"), record_run=False)
    fit(logger=CSVLogger(tmp_path / "trial"), fast_dev_run=True)
    assert not called.exists() and not list(tmp_path.rglob("starts"))
    fit(logger=CSVLogger(tmp_path / "on"))
    assert called.exists()
    [(record, _)] = starts(tmp_path / "on/logs/version_0")
    assert record["git"] is None


def test_a_failure_to_record_warns(tmp_path: Path) -> None:
    class Broken(CSVLogger):
        def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
            raise OSError("no room")

    with pytest.warns(UserWarning, match="Broken could not record the start of the run: OSError: no room"):
        trainer = fit(logger=[Broken(tmp_path), CSVLogger(tmp_path, "second")])
    assert trainer.global_step == 2 and starts(tmp_path / "second/version_0")
    assert start_of(trainer._run)[0]["step"] == 2


def test_an_invalid_record_run_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"record_run='patch': use True, False, 'diff', or 'no_diff'"):
        Trainer(record_run="patch")  # type: ignore[arg-type]
