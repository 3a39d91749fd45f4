"""Guests: parts that nobody needs to train a GPT and to generate with it.

The core meets them at doors alone, and no guest imports another; each brings its own command.
Without this folder everything else still works, and .ci/run tests that. What is lost: the commands
`serve`, `compare`, `size`, `plot`, `copies`, `export` and `import`, what `inspect --out` writes,
and from Python `gptmini.export_run`, `gptmini.import_model` and `gptmini.compare`.
"""
