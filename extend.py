"""Stretch a trained checkpoint to longer text, fine-tune it there, and measure what that bought.

    python extend.py out/python-rope --method=yarn --factor=4                  -> out/python-rope-yarn4
    python extend.py out/python-rope --method=pi --factor=2 --max_iters=0      only stretches
    python extend.py out/python-rope --factor=4 --pose=true                    fine-tunes in windows of the trained length (PoSE)
    python extend.py out/python-rope --method=drope --factor=4                 drops RoPE, recalibrates at the trained length
    python extend.py out/python-rope --factor=4 --init_from=resume             goes on after a stop

load -> stretch -> measure -> train -> measure. RoPE's methods are in stretch.py (STRETCH), what other schemes have in their classes. What is not said is taken from the run that is
stretched: its data, its optimizer, as many tokens an iteration, and 0.3 of its learning rate; matrices are not decayed. Stretching again multiplies
the factors and replaces the method; base and trained length stay the original ones.
"""
import config  # first: it says in one sentence that a Python is too old
import json
from dataclasses import dataclass, fields
from pathlib import Path

import data
from checkpoint import checkpoint_folder, read_meta, steps
from config import UserError
from evaluate import EvaluateConfig, fit_scale, measure, table, wavelengths
from model import ATTEND, GPT, STRETCH, GPTConfig, NoPE, Refused
from stretch import at_trained_length
from train import TrainConfig, agree, finish, resumed


@dataclass
class ExtendConfig(TrainConfig):
    method: str = "yarn"        # of rope a name in stretch.py; none, pi, dynamic-pi, clamp or scale of the others: the README's table says which
    factor: float = 4.0         # how many times longer
    options: str = ""           # of the method, as in --options=ramp=paper,beta_fast=16, or a .json file of them
    pose: bool = False          # fine-tune in windows of the trained length, in two parts whose positions lie within the target (PoSE)
    plot: str = ""              # draw rope's wavelengths before and after, beside both lengths, to this PNG and in the terminal
    max_iters: int = 60         # iterations of fine-tuning; 0: only stretch
    learning_rate: float = 0.0  # at the peak; by default 0.3 of the run's
    batch_size: int = 1         # windows in a micro-batch of one process; by default as many tokens an iteration as the run's
    warmup_iters: int = 10      # iterations of linear rise to the peak
    weight_decay: float = 0.0   # of matrices and embeddings
    eval_interval: int = 1000   # iterations between evaluations, each followed by a checkpoint; the first and last step have one anyway

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.factor <= 1e6:
            raise UserError(f"factor={self.factor} does not stretch: give a number of at least 1, and at most a million")
        if self.plot and not self.plot.endswith(".png"):
            raise UserError(f"--plot={self.plot} must end in .png")

    def windows(self, model):
        return model.config.trained_length if at_trained_length(self.method, self.pose) else model.config.block_size, model.config.block_size if self.pose else 0

    def method_options(self):
        """The options as a dict: numbers, true or false, or words; of a file, whatever JSON it holds."""
        if self.options.endswith(".json"):
            try:
                out = json.loads(Path(self.options).read_text(encoding="utf-8"))
                if not isinstance(out, dict) or {"self", "method", "factor"} & out.keys():
                    raise ValueError("it holds no object of options")
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(f"--options={self.options} cannot be read ({error}): give a JSON file such as {{\"long_factor\": [...]}}") from None
            return out
        out = {}
        for item in filter(None, self.options.split(",")):
            name, equals, value = item.partition("=")
            if not equals or not name.isidentifier() or name in ("self", "method", "factor"):
                raise UserError(f"--options={self.options}: options are given as NAME=VALUE,NAME=VALUE")
            try:
                out[name] = float(value)
            except ValueError:
                out[name] = {"true": True, "false": False}.get(value.lower(), value)
        return out


def run_defaults(values, paths):
    """What the command line leaves open: on resume as the run had it, else taken over from the run that is stretched."""
    if len(paths) != 1:
        raise UserError("give the run folder to stretch, as in python extend.py out/python-rope --method=yarn --factor=4")
    folder = checkpoint_folder(paths[0])
    method, factor = values.get("method", "yarn"), values.get("factor", 4.0)
    run = Path(paths[0]) if steps(paths[0]) else folder.parent
    out_dir = values.get("out_dir") or f"{run}-{method}{factor:g}"
    if values.get("init_from") == "resume" and steps(out_dir):
        return {**(read_meta(steps(out_dir)[-1]).get("train") or {}), "out_dir": out_dir, "init_from": "scratch", "plot": ""}
    meta = read_meta(folder)
    was, stretch = meta.get("train") or {}, meta["config"].get("stretch") or {"factor": 1.0}
    if not was and not {"dataset", "learning_rate"} <= values.keys():
        raise UserError(f"{paths[0]} does not say how it was trained: give --dataset and --learning_rate")
    own = {"method", "factor", "options", "out_dir", "init_from", "max_iters", "warmup_iters", "weight_decay", "eval_interval", "min_lr", "compile", "learning_rate", "plot", "pose", "min_doc", "upsample_docs"}
    kept = {f.name: was[f.name] for f in fields(TrainConfig) if f.name in was and f.name not in own} if was else {"bos": meta.get("bos") is not None}
    if was and 1 <= factor <= 1e6:
        kept["learning_rate"] = was["learning_rate"] * (1 if "method" in was else 0.3)
        reach = 1 if at_trained_length(was.get("method"), was.get("pose")) else stretch["factor"]  # of the parent's windows, in trained lengths
        shorter = (1 if at_trained_length(method, values.get("pose")) else factor * stretch["factor"]) / reach
        kept["batch_size"] = max(1, round(was["batch_size"] / shorter))  # micro-batches keep their tokens
        kept["gradient_accumulation_steps"] = max(1, round(was["gradient_accumulation_steps"] * was["batch_size"] / shorter / kept["batch_size"]))
    return {**kept, "out_dir": out_dir}


