"""`python -m gptmini`."""

from gptmini.cli.app import main

main()
