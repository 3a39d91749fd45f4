"""Parts that training a GPT and generating with it do not need.

The core calls them in a few functions, no part imports another, and each brings its own command.
Without this folder everything else still works, and .ci/run tests that. What is lost: the commands
`serve`, `compare`, `convert`, `size`, `plot`, `copies`, `export` and `import`, what `inspect --out`
writes, `generate --lookup` and `--draft`, several processes, tokenizer.json of other models, and
from Python `gptmini.export_run`, `gptmini.import_model`, `gptmini.compare` and `Run.find_copies`.
"""
