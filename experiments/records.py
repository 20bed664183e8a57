"""Make and check the records in records/: a position scheme in one file, compared with rope.

    python experiments/records.py                             every record, trained for seconds
    python experiments/records.py --budget=cpu                every record, measured again in full
    python experiments/records.py records/p_rope.json         only this one
    python experiments/records.py records/mine.py --budget=cpu      make the record of a file

A record is a NAME.json that the leaderboard's runs of a file and of rope have made: three seeds
each. The check refuses a record whose file has been edited since, or that was made with other
settings. Then it trains both again. With --budget=try, in seconds, this only shows that the file
still runs; with --budget=cpu the new differences from rope must agree with the record's. They are
paired by seed, so that they can be compared between machines and Python versions.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

from dataclasses import dataclass
from typing import Literal

from experiments.leaderboard import BUDGETS, FACTORS, LeaderboardConfig, measure, select_losses
from experiments.report import ROOT, confidence_interval, format_interval, markdown_table, read_json
from model import POSITIONS
from nanolong import cli
from nanolong.entry import entry_hash, load_entry
from nanolong.strict_json import write_json
from nanolong.validate import require

RECORDS = ROOT / "records"
SEEDS = 3


@dataclass
class RecordsConfig:
    # try: seconds a record, shows that it runs; cpu, gpu: minutes, compares the numbers
    budget: Literal["try", "cpu", "gpu"] = "try"
    runs: str = "out/records"  # folder for the run folders
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps


def differences(board, name):
    """Return length in training lengths -> the entry's last-quarter losses less rope's, by seed."""
    L = board["model"]["block_size"]
    found = {}
    for factor in FACTORS:
        own, rope = (
            select_losses(board["records"], entry, "last-quarter", factor * L)
            for entry in (name, "rope")
        )
        if own:  # none where the scheme refuses the length
            found[factor] = [a - b for a, b in zip(own, rope, strict=True)]
    return found


def run_board(file, cfg):
    """Train and evaluate a file and rope as the leaderboard does."""
    return measure(
        LeaderboardConfig(
            budget=cfg.budget,
            entries=("rope",),
            entry=(str(file),),
            seeds=1 if cfg.budget == "try" else SEEDS,
            max_tokens=4096 if cfg.budget == "try" else 65536,
            runs=cfg.runs,
            device=cfg.device,
        )
    )


def make_record(file, cfg):
    """Write the record of a file to records/NAME.json. Raises UserError."""
    require(cfg.budget != "try", "a record needs the full training: give --budget=cpu or gpu")
    inside = file.resolve().is_relative_to(ROOT)
    require(inside, f"{file} is outside of the project: move it into records/")
    target = RECORDS / f"{file.stem}.json"
    require(not target.exists(), f"{target} exists already: remove it to measure the file again")
    board = run_board(file, cfg)
    board.pop("throughput")
    path = file.resolve().relative_to(ROOT).as_posix()
    code = entry_hash(POSITIONS[file.stem])
    write_json(target, {"file": path, "code": code, "budget": cfg.budget, **board}, indent=1)
    return target


def check_record(json_file, cfg):
    """Check a record and train its file again. Returns its line of the table. Raises UserError."""
    record = read_json(json_file)
    name, file = json_file.stem, ROOT / record["file"]
    load_entry(file, POSITIONS)
    require(
        entry_hash(POSITIONS[name]) == record["code"],
        f"{record['file']} has been edited since {json_file} was made: remove the record, and make "
        "it again",
    )
    budget = BUDGETS[record["budget"]]
    same = all(record[part] == budget[part] for part in ("model", "training"))
    require(same, f"{json_file} was made with other settings than the leaderboard's: make it again")
    recorded = differences(record, name)
    for factor, values in recorded.items():
        require(len(values) == SEEDS, f"{json_file} lacks a seed at {factor}x: make it again")
    board = run_board(file, cfg)
    new = differences(board, name)
    require(new.keys() == recorded.keys(), f"{name} refuses other lengths than in {json_file}")
    if cfg.budget == record["budget"]:
        for factor in recorded:
            check_agreement(name, factor, recorded[factor], new[factor])
    return table_row(record, name)


def check_agreement(name, factor, recorded, new):
    """Raise UserError if the 95 % intervals of two differences do not meet."""
    (mean, half_width), (new_mean, new_half_width) = map(confidence_interval, (recorded, new))
    require(
        abs(mean - new_mean) <= half_width + new_half_width,
        f"{name} at {factor}x differs from rope by {format_interval(new)} nats, and the record "
        f"has {format_interval(recorded)}: make the record again, and say why it moved",
    )


def table_row(record, name):
    """The line of a record: the file, and its differences from rope by length."""
    found = differences(record, name)
    cells = [format_interval(found[f]) if f in found else "refused" for f in FACTORS]
    return [f"[{name}](../{record['file']})", *cells]


def main():
    args = cli.parse(cfg=RecordsConfig, about=__doc__, paths="records, or a file to record")
    cfg = args.cfg
    files = [Path(path) for path in args.paths] or sorted(RECORDS.glob("*.json"))
    for file in files:
        known = file.is_file() and file.suffix in (".json", ".py")
        require(known, f"{file} is no record: give a NAME.json, or the NAME.py of a scheme")
    made = [make_record(file, cfg) for file in files if file.suffix == ".py"]
    rows = [check_record(file, cfg) for file in files if file.suffix == ".json"]
    rows += [table_row(read_json(file), file.stem) for file in made]
    print("\n".join(markdown_table(["", *(f"{factor}x" for factor in FACTORS)], rows)))
    return 0


if __name__ == "__main__":
    cli.run_main(main)
