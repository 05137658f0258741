"""What a run costs: the measured ledger, the trace that needs no GPU, and the planner."""
