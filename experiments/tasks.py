"""Which position schemes generalise to longer samples of nine algorithmic tasks?

A sample is `<bos> x <sep> y <eos>`. Exact match is the fraction of samples whose y and `<eos>` are
all right (after Kazemnejad et al. 2023); then a mean over the lengths in training, 1 to 20, or
beyond, 21 to 40 (addition-8, scratchpad and carries: 1 to 8, and 9 to 16). A guess scores 0.25 in
majority, else next to nothing.
Training samples are a function of (task, seed, step). Test samples are the same for all runs, and
so few of the shortest that training has seen them.

Trap: models are built for the training length, so that T5's last bucket occurs in training. Only
`learned` is built for the longest test: its embeddings beyond training keep their initial values.
"""

import random
from statistics import fmean, multimode

import torch
from torch.nn.utils.rnn import pad_sequence

from model import GPT, POSITIONS, GPTConfig
from nanolong.devices import prepare_device
from nanolong.errors import UserError

TITLE = "Length generalisation"
BUDGETS = {
    "cpu": "layers=4 heads=4 width=96 batch=64 steps=1500 rate=1e-3 warmup=100 samples=64",
    "gpu": "layers=4 heads=4 width=128 batch=256 steps=6000 rate=5e-4 warmup=200 samples=256",
    "try": "layers=2 heads=2 width=32 batch=8 steps=20 rate=1e-3 warmup=5 samples=4",
}
# The longest in training and in the tests; tokens of x and y, for each unit of length and more.
TASKS = {
    "copy": (20, 40, 2, 0),  # x: digits, as many as the length; y: the same
    "reverse": (20, 40, 2, 0),  # y: the same in reverse order
    "addition": (20, 40, 3, 2),  # x: two numbers, least significant digit first; y: their sum
    "addition-8": (8, 16, 3, 2),
    "scratchpad": (8, 16, 8, 3),  # y: before the sum, each place: digits, digit of the sum, carry
    "carries": (8, 16, 6, 3),  # y: the same without the digits of x
    "majority": (20, 40, 1, 1),  # x: letters; y: the one that occurs most. Needs no order.
    "span": (20, 40, 2, 2),  # x: digits with two markers, as in 83|19|4; y: those between them
}
SCHEMES = ("nope", "t5", "rope", "learned", "alibi")
ARMS = {f"{task}/{pos}": [] for task in TASKS for pos in SCHEMES}
ARMS |= {"majority/sinusoidal": [], "span/sinusoidal": []}
MEASURES = dict.fromkeys(("exact beyond", "exact within", "exact"), "fraction of samples")
TABLES = [
    (
        "Exact match beyond the training length, and within it",
        ["exact beyond", "exact within"],
        ["0"],
    )
]
TABLES += [("Exact match by length", "exact", "4 8 9 12 16 20 21 30 40".split())]
CLAIMS = """
# Mean over copy, reverse and addition (Kazemnejad et al. 2023)
exact beyond: nope-and-t5 > rope-and-learned
# Mean over the schemes
exact beyond: scratchpad > addition-8
exact beyond: carries > addition-8
"""
LETTERS = range(10, 14)  # a digit is its own token id
PLUS, MARK, COMMA, BOS, SEP, EOS = range(14, 20)
VOCAB_SIZE = 20


def make_sample(task, rng, n):
    """Make x and y of a length n, sequences of token ids. rng: a random.Random."""
    if task == "majority":
        x = rng.choices(LETTERS, k=n)
        while len(multimode(x)) > 1:
            x = rng.choices(LETTERS, k=n)
        return x, multimode(x)
    digits = rng.choices(range(10), k=n)
    if task == "copy":
        return digits, digits
    if task == "reverse":
        return digits, digits[::-1]
    if task == "span":
        start, end = sorted(rng.sample(range(n + 1), 2))
        x = [*digits[:start], MARK, *digits[start:end], MARK, *digits[end:]]
        return x, digits[start:end]
    others = rng.choices(range(10), k=n)
    return [*digits, PLUS, *others], add(task, digits, others)


def add(task, a, b):
    """Return y of the sum of two numbers, the least significant digit first."""
    places, total = [], []
    carry = 0
    for i, j in zip(a, b, strict=True):
        carry, digit = divmod(i + j + carry, 10)
        operands = [i, j] if task == "scratchpad" else []
        places += [*operands, digit, carry, COMMA]
        total.append(digit)
    written = [*places, MARK] if task in ("scratchpad", "carries") else []
    return [*written, *total, carry]


