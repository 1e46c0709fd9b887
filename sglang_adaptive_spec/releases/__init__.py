"""The only place, beside the patches, that knows one release of SGLang from another."""
