"""The loop: Trainer, TrainModule, DataModule and what they are made of."""
