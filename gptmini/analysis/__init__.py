"""Compares trained models and makes pages and pictures of them; guests, which may leave.

measure.py and compare.py measure runs beside each other, with variants.py and statistics.py for the
tables. arithmetic.py, page_data.py and report.py compute what is shown; plots.py and page.py show
it, from plain data, and know neither trainer nor model.
"""
