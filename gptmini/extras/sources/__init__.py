"""Where a text comes from: the stretches of it that stand verbatim in a training text.

For those who ask whether a model recites. Without this folder `gptmini copies` is lost, and
`evaluate` does not say how much of the held-out text is copied.

`Run.find_copies` calls it. Read find.py first: the longest match at each place of a text, and the
copies made of these. training_text.py reads the training text of a run, with files and lines.
"""
