"""`python -m gptmini`."""

from gptmini.cli import main

main()
