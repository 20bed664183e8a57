"""Length generalisation: small algorithmic tasks, trained on short samples and tested on longer ones (after Kazemnejad et al. 2023).

    python experiments/tasks.py                                            seven tasks, five schemes, three seeds: 105 runs of some minutes each (not timed whole)
    python experiments/tasks.py --pos=nope,rope --tasks=copy,reverse       only some
    python experiments/tasks.py --budget=gpu                               a wider model, four times the batch, four times as long

Stop it when you like: the same command goes on after the last run that was finished. What each run measured lies in out/tasks; the results go to results/tasks.md, .json and .png.
A sample is `<bos> x <sep> y <eos>`, and only y and <eos> are scored. Samples are drawn fresh at every step, as a function of (task, seed, step); those that test are the same for
all runs, though of the shortest there are so few that training has seen them. The tasks, by what `length` counts:
  copy        x: that many digits; y: the same digits
  reverse     y: the same digits backwards
  addition    x: two numbers of that many digits, least significant first, as 12+93; y: their sum likewise, with one digit more
  scratchpad  the same, but y first writes out each place: both digits, their sum's digit, the carry; then the sum
  majority    x: that many letters; y: the one letter that occurs most. It needs no order.
  span        x: that many digits with two markers among them, as 83|19|4; y: what stands between the markers. It needs order.
  recall      x: that many pairs of a key and a digit, the shots; y: half of the keys, each followed by its digit; the keys there are the questions, and are not scored
Trained on lengths 1 to 20 and tested on 21 to 40 (scratchpad 8 and 16, as in the paper; recall 20 and 80). The measure is exact match, the share of samples that are right from the first
token of y to <eos>; of recall, the share of its answers that are right. `learned` gets a table as long as the tests: its vectors beyond the trained length stay as they were drawn,
as in the paper. All other schemes are made for the trained length, so that T5's last bucket, say, is one that training visits.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import json
import math
import random
import statistics
import time
import warnings
import zlib
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from config import UserError
from evaluate import pyplot
from experiments.leaderboard import interval
from model import GPT, POSITIONS, GPTConfig, PastTrainedLength, Refused


@dataclass
class TasksConfig:
    pos: tuple[str, ...] = ("nope", "rope", "alibi", "t5", "learned")  # position schemes
    tasks: tuple[str, ...] = ()  # names of tasks; by default all
    budget: Literal["cpu", "gpu", "try"] = "cpu"  # cpu: 0.45 M parameters; gpu: 0.8 M, four times as long, four times the batch; try: seconds, to see that it works
    seeds: int = 3               # runs of each task and scheme
    steps: int = 0               # updates of each run; 0: what the budget says
    runs: str = "out/tasks"      # where each finished run leaves what it measured
    out_dir: str = "results"     # where tasks.md, .json and .png go
    device: str = "auto"         # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products

    def __post_init__(self):
        if self.seeds < 1 or self.steps < 0:
            raise UserError("seeds must be at least 1, and steps at least 1, or 0 for the budget's own")
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise UserError(f"there is no task {unknown[0]!r}: tasks are {', '.join(TASKS)}")
        if unknown := [name for name in self.pos if name not in POSITIONS]:
            raise UserError(f"there is no position scheme {unknown[0]!r}: schemes are {', '.join(POSITIONS)}")
        if not self.pos:
            raise UserError("pos names nothing: give schemes, as in --pos=nope,rope")


BUDGETS = {  # settings of the model, of its training, and how many samples of each length test it
    "cpu": (dict(n_layer=4, n_head=4, n_embd=96), dict(steps=1500, batch_size=64, learning_rate=1e-3, warmup=100), 64),
    "gpu": (dict(n_layer=4, n_head=4, n_embd=128), dict(steps=6000, batch_size=256, learning_rate=5e-4, warmup=200), 256),
    "try": (dict(n_layer=2, n_head=2, n_embd=32), dict(steps=20, batch_size=8, learning_rate=1e-3, warmup=5), 4),
}

# ---------------------------------------------------------------------------------------------------------------------
# The tasks: each is a function of a random.Random and a length that returns x and y, lists of tokens.

SYMBOLS = [*"0123456789abcd+|,", "<bos>", "<sep>", "<eos>"]  # 20 tokens; a digit is its own token
LETTERS, (PLUS, MARK, COMMA, BOS, SEP, EOS) = range(10, 14), range(14, 20)
KEYS = range(20, 120)  # recall's, beyond the symbols


def copy(rng, n):
    x = rng.choices(range(10), k=n)
    return x, x


def reverse(rng, n):
    x = rng.choices(range(10), k=n)
    return x, x[::-1]


def addition(rng, n):
    a, b = rng.choices(range(10), k=n), rng.choices(range(10), k=n)
    total, carry = [], 0
    for i, j in zip(a, b):
        carry, digit = divmod(i + j + carry, 10)
        total.append(digit)
    return [*a, PLUS, *b], [*total, carry]


def scratchpad(rng, n):
    x, total = addition(rng, n)
    places, carry = [], 0
    for i, j, digit in zip(x[:n], x[n + 1:], total):
        carry = (i + j + carry) // 10
        places += [i, j, digit, carry, COMMA]
    return x, [*places, MARK, *total]


def majority(rng, n):
    while True:
        x = rng.choices(LETTERS, k=n)
        (most, count), *rest = Counter(x).most_common(2)
        if not rest or rest[0][1] < count:
            return x, [most]


def span(rng, n):
    digits, (start, end) = rng.choices(range(10), k=n), sorted(rng.sample(range(n + 1), 2))
    return [*digits[:start], MARK, *digits[start:end], MARK, *digits[end:]], digits[start:end]


def recall(rng, n):
    pairs = list(zip(rng.sample(KEYS, n), rng.choices(range(10), k=n)))
    asked = rng.sample(pairs, (n + 1) // 2)
    return [token for pair in pairs for token in pair], [token for pair in asked for token in pair]


TASKS = {  # the longest trained and tested lengths, and how many tokens x and y have together, at most
    "copy": (copy, 20, 40, lambda n: 2 * n),
    "reverse": (reverse, 20, 40, lambda n: 2 * n),
    "addition": (addition, 20, 40, lambda n: 3 * n + 2),
    "scratchpad": (scratchpad, 8, 16, lambda n: 8 * n + 3),
    "majority": (majority, 20, 40, lambda n: n + 1),
    "span": (span, 20, 40, lambda n: 2 * n + 2),
    "recall": (recall, 20, 80, lambda n: 2 * n + 2 * ((n + 1) // 2)),
}
CHANCE = {"majority": 0.25, "recall": 0.1}  # what guessing gets; of the others next to nothing
PAPER = ("copy", "reverse", "addition")  # on which the ordering is judged


def measure_of(task):
    return "accuracy" if task == "recall" else "exact"


def batch(task, lengths, rng):
    """A sample of a task for each length: tokens and targets, int64 (B, T). Targets of x, of recall's questions, and of the padding at the right are -1."""
    rows = []
    for n in lengths:
        x, y = TASKS[task][0](rng, n)
        rows.append(([BOS, *x, SEP, *y], [*[-1] * (len(x) + 1), *(token if token not in KEYS else -1 for token in y), EOS]))
    T = max(len(tokens) for tokens, _ in rows)
    return tuple(torch.tensor([row + [fill] * (T - len(row)) for row in part]) for part, fill in zip(zip(*rows), (EOS, -1)))


