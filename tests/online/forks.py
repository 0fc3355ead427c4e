"""A process that has imported everything and forks a child for each command line (JSON) that it reads: `ans
agent ...` starts at once.

echo '[["agent", "status", "--store", "F"], "out.txt"]' | python -m tests.online.forks
"""

from __future__ import annotations

import json
import os
import signal
import sys

import ans_core.online.server
import ans_core.stages.online_parts  # noqa: F401
from flows import cli


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    for line in sys.stdin:
        words, out = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        told = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(told, 1)
        os.dup2(told, 2)
        arguments = cli.parse(words)
        try:
            status = arguments.function(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException as error:  # noqa: BLE001  a fork must not go on with its parent's loop
            print(f"{type(error).__name__}: {error}")
            status = 2
        sys.stdout.flush()  # `_exit` does not: a worker's last line was missing once
        os._exit(status)


if __name__ == "__main__":
    main()
