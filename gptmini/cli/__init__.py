"""The command line: checks what was typed, calls one function, reports. No logic lives here.

Read app.py (the list of commands, failures to exit codes), then options.py (options that several
commands share) and one file of commands for each purpose: train, generate, evidence, text.
"""
