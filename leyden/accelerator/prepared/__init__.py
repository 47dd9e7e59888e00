"""What `Accelerator.prepare` returns: models, optimizers, loaders and schedulers of this rank."""
