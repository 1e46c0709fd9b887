"""A load that rises, bursts and falls, on one running server after another: ``python -m bench.ramp --help``."""
