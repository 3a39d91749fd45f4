"""Serve a trained model over HTTP, in the formats of OpenAI's completions and chat completions.

For programs that speak OpenAI's API, and for several people who share a model. Without this folder
`gptmini serve` is lost; texts still come from `gptmini generate` and from Python.

Read scheduler.py first: one thread generates the texts of all callers. Then completions.py (the
JSON of a request to texts, and back), chat.py (the same for messages) and server.py (routes,
errors, signals). limits.py says how much one connection, one request and all of them may take;
connection.py and workers.py keep clients and threads within it. extras/page makes the page at /.
Of the core, the server needs only config/ and generate/.
"""
