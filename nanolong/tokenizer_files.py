"""The tokenizer files of an imported model, kept as they are in checkpoints and datasets.

In memory the JSON of such a tokenizer (data/tokenizer.py) holds their contents, "files": name ->
bytes. In meta.json it holds their names, and the files lie in the same folder.
"""

import hashlib

from nanolong.errors import UserError

# What belongs to a tokenizer in a Hugging Face directory.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def has_files(spec) -> bool:
    """Return whether the JSON of a tokenizer, which may be None, belongs to files."""
    return isinstance(spec, dict) and "files" in spec


def contents(spec) -> dict:
    """Return the files of a tokenizer's JSON in memory: name -> bytes."""
    return spec["files"] if has_files(spec) else {}


def without_contents(meta) -> dict:
    """Return a meta.json whose tokenizer names its files, for writing."""
    if not has_files(meta.get("tokenizer")):
        return meta
    spec = meta["tokenizer"]
    return {**meta, "tokenizer": {**spec, "files": sorted(spec["files"])}}


def read(folder, spec, checksums, remedy):
    """Undo without_contents() for a tokenizer's JSON that was read from a folder's meta.json.

    checksums: file name -> SHA-256. Raises UserError, which ends in the remedy.
    """
    if not has_files(spec):
        return spec
    names = spec["files"]
    # a path that leaves the folder would read files that are none of the tokenizer's
    if not isinstance(names, list) or not all(name in FILES for name in names):
        raise UserError(f"{folder / 'meta.json'} names other files than a tokenizer's: {remedy}")
    files = {}
    for name in names:
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing: {remedy}")
        files[name] = file.read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != checksums.get(name):
            raise UserError(
                f"{file} is damaged (its checksum is not the one in meta.json): {remedy}"
            )
    return {**spec, "files": files}
