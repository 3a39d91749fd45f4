"""Measure gptmini, beside its peers where there are any."""
