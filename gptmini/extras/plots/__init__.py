"""Draws pictures from plain data with matplotlib: attention, masks, training curves.

For those who look at a run, or show it. Without this folder `gptmini plot` is lost, `inspect` has
only numbers and pages, and `compare` only tables.

plots.py draws and knows neither training nor model; training.py reads what runs logged.
Other commands call `load_plots` in doors.py.
"""
