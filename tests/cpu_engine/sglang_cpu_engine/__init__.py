"""Reference kernels that let an unmodified SGLang serve on a CPU.

Import-light on purpose: every interpreter of the environment imports this package at start.
"""
