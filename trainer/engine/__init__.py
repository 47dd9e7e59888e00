"""The engine that Trainer and Accelerator drive: prepared optimizers, accumulation windows, schedulers and gathering."""
