"""A mode on SGLang's objects: what the controller decides becomes slots, forwards and results here."""
