"""Measuring and inspecting trained models; nothing here is needed to train one.

Read `evaluate` (losses on a text), then `variants` (measured runs as plain data, and statistics),
`measure` and `compare` (which produce them), `attention_view`, `plots`, `page` (with page.html),
`reading` and `report`. `plots` and `page` take plain data and know neither trainer nor model.
"""
