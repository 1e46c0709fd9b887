"""Host time that the plugin's hooks add to a decode step: ``python -m bench.overhead --help``."""
