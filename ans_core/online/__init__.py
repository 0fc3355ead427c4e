"""Learning from answers that could be verified, while the agent answers: store, neighbours, votes,
verification, worker, engine."""
