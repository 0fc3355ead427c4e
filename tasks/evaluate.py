"""`python -m tasks.evaluate ROW`: runs ans_core.stages.evaluate on one checkpoint as DVC's stage `evaluate@ROW`."""

import sys

from tasks.runner import main
from tasks.stages import ROWS

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ROWS:
        sys.exit(f"usage: python -m tasks.evaluate ROW, with ROW one of {list(ROWS)}")
    main(f"evaluate@{sys.argv[1]}")
