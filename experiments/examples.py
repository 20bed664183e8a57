"""Do more examples in a longer prompt help?

A sample has a secret digit for each of a few keys, and shows examples one after another: a key with
its digit, or, in half of them, with a random one. Before each example the model predicts the secret
digit of its key; a guess is right in 0.1. It is trained on L examples and tested on 4L; yarn-tuned
is fine-tuned on 4L. Of budget cpu, the digit shown most often with the key is right in 0.65 at L,
then 0.84, 0.95 and 0.98, which is the most that can be expected.

Trap: an accuracy at 2L is the mean over the examples after L, and so on, but at L after L/2.
"""

from statistics import fmean

import torch

from experiments.tasks import make_model, train_on_samples

TITLE = "More examples in a longer prompt"
BUDGETS = {
    "cpu": "L=16 keys=4 layers=2 heads=4 width=64 steps=600 tuning=60 batch=64 samples=256",
    "try": "L=12 keys=3 layers=1 heads=2 width=16 steps=4 tuning=2 batch=8 samples=8",
}
EXTENSIONS = ("none", "window", "lm-infinite", "self-extend", "yarn", "yarn-tuned")  # of RoPE
ARMS = {name: [] for name in [f"rope/{name}" for name in EXTENSIONS] + ["nope/none", "alibi/none"]}
MEASURES = {"accuracy": "fraction of digits"}
TABLES = [("Fraction of right digits", "accuracy", ["L", "2L", "3L", "4L"])]
CLAIMS = "\n".join(f"accuracy: {arm}@4L > {arm}@L" for arm in ARMS)
CLAIMS += """
accuracy: rope/yarn@4L > rope/none@4L
accuracy: rope/yarn@4L > rope/window@4L
accuracy: rope/yarn-tuned@4L > rope/window@4L
"""


def make_examples(n, keys, batch_size, seed):
    """Make samples of n examples: a key, with its secret digit as the target, and the digit shown.

    Returns inputs and targets, int64 (B, 2n). Ids: digits, keys, then each key with each digit.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(keys, (batch_size, n), generator=generator)
    digit_of = torch.randint(10, (batch_size, keys), generator=generator)
    secret = digit_of.gather(1, chosen)
    is_right = torch.rand((batch_size, n), generator=generator) < 0.5
    shown = torch.randint(10, (batch_size, n), generator=generator).where(~is_right, secret)
    inputs = torch.stack((10 + chosen, 10 + keys + 10 * chosen + shown), 2).flatten(1)
    return inputs, torch.stack((secret, torch.full_like(secret, -1)), 2).flatten(1)


def measure(arm):
    b, L = arm.b, arm.b.L
    pos, extension = arm.name.split("/")
    seed = arm.seed << 32

    def short_batch(step):
        return make_examples(L, b.keys, b.batch, seed + step)

    def long_batch(step):  # on samples that come after pretraining's
        return make_examples(4 * L, b.keys, b.batch // 4, seed + b.steps + step)

    model = make_model(pos, arm, 2 * L, 10 + 11 * b.keys)
    train_on_samples(model, short_batch, b.steps, 3e-3, 50, arm.device)
    method = {"window": "lm-infinite", "yarn-tuned": "yarn"}.get(extension, extension)
    model.extend(method, 4, **({"sinks": 0} if extension == "window" else {}))
    if extension == "yarn-tuned":
        train_on_samples(model, long_batch, b.tuning, 5e-4, 50, arm.device)
    x, y = make_examples(4 * L, b.keys, b.samples, 1)
    with torch.no_grad():
        predicted = torch.cat([model(part.to(arm.device)).argmax(-1).cpu() for part in x.split(64)])
    right = (predicted == y)[:, 0::2].float().mean(0).tolist()
    starts = {L: L // 2, 2 * L: L, 3 * L: 2 * L, 4 * L: 3 * L}
    return {("accuracy", end): fmean(right[start:end]) for end, start in starts.items()}
