"""Settings and where they come from: defaults, a YAML file, the command line.

Read settings.py first, every key with its meaning; then load.py, which makes one checked
configuration of what was stated. section.py has the checked types, yamlfile.py strict YAML.
Nothing here loads torch, a text or a model.
"""