def make_batch(task, lengths, rng):
    """Make a sample of each length. Returns inputs and targets, int64 (B, T), -1: not scored."""
    inputs, targets = [], []
    for n in lengths:
        x, y = make_sample(task, rng, n)
        inputs.append(torch.tensor([BOS, *x, SEP, *y]))
        targets.append(torch.tensor([-1] * (len(x) + 1) + [*y, EOS]))
    return pad_sequence(inputs, True, EOS), pad_sequence(targets, True, -1)


def make_model(pos, arm, block_size, vocab_size):
    """Make a GPT of the sizes of an arm's budget."""
    torch.manual_seed(arm.seed)
    sizes = {"n_layer": arm.b.layers, "n_head": arm.b.heads, "n_embd": arm.b.width}
    config = GPTConfig(pos=pos, **sizes, block_size=block_size, vocab_size=vocab_size)
    return GPT(config).to(arm.device)


def train_on_samples(model, make_batch, steps, learning_rate, warmup, device, weight_decay=0.01):
    """Train a model in place, in float32, on make_batch(step): inputs and targets.

    The learning rate rises over `warmup` steps and falls linearly over the last fifth.
    """
    rates = []
    for step in range(steps):
        rates.append(learning_rate * min(1, (step + 1) / warmup, (steps - step) / (0.2 * steps)))
    adamw = torch.optim.AdamW(model.parameters(), learning_rate, (0.9, 0.95), 1e-8, weight_decay)
    take_steps(model, make_batch, [adamw], rates, device)


def take_steps(model, make_batch, optimizers, rates, device):
    """Take a training step at each learning rate."""
    prepare_device(device, deterministic=True)
    model.train()
    for step, rate in enumerate(rates):
        x, y = make_batch(step)
        loss = model(x.to(device), y.to(device))
        loss.backward()
        update_weights(model, optimizers, rate)
    if not loss.isfinite():
        raise UserError("the loss is not finite: lower the learning rate of the budget")
    model.eval()


def update_weights(model, optimizers, learning_rate):
    """Clip the norm of the gradients to 1, update the weights and clear the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()


def measure(arm):
    task, pos = arm.name.split("/")
    trained, tested, per_unit, more = TASKS[task]
    b = arm.b

    def training_batch(step):
        rng = random.Random(f"{task} {arm.seed} {step}")
        return make_batch(task, rng.choices(range(1, trained + 1), k=b.batch), rng)

    # x and y, <bos> and <sep>; <eos> is only a target
    n_tokens = per_unit * (tested if POSITIONS[pos].bounded else trained) + more + 2
    model = make_model(pos, arm, n_tokens, VOCAB_SIZE)
    train_on_samples(model, training_batch, b.steps, b.rate, b.warmup, arm.device, 0.05)
    scores = []
    for n in range(1, tested + 1):
        x, y = make_batch(task, [n] * b.samples, random.Random(f"{task} test {n}"))
        with torch.no_grad():
            right = model(x.to(arm.device)).argmax(-1).cpu() == y
        # Tokens are predicted after the right ones, which up to the first mistake are its own.
        scores.append((right | (y < 0)).all(1).float().mean().item())
    found = {("exact", n): value for n, value in enumerate(scores, 1)}
    found |= {"exact within": fmean(scores[:trained]), "exact beyond": fmean(scores[trained:])}
    return found


def derive(board):
    """Average over the tasks and schemes that were run, for the claims."""
    groups = {task: ([task], SCHEMES) for task in ("addition-8", "scratchpad", "carries")}
    for pair in (("nope", "t5"), ("rope", "learned")):
        groups["-and-".join(pair)] = ("copy", "reverse", "addition"), pair
    for group, (tasks, schemes) in groups.items():
        values = [board.of(f"{t}/{pos}", "exact beyond") for t in tasks for pos in schemes]
        values = [of_seeds for of_seeds in values if of_seeds]
        for seed in set.intersection(*map(set, values)) if values else ():
            yield group, seed, "exact beyond", 0, fmean(of_seeds[seed] for of_seeds in values)
