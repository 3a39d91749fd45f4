"""Settings and where they come from: defaults, a YAML file, the command line.

Read settings.py (every key with its default, meaning and check), then load.py (files and overrides
to one checked configuration) and yamlfile.py (strict YAML). Knows no torch, text or model.
"""
