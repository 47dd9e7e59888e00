"""The values of `self.log`: recording, reduction over batches and ranks, and read-back."""
