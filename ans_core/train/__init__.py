"""Training: the loop, its states on disk, optimizers, sharding, and what is watched meanwhile."""
