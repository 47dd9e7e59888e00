"""What is saved of a run, and how a run goes on from it: to resume, to roll back, or from Lightning."""