def training_batch(task, seed, step, batch_size):
    """Batch number `step` of a run, lengths uniform in 1 .. the longest trained: a function of these four."""
    rng = random.Random(f"{task} {seed} {step}")
    return batch(task, rng.choices(range(1, TASKS[task][1] + 1), k=batch_size), rng)


# ---------------------------------------------------------------------------------------------------------------------
# A run: train, and test at every length.

def config_of(task, pos, shape):
    """A run's GPTConfig: made for the longest trained sample, or, where positions are looked up in a table, for the longest tested one."""
    _, trained, tested, tokens = TASKS[task]
    return GPTConfig(pos=pos, **shape, block_size=tokens(tested if POSITIONS[pos].bounded else trained) + 2, vocab_size=KEYS.stop if task == "recall" else len(SYMBOLS))


def train(model, task, seed, steps, batch_size, learning_rate, warmup, device, dtype):
    """Train a GPT in place; returns the mean loss in nats of the last tenth of the steps. The rate rises over `warmup` steps and falls linearly over the last fifth."""
    config.prepare_device(device)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    last = torch.zeros((), device=device)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1, (step + 1) / warmup, (steps - step) / (0.2 * steps))
        x, y = (part.to(device) for part in training_batch(task, seed, step, batch_size))
        with config.autocast(device, dtype):
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps * 9 // 10:
            last += loss.detach()
    model.eval()
    if not math.isfinite(loss := last.item() / (steps - steps * 9 // 10)):
        raise UserError(f"{task} with --pos={model.config.pos}, seed {seed}: the loss is not finite; try --dtype=float32, or another number of --steps")
    return loss


@torch.no_grad()
def score(read, task, samples, device, dtype=torch.float32):
    """A row per length 1 .. the longest tested: "exact" is the share of samples that are all right, "accuracy" that of y's scored tokens, <eos> apart.

    read: a GPT, or any function from tokens (B, T) to logits (B, T, V). Tokens are named by argmax after the right ones before them. That is no easier than decoding greedily:
    until the first mistake both read the same, so a sample is all right in the one exactly when it is in the other.
    """
    rows = []
    for n in range(1, TASKS[task][2] + 1):
        x, y = (part.to(device) for part in batch(task, [n] * samples, random.Random(f"{task} test {n}")))
        with config.autocast(device, dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore", PastTrainedLength)
            right = read(x).argmax(-1) == y
        rows.append({"length": n, "exact": (right | (y < 0)).all(1).float().mean().item(), "accuracy": right[(y >= 0) & (y != EOS)].float().mean().item()})
    return rows


def run(task, pos, seed, cfg, file):
    """Train and test one run, or read what it left: its rows, which stay in the file."""
    shape, training, samples = BUDGETS[cfg.budget]
    training, settings = training | ({"steps": cfg.steps} if cfg.steps else {}), config_of(task, pos, shape)
    first = zlib.crc32(training_batch(task, seed, 0, training["batch_size"])[0].numpy().tobytes())  # another way of drawing samples makes another run
    key = {"model": asdict(settings), "training": training, "samples": samples, "first_batch": first}
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] != key:
            raise UserError(f"{file} was made with other settings: remove it, or choose other --runs")
        return kept["rows"]
    device, began = config.pick_device(cfg.device), time.perf_counter()
    dtype = config.pick_dtype(cfg.dtype, device)
    dtype = torch.float32 if dtype == torch.float16 else dtype  # float16 would want a loss scaler
    torch.manual_seed(seed)
    model = GPT(settings)
    loss = train(model, task, seed, **training, device=device, dtype=dtype)
    rows = [{"task": task, "pos": pos, "seed": seed, **row} for row in score(model, task, samples, device, dtype)]
    seconds = round(time.perf_counter() - began)
    file.with_suffix(".tmp").write_text(json.dumps({"key": key, "seconds": seconds, "loss": loss, "rows": rows}) + "\n", encoding="utf-8")
    file.with_suffix(".tmp").rename(file)
    print(f"   {seconds} s; loss {loss:.3f}, {measure_of(task)} {statistics.fmean(mean_of(rows, task, pos, False).values()):.3f} in length, "
          f"{statistics.fmean(mean_of(rows, task, pos, True).values()):.3f} beyond", flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# What came out.

def mean_of(rows, task, pos, beyond):
    """Seed -> the task's measure, its mean over the lengths that were trained, or over those beyond."""
    values = {}
    for row in rows:
        if (row["task"], row["pos"]) == (task, pos) and (row["length"] > TASKS[task][1]) == beyond:
            values.setdefault(row["seed"], []).append(row[measure_of(task)])
    return {seed: statistics.fmean(v) for seed, v in values.items()}


def cell(values):
    """Mean and interval as text."""
    mean, half = interval(list(values))
    return f"{mean:.3f}" + (f" ± {half:.3f}" if math.isfinite(half) else "")


def reciprocal_ranks(rows, tasks, schemes):
    """Scheme -> 1 / its rank by the mean measure beyond the trained length, averaged over the tasks; schemes that are equal share the middle one of their ranks."""
    ranks = {pos: [] for pos in schemes}
    for task in tasks:
        means = {pos: statistics.fmean(mean_of(rows, task, pos, True).values()) for pos in schemes}
        for pos in schemes:
            others = [means[other] - means[pos] for other in schemes if other != pos]
            ranks[pos].append(1 + sum(d > 0 for d in others) + sum(d == 0 for d in others) / 2)
    return {pos: statistics.fmean(1 / rank for rank in r) for pos, r in ranks.items()}


def judge(rows, tasks, schemes):
    """Ordering 11 as (passed, line), or None without its schemes and tasks: NoPE and T5 above RoPE and learned, beyond the trained length, averaged over the paper's tasks, seed by seed."""
    pairs, tasks = (("nope", "t5"), ("rope", "learned")), [task for task in PAPER if task in tasks]
    if not tasks or not {pos for pair in pairs for pos in pair} <= set(schemes):
        return None
    values = {pos: [mean_of(rows, task, pos, True) for task in tasks] for pair in pairs for pos in pair}
    above, below = ({seed: statistics.fmean(v[seed] for pos in pair for v in values[pos]) for seed in values[pair[0]][0]} for pair in pairs)
    mean, half = interval([above[seed] - below[seed] for seed in above])
    passed = math.isfinite(half) and mean - half > 0
    return passed, (f"11. nope and t5 above rope and learned, exact match beyond the trained length, mean of {', '.join(tasks)}: {mean:+.3f} ± {half:.3f}, > 0: {'pass' if passed else 'FAIL'}"
                    + ("" if passed or math.isfinite(half) else " (one seed has no interval)"))


def table(rows, tasks, schemes, beyond):
    """A Markdown table: a line per task, a column per scheme, mean and interval over the seeds."""
    lines = ["| | lengths | " + " | ".join(schemes) + " |", "|" + "---|" * (len(schemes) + 2)]
    for task in tasks:
        _, trained, tested, _ = TASKS[task]
        lines.append(f"| {task} | {f'{trained + 1} to {tested}' if beyond else f'1 to {trained}'} | " + " | ".join(cell(mean_of(rows, task, pos, beyond).values()) for pos in schemes) + " |")
    return "\n".join(lines)


def shots(rows, schemes):
    """A Markdown table of recall: the share of right answers by the number of shots."""
    counts = (1, 5, 10, 20, 30, 40, 60, 80)
    lines = ["| | " + " | ".join(map(str, counts)) + " |", "|" + "---|" * (len(counts) + 1)]
    for pos in schemes:
        lines.append(f"| {pos} | " + " | ".join(cell(row["accuracy"] for row in rows if (row["task"], row["pos"], row["length"]) == ("recall", pos, n)) for n in counts) + " |")
    return "\n".join(lines)


def series_of(rows, task, schemes):
    """Scheme -> [(length, mean, half-width of the interval), ...]."""
    return {pos: [(n, *interval([row[measure_of(task)] for row in rows if (row["task"], row["pos"], row["length"]) == (task, pos, n)])) for n in range(1, TASKS[task][2] + 1)] for pos in schemes}


def picture(rows, tasks, schemes, file, note):
    """A panel per task: the measure by length, a line per scheme with its interval as a band, drawn to a PNG."""
    if not (plt := pyplot(file)):
        return
    wide = min(4, len(tasks))
    high = -(-len(tasks) // wide)
    figure, axes = plt.subplots(high, wide, figsize=(max(6, 4 * wide), 3.4 * high + 0.6), squeeze=False, layout="constrained")
    for panel in axes.flat[len(tasks):]:
        panel.axis("off")
    for task, panel in zip(tasks, axes.flat):
        for i, (pos, line) in enumerate(series_of(rows, task, schemes).items()):
            x, mean, half = zip(*line)
            panel.plot(x, mean, color=f"C{i % 10}", label=pos)
            panel.fill_between(x, [max(0, m - h) for m, h in zip(mean, half)], [min(1, m + h) for m, h in zip(mean, half)], color=f"C{i % 10}", alpha=0.15, linewidth=0)
        panel.axvline(TASKS[task][1] + 0.5, color="gray", linestyle="--", linewidth=1)
        panel.axhline(CHANCE.get(task, 0), color="gray", linestyle=":", linewidth=1)
        panel.set(title=task, ylim=(-0.03, 1.03), xlabel="shots" if task == "recall" else "length", ylabel="share of answers right" if task == "recall" else "exact match")
        panel.grid(alpha=0.3)
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle("Trained up to the dashed line; dotted: chance", fontsize=9)
    figure.supxlabel(note, fontsize=7, color="gray")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"{file} is drawn")


def main():
    cfg, *_ = config.parse(TasksConfig, about=__doc__)
    schemes, tasks, rows = list(dict.fromkeys(cfg.pos)), list(dict.fromkeys(cfg.tasks or TASKS)), []
    (shape, training, samples), folder = BUDGETS[cfg.budget], Path(cfg.runs) / cfg.budget
    folder.mkdir(parents=True, exist_ok=True)
    Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
    counted = 0
    for seed in range(1, cfg.seeds + 1):
        for task in tasks:
            for pos in schemes:
                counted += 1
                print(f"{task}, {pos}, seed {seed} ({counted} of {cfg.seeds * len(tasks) * len(schemes)})", flush=True)
                rows += run(task, pos, seed, cfg, folder / f"{task}-{pos}-{seed}.json")
    steps, largest = cfg.steps or training["steps"], max(sum(p.numel() for p in GPT(config_of("copy", pos, shape)).parameters()) for pos in schemes)
    note = f"{config.provenance(config.pick_device(cfg.device))}; {cfg.seeds} seed{'s' * (cfg.seeds > 1)}, {samples} samples of each length"
    command = " ".join(["python experiments/tasks.py", *sys.argv[1:]])
    judged, ranks = judge(rows, tasks, schemes), reciprocal_ranks(rows, tasks, schemes)
    lines = ["# Length generalisation", "", f"`{command}`: {note}.", "",
             f"Each run: {largest / 1e6:.2f} M parameters at most ({', '.join(f'{k}={v}' for k, v in shape.items())}), {steps:,} updates of {training['batch_size']} samples by AdamW at "
             f"{training['learning_rate']:g}, the same samples for all schemes. Exact match, and of recall the share of right answers; each a mean over lengths, then mean over the seeds and 95 % interval. "
             "Guessing gets " + ", ".join(f"{chance:g} of {task}" for task, chance in CHANCE.items()) + ", and next to nothing of the others. "
             "The vectors that `learned` has beyond the trained length stay as they were drawn.", "",
             "## Beyond the trained length", "", table(rows, tasks, schemes, True), "", "![by length](tasks.png)", "", "## Within it", "", table(rows, tasks, schemes, False), ""]
    if "recall" in tasks:
        lines += ["## Recall by the number of shots", "", "Trained on 1 to 20.", "", shots(rows, schemes), ""]
    lines += ["## Orderings", "", *([f"- {judged[1]}"] if judged else []), "- Reported, not judged: mean reciprocal rank over the tasks, beyond the trained length: "
              + ", ".join(f"{pos} {ranks[pos]:.2f}" for pos in sorted(schemes, key=lambda pos: -ranks[pos])) + ". The paper's, over its ten: nope 0.69, t5 0.55, alibi 0.50, rope 0.33, learned 0.22.", ""]
    text, out = "\n".join(lines), Path(cfg.out_dir) / "tasks"
    Path(f"{out}.md").write_text(text, encoding="utf-8")
    Path(f"{out}.json").write_text(json.dumps({"command": command, "note": note, "orderings": [judged[1]] if judged else [], "reciprocal_ranks": ranks, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print("\n" + text)
    picture(rows, tasks, schemes, f"{out}.png", note)
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
