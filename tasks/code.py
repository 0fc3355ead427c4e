"""The code of every stage -> one hash each: its module and what that imports of ans_core
(ans_core/code_hash.py).

As a program it writes runs/code.yaml, which the stages of dvc.yaml take as a parameter: an edited sentence
runs nothing again, an edited line does.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from ans_core.code_hash import CodeHashes
from ans_core.written import write_atomically
from tasks.stages import TABLE, Stage

NAME = "code"
"""Of the stage that writes FILE."""
FILE = Path("runs/code.yaml")
DEPENDENCIES = ("ans_core", "tasks/code.py", "tasks/stages.py")
"""What that stage looks at."""


class Code(CodeHashes):
    """The code of a checkout, with its stages."""

    def version_of(self, stage: Stage) -> str:
        """Return a stage's version and the hash of its code, which together decide whether it is another
        stage than before."""
        return f"{stage.version} {self.hash_of([f'ans_core.stages.{stage.task}'])}"


def code_yaml(root: Path = Path()) -> str:
    code = Code(root)
    values = {stage.task: code.version_of(stage) for stage in TABLE}
    return f"# Version and hash of each stage's code; the stage `{NAME}` writes it.\n" + yaml.safe_dump(
        values, sort_keys=False
    )


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    write_atomically(FILE, code_yaml())


if __name__ == "__main__":
    main()
