"""Checkpoints changed on purpose."""

import hashlib
import json


def reseal(path):
    """Write a manifest that agrees with the files, as someone who changes them on purpose would."""
    files = {}
    for file in path.iterdir():
        if file.name != "manifest.json":
            data = file.read_bytes()
            files[file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": 1, "name": path.name, "files": files}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
