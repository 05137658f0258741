"""What to recompute: segments, plans, modes, application and guards."""
