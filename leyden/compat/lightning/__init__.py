"""What exists because Lightning does: runs and states that it saved."""
