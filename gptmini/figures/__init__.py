"""Draws pictures and pages from plain data: attention, masks, training curves.

plots.py draws with matplotlib and page.py writes one HTML file, which holds such pictures; neither
knows training nor model. report.py makes both of what runs logged.
"""
