"""The data: scikit-learn's handwritten digits."""

import torch
from leyden import DataModule
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(DataModule):
    """1,797 images of 8 × 8 pixels; 300 each are kept for validation and test.

    Args:
        batch_size: images in a batch.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, digits = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32) / 16  # (N, 64), from 0 to 1
        data = TensorDataset(images.view(-1, 1, 8, 8), torch.tensor(digits))
        # The split has its own seed, so that every run evaluates on the same images.
        split = torch.Generator().manual_seed(0)
        self.train, self.val, self.test = random_split(data, [1197, 300, 300], split)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)
