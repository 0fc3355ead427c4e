"""Rewards of an episode: the task's, and small ones for how it was solved, which never outweigh it. One file
and plain functions each."""
