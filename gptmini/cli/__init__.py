"""The command line: checks what was typed, calls one function, prints. No logic lives here.

Read app.py first, the list of commands and their exit codes; then options.py, what several of them
share, and train.py and generate.py. Each command has a file named after it.
"""
