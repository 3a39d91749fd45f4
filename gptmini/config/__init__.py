"""Settings and where they come from: defaults, a YAML file, the command line.

Read settings.py (every key with its default, meaning and check), then load.py (files and overrides
to one checked configuration), yamlfile.py (strict YAML) and listing.py (every key in words). Knows
no torch, text or model.
"""
