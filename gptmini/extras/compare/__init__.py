"""Trains variants of a model, or takes finished runs, and compares them: quality, memory, speed.

For researchers who change one thing and ask whether it helped. Without this folder you compare the
last lines of two runs by eye, and do not know how much of a difference is chance.

compare.py trains and writes the results, tune.py chooses the learning rates to try, share.py gives
all runs the choices of the first, measure.py reads runs, variants.py makes the tables, plots.py
draws, and statistics.py says which differences are more than chance.
"""
