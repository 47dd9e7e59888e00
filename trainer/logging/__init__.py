"""What `self.log` records, how it is reduced over batches and ranks, and the rows that loggers are given."""
