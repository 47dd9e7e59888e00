"""The engine behind Trainer and Accelerator: prepared optimizers, windows, schedulers and gathering."""
