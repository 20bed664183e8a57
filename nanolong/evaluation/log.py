"""The log of an evaluation: a JSON file of its records, one a line, from which the same command
goes on after it was stopped.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from nanolong.errors import UserError, note, require
from nanolong.strict_json import replace_text, to_json

TASKS = {"loss", "needle", "ruler", "cost"}


@dataclass
class Cell:
    """One measurement of one checkpoint at one length, which fills in one record or several."""

    records: list  # records that compute() fills in; JSON values
    compute: Callable  # returns the records with their measurements; may raise UserError
    settings: list = field(default_factory=list)  # further settings that it depends on; JSON values

    def measure(self):
        """Return the records, filled in, or with "refused" and the reason."""
        try:
            return self.compute()
        except UserError as error:
            return [{**record, "refused": str(error)} for record in self.records]


def measure(cells, models, origins, facts, file):
    """Measure cells, and write all records so far to a file after each. Returns the records.

    models, origins: a GPT and the fields to add to its records, by checkpoint. facts: other things
    that all cells depend on, such as the code. file: "" for none; its records with the key of a
    cell, a hash of all that its numbers depend on, are used in its place.
    """

    def key_of(cell):
        name = cell.records[0]["checkpoint"]
        # not the commit: one that changes a document changes no number
        origin = {field: value for field, value in origins[name].items() if field != "commit"}
        dtypes = sorted({str(p.dtype) for p in models[name].parameters()})
        found = [facts, torch.__version__, models[name].meta.get("checksums"), dtypes]
        found += [origin, cell.records, cell.settings]
        return hashlib.sha256(to_json(found).encode()).hexdigest()[:16]

    keyed = {key_of(cell): cell for cell in cells}
    found = read_records(file, keyed)
    # where no terminal shows a bar, a line a minute
    seconds = 0.1 if sys.stderr.isatty() else 60
    missing = [key for key in keyed if key not in found]
    with tqdm(missing, delay=seconds, mininterval=seconds, leave=False) as bar:
        for key in bar:
            name, length = (keyed[key].records[0][field] for field in ("checkpoint", "length"))
            bar.set_description(f"{name} at {length:,}", refresh=False)
            found[key] = [{**r, **origins[name], "key": key} for r in keyed[key].measure()]
            if Path(file).is_file() or not Path(file).exists():  # no device
                write_lines(Path(file), [r for key in keyed for r in found.get(key, [])])
    return [record for key in keyed for record in found[key]]


def read_records(file, keys):
    """Read what an earlier evaluation wrote: the records of these keys; {} without such a file.

    A record of a number that was not finite, which is null, is measured again. Raises UserError
    for a file of another kind, which would be overwritten.
    """
    saved = []
    if Path(file).is_file():
        try:
            saved = json.loads(Path(file).read_text(encoding="utf-8") or "[]")
            is_ours = {record["task"] for record in saved} <= TASKS
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours = False
        what = "something else than records of evaluate.py, and would be overwritten"
        require(is_ours, f"{file} holds {what}: give another --json, or remove the file")
    null = {record.get("key") for record in saved if record.get("loss", 0) is None}
    found = {}
    for record in saved:
        if record.get("key") in keys and record["key"] not in null:
            # Another command may compare other checkpoints, so it computes this again.
            record.pop("difference", None)
            found.setdefault(record["key"], []).append(record)
    if found:
        print(f"reused: {len(found)} of {len(keys)} measurements, from {file}", flush=True)
    n_others = sum("key" in record and record["key"] not in keys for record in saved)
    if n_others:
        others = f"{n_others} records that other settings, weights, data or code gave"
        note(f"{file} has {others}: they are not used, and replaced")
    return found


def write_lines(file, records):
    """Write a list as JSON, one record a line, as write_json() does; a device is written to."""
    text = "[\n" + ",\n".join(map(to_json, records)) + "\n]\n"
    if file.is_file() or not file.exists():
        replace_text(file.resolve(), text)  # the target of a link
    else:
        file.write_text(text, encoding="utf-8")
