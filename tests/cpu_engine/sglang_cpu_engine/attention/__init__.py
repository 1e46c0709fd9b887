"""The reference attention backend: what to attend to (plan), how (attend), and who asks (backend)."""
