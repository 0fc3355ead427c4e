"""What dvc.yaml calls: one module per stage, each wrapping one function of ans_core.stages. No Prefect and no DVC in here."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(f"ans: {sys.executable} lacks the project's packages: `source .venv/bin/activate` first (`make setup` makes .venv)")
