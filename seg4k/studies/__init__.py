"""Many runs and one verdict: sweeps, Pareto front, parity."""
