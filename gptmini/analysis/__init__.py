"""Measures and inspects trained models; nothing here is needed to train one.

Read `evaluate` and `score` (losses on a text, token by token), then `variants` (measured runs as
plain data, and statistics), `measure` and `compare` (which produce them), `attention_maps`,
`page_data` and `report` (what is shown), `plots` and `page` (how: pictures, and pages from
page.html). Those two take plain data and know neither trainer nor model.
"""
