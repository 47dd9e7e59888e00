"""XLA: the strategies for TPUs and other XLA devices, one process for all of them or one for each."""
