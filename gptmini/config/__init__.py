"""Settings and where they come from: defaults, a YAML file, the command line.

Read section.py (the checked types), settings.py (every key), then load.py (files and overrides
to one checked configuration), yamlfile.py (strict YAML) and listing.py (every key in words). Knows
no torch, text or model.
"""
