#!/bin/sh
# Makes .venv with the locked dependencies and the checkout itself (editable). Idempotent; `make` calls it when the lock or pyproject.toml changed.
# `./setup.sh pipeline` leaves out what only tests, lint and docs need (the image does).
set -eu
cd "$(dirname "$0")"

requirements=${1:-dev}
python=${PYTHON:-python3}
for name in python3.13 python3.12 python3.11; do  # tried, not looked for: a shim of pyenv stands for versions that are not in use, too
  [ "${PYTHON:-}" ] || ! "$name" -c "" 2> /dev/null || python=$name
done
"$python" -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), f"Python 3.11, 3.12 or 3.13 is needed, {sys.executable} is {sys.version.split()[0]}: set PYTHON=/path/to/python3.11"'

# The lock holds in build environments too: pip before 25.3 reads the first name there, later ones the second.
# An address, not a path: pip takes several that are divided by blanks.
constraints=$("$python" -c 'from pathlib import Path; print(Path("constraints.txt").resolve().as_uri())')
export PIP_CONSTRAINT="$constraints" PIP_BUILD_CONSTRAINT="$constraints" PIP_DISABLE_PIP_VERSION_CHECK=1

echo "Setting up .venv with $("$python" --version): six steps, which take minutes where nothing is installed yet."
pip() { .venv/bin/python -m pip "$@"; }
pip --version > /dev/null 2>&1 || "$python" -m venv --clear .venv  # also after one that was ended half-way

say() { echo "[$1/6] $2"; }

say 1 "pip and setuptools"
pip install -q pip setuptools wheel
say 2 "torch, the largest part"
pip install -q torch==2.13.0
say 3 "what requirements/$requirements.txt names, locked by constraints.txt"
pip install -q -r "requirements/$requirements.txt"
unset PIP_BUILD_CONSTRAINT  # refused beside --no-build-isolation
say 4 "SAM2, without its CUDA extension"
SAM2_BUILD_CUDA=0 pip install -q --no-deps --no-build-isolation sam2==1.1.0
say 5 "this checkout"
pip install -q --no-deps --no-build-isolation -e .
say 6 "imports everything once"
.venv/bin/python -c 'import ans_core, dvc, mlflow, prefect, sam2.modeling.sam2_base, torch, transformers; print("installed: torch", torch.__version__, "transformers", transformers.__version__)'