def fitted(method, options):
    """Whether the scale of the scores is to be found, not given."""
    return options.get("scale") == "fit" or method == "scale" and "scale" not in options


def report(model, cfg, when):
    """Print the loss by position at the original and at the stretched length."""
    how = EvaluateConfig(protocol=("last-quarter", "position"), dataset=cfg.dataset, dtype=cfg.dtype)
    lengths = sorted({model.config.trained_length, model.config.block_size})
    print(table(measure({when: model.to(config.pick_device(cfg.device))}, how, lengths), lengths), flush=True)


def main():
    gpt, cfg, given, paths = config.parse(GPTConfig, ExtendConfig, about=__doc__, presets=True, paths="the run folder, or step folder, to stretch", defaults=run_defaults)
    rank, _ = config.join_processes(cfg.device)
    parent = GPT.load(paths[0])
    agree(parent, gpt, given)
    if cfg.plot and not getattr(parent.pos, "rotary_dim", 0):
        raise UserError(f"--plot draws the wavelengths that rope turns by, and this --pos={parent.config.pos} turns nothing: leave it out")
    options = cfg.method_options()
    fit, model = fitted(cfg.method, options), resumed(cfg, gpt, set())
    if model:
        total = cfg.factor * (parent.config.stretch or {"factor": 1.0})["factor"]
        if fit:
            options["scale"] = (model.config.stretch or {"options": {}})["options"].get("scale")
        asked = {"parent": parent.folder.parent.name, "method": cfg.method, "factor": total, "options": options}
        has = {**(model.config.stretch or {}), "parent": Path(model.meta.get("parent", "")).parent.name}
        for name, value in asked.items():
            if has.get(name) != value:
                raise UserError(f"{model.folder} was made with {name} {has.get(name) or 'none'}, and you ask for {value or 'none'}: leave the setting out, or choose another --out_dir")
    elif steps(cfg.out_dir):
        raise UserError(f"{cfg.out_dir} holds a run already: go on with it by --init_from=resume, or choose another --out_dir")
    else:
        model, pretraining = parent, parent.meta.get("pretraining_tokens") or parent.meta.get("tokens", 0)
        model.stretch(cfg.method, cfg.factor, **{**options, **({"scale": 1.0} if fit else {})})
        if cfg.max_iters and cfg.method in ATTEND:
            raise UserError(f"method {cfg.method!r} is for evaluation, not for training: give --max_iters=0")
        if cfg.pose and (model.pos.by_index or type(model.pos) is NoPE or cfg.method == "drope"):
            raise UserError(f"--pose skips positions, and {'method drope' if cfg.method == 'drope' else f'--pos={model.config.pos}'} reads none: leave it out")
        if fit:
            scale, losses = fit_scale(model.to(config.pick_device(cfg.device)), data.Dataset(cfg.dataset, cfg.bos).train)
            model.stretch(cfg.method, 1.0, **{**options, "scale": scale})
            if rank == 0:
                print(f"scores multiplied by {scale:.3f}: of {len(losses)} factors the best for the last quarter of {model.config.block_size} tokens of training text, {losses[scale]:.4f} nats in the place of {losses[1.0]:.4f}")
        model.meta = {"parent": str(model.folder), "pretraining_tokens": pretraining, "bos": data.Dataset(cfg.dataset, cfg.bos).bos, "tokenizer": parent.meta.get("tokenizer")}
    spent = cfg.max_iters * cfg.gradient_accumulation_steps * cfg.batch_size * cfg.windows(model)[0]
    if rank == 0:
        pretraining = model.meta.get("pretraining_tokens")
        if cfg.plot:
            model.pos.prepare(model.config.block_size)  # a dynamic method: as it reads the longest text
            Path(cfg.plot).parent.mkdir(parents=True, exist_ok=True)
            wavelengths(STRETCH["none"](model.config.rope_base, model.pos.rotary_dim, 1, 1.0)[0], model.pos.inv_freq, model.config.trained_length, model.config.block_size,
                        cfg.plot, f"{cfg.method}, {model.config.stretch['factor']:g} times {model.config.trained_length} tokens")
        print(f"{model.config.trained_length} -> {model.config.block_size} tokens by {cfg.method}; fine-tuning on {spent:,} tokens, "
              + (f"{spent / pretraining:.2%} of the {pretraining:,} of pretraining" if pretraining else "of an unknown number in pretraining"))
        if cfg.max_iters:
            share = data.Dataset(cfg.dataset, cfg.bos).share_of_long(model.config.block_size)
            print(f"{share:.0%} of the training tokens lie in documents of at least {model.config.block_size} tokens" + ": warning: there is nothing that long to learn from; prepare longer texts" * (share < 0.01))
        if "step" not in model.meta:
            report(model, cfg, "before")
    status = finish(model, cfg)
    if rank == 0 and status == 0 and cfg.max_iters and GPT.load(cfg.out_dir).meta["step"] == cfg.max_iters:
        report(model, cfg, "after")
    return status


if __name__ == "__main__":
    config.main(main, Refused)
