"""`python -m ans_core.cli`: the `ans` command."""

from ans_core.cli.main import main

main()
