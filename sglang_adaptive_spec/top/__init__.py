"""A live view of one server in the terminal: ``python -m sglang_adaptive_spec.top URL``.

A sampler asks the server, a history turns samples into rates, a screen draws them. It imports neither torch nor
SGLang, so it runs on any machine that reaches the server.
"""
