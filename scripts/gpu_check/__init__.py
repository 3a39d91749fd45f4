"""Check gptmini on a GPU, in two runs of at most ten minutes.

- `__main__.py`: the command; runs each part in a process of its own, under a time limit
- `check.py`: what the parts share: configurations, texts, the GPU's peak
- `training.py`: the parts of the first run
- `generation.py`: the parts of the second run
- `page.py`: the tables made of what was found
"""
