"""Public benchmarks: scored from files, whoever made the predictions, and asked of a model. A file each,
listed in registry.py."""
