"""A model of 124 M parameters on real, long text: trained at 1,024 tokens on the Python sources of the packages installed beside this program, stretched to 16k and 64k.

    python experiments/long_code.py                    # a GPU: half an hour or more, by the card; stop it when you like, the same command goes on
    python experiments/long_code.py --budget=try       # seconds, to see that it works; its figures mean nothing

Each method is fine-tuned at the target with 0.1, 1 and 10 % of the pretraining tokens (whole updates, so the first may be one), and read at the trained length, at 4, 16 and 64 times it.
Loss in the last quarter of windows that do not overlap, nats per token of held-out files. Results go to results/long_code.md and .json.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import json
import sysconfig
from dataclasses import dataclass
from typing import Literal

import torch

import data
from checkpoint import steps
from config import UserError
from data.prepare import build
from evaluate import loss_by_position
from model import GPT, STRETCH, GPTConfig, Refused
from train import TrainConfig, train


@dataclass
class CodeConfig:
    budget: Literal["gpu", "try"] = "gpu"  # sizes, below
    methods: tuple[str, ...] = ("none", "pi", "ntk", "yarn", "ntk-lceg", "dynamic-yarn")  # of stretch.py
    factors: tuple[int, ...] = (16, 64)    # how many times longer
    tokenizer: str = "gpt2"                # bytes, or a tiktoken encoding
    dataset: str = ""                      # a data set of your own in the place of the packages' sources
    runs: str = "out/long_code"            # where the run folders go
    out_dir: str = "results"               # where long_code.md and .json go
    device: str = "auto"                   # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products

    def __post_init__(self):
        if unknown := [name for name in self.methods if name not in STRETCH]:
            raise UserError(f"there is no method {unknown[0]!r}: choose from {', '.join(STRETCH)}")
        if not self.factors or min(self.factors) <= 1:
            raise UserError("factors must name numbers above 1")


BUDGETS = {  # model; windows an update, updates; span of text that is scored
    "gpu": (dict(n_layer=12, n_head=12, n_embd=768, block_size=1024), 256, 2000, 1 << 19),
    "try": (dict(n_layer=1, n_head=2, n_embd=16, block_size=16), 16, 20, 2048),
}
SHARES = (0.001, 0.01, 0.1)  # of the pretraining tokens


def prepare_code(tokenizer):
    """The data set data/code-<tokenizer>: the sources of the packages that are installed, whole files, some of them validation."""
    name = f"code-{tokenizer}"
    if not data.exists(name):
        root = Path(sysconfig.get_path("purelib"))
        files = {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*.py")) if p.stat().st_size > 1024}
        if len(files) < 100:
            raise UserError(f"{root} holds {len(files)} Python files, too few to learn from: name a data set of yours by --dataset")
        build(name, files, source="Python sources of the installed packages", tokenizer=tokenizer)
    return name


def trained(cfg, name, run, make, windows, length, updates, rate, seed=1):
    """A model trained by train.py's loop, or what is left of it to train; make() gives it as it begins. In eval mode, on the device."""
    micro = max(1, min(windows, 16384 // length)) if cfg.budget == "gpu" else windows
    how = TrainConfig(dataset=name, out_dir=str(run), seed=seed, batch_size=micro, gradient_accumulation_steps=max(1, windows // micro), max_iters=updates, learning_rate=rate, warmup_iters=min(100, updates // 5),
                      eval_interval=10**9, eval_iters=2, device=cfg.device, dtype=cfg.dtype, compile=None if cfg.budget == "gpu" else False)
    if steps(run):
        model, how.init_from = GPT.load(run), "resume"
    else:
        model = make()
    if model.meta.get("step") != updates and train(model, how)["stopped"]:
        raise KeyboardInterrupt
    return model.to(config.pick_device(cfg.device)).eval()


def main():
    cfg, _, _ = config.parse(CodeConfig, about=__doc__)
    shape, windows, updates, span = BUDGETS[cfg.budget]
    name = cfg.dataset or prepare_code(cfg.tokenizer)
    dataset, L, out, base = data.Dataset(name), shape["block_size"], Path(cfg.out_dir), Path(cfg.runs) / f"{cfg.budget}-{Path(cfg.dataset or cfg.tokenizer).name}"
    out.mkdir(parents=True, exist_ok=True)
    device = config.pick_device(cfg.device)
    dtype, lengths, rows = config.pick_dtype(cfg.dtype, device), sorted({L, 4 * L, *(f * L for f in cfg.factors)}), []

    def begin():
        torch.manual_seed(1)
        return GPT(GPTConfig(**shape, vocab_size=dataset.vocab_size))

    def read(model, method, factor, share):
        found = {}
        for n in lengths:
            try:
                nats, tokens = loss_by_position(model, dataset.val, n, span, dtype)
                found[n] = float(nats[n * 3 // 4:].sum() / tokens[n * 3 // 4:].sum())
            except (Refused, UserError) as refusal:
                found[n] = str(refusal)
        rows.append({"method": method, "factor": factor, "share": share, "loss": found})
        print(rows[-1], flush=True)

    trained(cfg, name, base / "base", begin, windows, L, updates, 1e-3)
    read(GPT.load(base / "base").to(device), "untouched", 1, 0)
    for factor in cfg.factors:
        for method in cfg.methods:
            def stretched():
                model = GPT.load(base / "base")
                model.stretch(method, factor)
                model.meta = {"bos": dataset.bos}
                return model

            read(stretched().to(device), method, factor, 0)
            for share in SHARES:
                steps_of_it = max(1, round(share * updates))
                read(trained(cfg, name, base / f"{method}-{factor}-{share:g}", stretched, max(1, windows // factor), factor * L, steps_of_it, 1e-4), method, factor, share)
    command = "python experiments/long_code.py " + " ".join(sys.argv[1:])
    count = sum(p.numel() for p in begin().parameters())
    text = ["# Long code", "", f"`{command.strip()}`: {config.provenance(device)}; {name} {dataset.hash}.", "",
            f"{count / 1e6:.0f} M parameters, pretrained on {updates * windows * L:,} tokens at {L}; {dataset.share_of_long(lengths[-1]):.0%} of the training tokens lie in documents of at least {lengths[-1]:,} tokens. "
            "Last-quarter loss, nats per token.", "", "| method | factor | fine-tuned on | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" * (len(lengths) + 3) + "|"]
    text += [f"| {r['method']} | {r['factor']} | {r['share']:.1%} | " + " | ".join(f"{r['loss'][n]:.4f}" if isinstance(r["loss"][n], float) else "–" for n in lengths) + " |" for r in rows]
    (out / "long_code.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    (out / "long_code.json").write_text(json.dumps({"command": command.strip(), "rows": rows}) + "\n", encoding="utf-8")
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
