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
from nanolong.parallel import broadcast
from nanolong.strict_json import replace_text, to_json

TASKS = {"loss", "needle", "ruler", "cost"}


@dataclass
class Cell:
    """What is measured at once, of one checkpoint at one length: one record or several."""

    records: list  # without what find() adds; JSON values
    find: Callable  # returns the records with their measurements; may raise UserError
    settings: list = field(default_factory=list)  # further settings that it depends on; JSON values

    def measure(self):
        """Return the records; if they cannot be measured, they have "refused" with the reason."""
        try:
            return self.find()
        except UserError as error:
            return [{**record, "refused": str(error)} for record in self.records]


def read_records(file):
    """The records that an earlier evaluation wrote; [] where there is no such file.

    Raises UserError for a file of another kind, which would be overwritten.
    """
    if not Path(file).is_file():
        return []
    try:
        records = json.loads(Path(file).read_text(encoding="utf-8") or "[]")
        is_ours = {record["task"] for record in records} <= TASKS
    except (ValueError, TypeError, KeyError, RecursionError):
        is_ours = False
    what = "something else than records of evaluate.py, and would be overwritten"
    require(is_ours, f"{file} holds {what}: give another --json, or remove the file")
    return records


def measure(cells, models, origins, facts, file):
    """Measure cells, and write all records so far to a file after each. Returns the records.

    models, origins: a GPT and the fields to add to its records, by checkpoint. facts: other things
    that all cells depend on, such as the code. file: "" for none; its records with the key of a
    cell, a hash of all that its numbers depend on, are used in its place.
    """
    saved = read_records(file)

    def key_of(cell):
        name = cell.records[0]["checkpoint"]
        # not the commit: one that changes a document changes no number
        origin = {field: value for field, value in origins[name].items() if field != "commit"}
        dtypes = sorted({str(p.dtype) for p in models[name].parameters()})
        found = [facts, torch.__version__, models[name].meta.get("checksums"), dtypes]
        found += [origin, cell.records, cell.settings]
        return hashlib.sha256(to_json(found).encode()).hexdigest()[:16]

    # The file is of the first process; all must skip the same cells.
    keys = broadcast([key_of(cell) for cell in cells])
    found = broadcast(find_saved(keys, saved))
    if found:
        print(f"reused: {len(found)} of {len(keys)} measurements, from {file}", flush=True)
    n_others = sum(record.get("key") not in keys for record in saved if "key" in record)
    if n_others:
        others = f"{n_others} records that other settings, weights, data or code gave"
        note(f"{file} has {others}: they are not used, and replaced")
    missing = {key: cell for key, cell in zip(keys, cells, strict=True) if key not in found}
    # where no terminal shows a bar, a line a minute
    seconds = 0.1 if sys.stderr.isatty() else 60
    with tqdm(missing.items(), delay=seconds, mininterval=seconds, leave=False) as bar:
        for key, cell in bar:
            name, length = cell.records[0]["checkpoint"], cell.records[0]["length"]
            bar.set_description(f"{name} at {length:,}", refresh=False)
            found[key] = [{**r, **origins[name], "key": key} for r in cell.measure()]
            if Path(file).is_file() or not Path(file).exists():  # no device
                write_lines(Path(file), [r for key in keys for r in found.get(key, [])])
    return [record for key in keys for record in found[key]]


def write_lines(file, records):
    """Write a list as JSON, one record a line, as write_json() does; a device is written to."""
    lines = ",\n".join(to_json(record) for record in records)
    text = f"[\n{lines}\n]\n"
    if file.is_file() or not file.exists():
        replace_text(file.resolve(), text)  # the target of a link
    else:
        file.write_text(text, encoding="utf-8")


def find_saved(keys, saved):
    """The saved records by key, without records of a number that was not finite: it is null."""
    found = {}
    for record in saved:
        if record.get("key") in keys:
            record.pop("difference", None)  # of other checkpoints; it is found again
            found.setdefault(record["key"], []).append(record)
    null = {record["key"] for record in saved if record.get("loss", 0) is None}
    return {key: records for key, records in found.items() if key not in null}
