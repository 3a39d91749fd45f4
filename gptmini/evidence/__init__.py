"""Measuring and inspecting trained models; nothing here is needed to train one.

Read `evaluate` (losses on a text), then `variants` (measured runs as plain data, and statistics),
`measure` and `compare` (which produce them), `attention_view`, `plots` and `report`. `plots` takes
plain data and knows neither trainer nor model.
"""
