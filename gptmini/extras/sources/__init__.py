"""Where a text comes from: the stretches of it that stand verbatim in a training text.

`Run.find_copies` is the door. Read find.py first: the longest match at each place of a text, and
the copies made of these. It searches the index of index.py, which knows files and lines, and which
suffixes.py sorts; training_text.py makes that of a run's text.
"""
