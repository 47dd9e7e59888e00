"""The engine that Trainer and Accelerator drive: prepared optimizers, windows, schedulers and gathering."""
