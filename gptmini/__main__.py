"""`python -m gptmini` is the command `gptmini`."""

from gptmini.cli.app import main

main()
