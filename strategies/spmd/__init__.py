"""How XLA lays one process's tensors over several devices."""
