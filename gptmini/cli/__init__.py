"""The command line: checks what was typed, calls one function, prints. No logic lives here.

One file for each command, named after it. Read app.py first (the list of commands; failures and
their exit codes), then options.py (what several commands share), then train.py and generate.py.
"""
