"""Another plugin of SGLang's, made on the spot, to break things from the inside."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, source: str) -> dict[str, str]:
    """Make a plugin of SGLang's out of some source, and return the environment that loads it."""
    metadata = folder / "saboteur-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "saboteur.py").write_text(source)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nsaboteur = saboteur:register\n")
    return {"PYTHONPATH": str(folder)}
