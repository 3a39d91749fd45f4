"""Measures and inspects trained models; nothing here is needed to train one.

Read evaluate.py and score.py first (the loss of a text, and token by token); then measure.py and
compare.py, which measure runs beside each other, with variants.py and statistics.py for the tables.
attention_maps.py, arithmetic.py, page_data.py and report.py compute what is shown; plots.py and
page.py show it, from plain data, and know neither trainer nor model.
"""
