"""The progress of an evaluation: a line for each measurement, and a JSON file of its records, from
which the same command goes on after it was stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanolong import intervals
from nanolong.errors import UserError, note
from nanolong.parallel import broadcast
from nanolong.run import weights_hash
from nanolong.strict_json import to_json, write_lines

TASKS = {"loss", "needle", "ruler"}

# A line and a write of the file for each brief measurement would take longer than these do.
SECONDS_BETWEEN_BRIEF = 1.0


@dataclass
class Measurement:
    """What is measured at once, of one checkpoint at one length: one record or several."""

    records: list  # of one checkpoint and length, without what find() adds; JSON values
    find: Callable  # returns the records with what was measured; may raise UserError
    flops: float  # what it costs, by devices.flops_per_token(): more per token in a longer sequence
    settings: dict | None = None  # what else it depends on, but for model and data; JSON values
    brief: bool = False  # one of very many

    def measure(self):
        """Return the records; if they cannot be measured, they have "refused" with the reason."""
        try:
            return self.find()
        except UserError as error:
            return [{**record, "refused": str(error)} for record in self.records]


def measure_all(measurements):
    """Return the records of all measurements."""
    return [record for measurement in measurements for record in measurement.measure()]


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
    if not is_ours:
        what = "something else than records of evaluate.py, and would be overwritten"
        raise UserError(f"{file} holds {what}: give another --json, or remove the file")
    return records


def describe_model(model):
    """What the measurements of a model depend on, and its records do not have: JSON values."""
    tokenizer = repr(model.meta.get("tokenizer"))  # an imported one has bytes
    return {
        "weights": weights_hash(model),
        "weight_dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "config": asdict(model.config),
        "bos": model.meta.get("bos"),
        "tokenizer": hashlib.sha256(tokenizer.encode()).hexdigest(),
    }


class EvaluationLog:
    """Print a line for each measurement when it is done, and write all records so far to a file.

    A record has a key: a hash of all that it depends on, which are the model, the fields that say
    what it came from (but for the commit), the settings and the code. Records of `saved` with the
    key of a measurement are used in its place.

    file: "" for none. saved: of read_records(). models and origins: by checkpoint, a GPT and the
    fields to add to its records. facts: what else all measurements depend on, such as the code.
    """

    def __init__(self, file, saved, models, origins, **facts):
        self.file = file
        self.saved = saved
        self.origins = origins
        self.models = {name: describe_model(model) for name, model in models.items()}
        self.facts = {**facts, "torch": torch.__version__, "fields": 2}  # 2: with intervals
        self.speeds = {}  # by checkpoint: FLOPs and seconds so far

    def key(self, measurement):
        name = measurement.records[0]["checkpoint"]
        origin = {field: value for field, value in self.origins[name].items() if field != "commit"}
        facts = [self.facts, self.models[name], origin, measurement.records, measurement.settings]
        return hashlib.sha256(to_json(facts).encode()).hexdigest()[:16]

    def measure(self, measurements):
        """Measure what is not saved yet. Returns the records of all measurements."""
        # The file is of the first process; all must skip the same measurements.
        keys = broadcast([self.key(measurement) for measurement in measurements])
        found = broadcast(self.find_saved(keys))
        self.print_reused(keys, found)
        pairs = list(zip(keys, measurements, strict=True))
        written = time.perf_counter()
        try:
            for i, (key, measurement) in enumerate(pairs, 1):
                if key in found:
                    continue
                seconds = self.measure_one(measurement, key, found)
                now = time.perf_counter()
                is_last = i == len(pairs)
                if measurement.brief and not is_last and now < written + SECONDS_BETWEEN_BRIEF:
                    continue
                written = now
                self.save(keys, found)
                left = self.format_time_left([rest for key, rest in pairs[i:] if key not in found])
                first = found[key][0]
                print(
                    f"measured {i} of {len(pairs)}: {first['checkpoint']} at {first['length']}: "
                    f"{summarise(found[key])} ({format_time(seconds)}{left})",
                    flush=True,
                )
        finally:
            self.save(keys, found)  # of a stopped evaluation, too
        return [record for key in keys for record in found[key]]

    def measure_one(self, measurement, key, found):
        """Add the records of a measurement to `found`. Returns the seconds that it took."""
        start = time.perf_counter()
        records = measurement.measure()
        seconds = time.perf_counter() - start
        name = records[0]["checkpoint"]
        found[key] = [{**record, **self.origins[name], "key": key} for record in records]
        # A refusal takes no time, so it says nothing about the speed.
        if "refused" not in records[0]:
            flops, total = self.speeds.get(name, (0, 0))
            self.speeds[name] = (flops + measurement.flops, total + seconds)
        return seconds

    def find_saved(self, keys):
        """The saved records by key, without those of a number that was not finite: it is null."""
        found = {}
        for record in self.saved:
            if record.get("key") in keys:
                # of other checkpoints and lengths; scoring.compare() finds them again
                record.pop("difference", None)
                record.pop("benefit", None)
                found.setdefault(record["key"], []).append(record)
        for key, records in list(found.items()):
            numbers = [
                r.get(field, 0) for r in records for field in ("loss", "nll", "nats", "gain")
            ]
            if None in numbers:
                del found[key]
        return found

    def print_reused(self, keys, found):
        saved = [record for record in self.saved if "summary" not in record]
        n_others = sum(record.get("key") not in keys for record in saved)
        if found:
            print(f"reused: {len(found)} of {len(keys)} measurements, from {self.file}", flush=True)
        if n_others:
            others = f"{n_others} records that other settings, weights, data or code gave"
            note(f"{self.file} has {others}: they are not used, and replaced")

    def save(self, keys, found):
        """Write the records so far, if the file is one and not a device as /dev/stdout."""
        path = Path(self.file)
        if path.is_file() or not path.exists():
            self.write([record for key in dict.fromkeys(keys) for record in found.get(key, [])])

    def write(self, records):
        """Write all records, one a line, in place of what the file holds."""
        if self.file:
            write_lines(Path(self.file), records)

    def format_time_left(self, measurements):
        """The time that these will take, as the end of a line, or "".

        A checkpoint goes on at its own speed in FLOP/s, and one that was not measured yet at that
        of all others together.
        """
        if not self.speeds:
            return ""
        of_all = [sum(column) for column in zip(*self.speeds.values(), strict=True)]
        left = 0.0
        for measurement in measurements:
            name = measurement.records[0]["checkpoint"]
            flops, seconds = self.speeds.get(name, of_all)
            left += measurement.flops * seconds / flops
        return f", about {format_time(left)} left" if left else ""


def summarise(records):
    """What a measurement has found, in a few words."""
    first = records[0]
    if "refused" in first:
        return "refused"
    if first["task"] == "needle":
        place = "no passkey" if first["depth"] is None else f"passkey at depth {first['depth']:g}"
        return f"{place}, found {intervals.format_interval(first, 2, key='accuracy')}"
    if first["task"] == "ruler":
        verdict = "all right" if first["correct"] else "not all right"
        prompt = f"{first['kind']}, prompt {first['sample']}"
        return f"{prompt}: {verdict}, {first['nats']:.2f} nats, {first['gain']:+.2f} by the needles"
    words = []
    for protocol in dict.fromkeys(record["protocol"] for record in records):
        of_protocol = [record for record in records if record["protocol"] == protocol]
        losses = [intervals.format_interval(record, key="loss") for record in of_protocol]
        of_last_part = f" to {losses[-1]}" if len(losses) > 1 else ""
        words.append(f"{protocol} {losses[0]}{of_last_part}")
    return f"{', '.join(words)} nats per token"


def format_time(seconds):
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
