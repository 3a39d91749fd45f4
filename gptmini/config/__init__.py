"""Settings and where they come from: defaults, a YAML file, the command line.

Read `section` (the checked types), `settings` (every key), `load` (from files and overrides to one
checked configuration), `yamlfile` (strict YAML) and `listing` (every key in words). Nothing here
loads torch, a text or a model.
"""
