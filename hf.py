"""Import public checkpoints from Hugging Face's format, and export ours to it.

    python hf.py import HuggingFaceTB/SmolLM2-135M out/smollm2     downloaded from huggingface.co
    python hf.py import SmolLM2-135M/ out/smollm2                  a folder
    python hf.py import SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2
    python hf.py import ../nanoGPT/out/ckpt.pt out/nanogpt
    python hf.py export out/rope-yarn4 exported/
    python hf.py export out/rope-yarn4 exported.gguf --store=q8_0
    python hf.py extend HuggingFaceTB/SmolLM2-135M smollm2.gguf --method=yarn --factor=4

import: a model becomes a run folder, for extend.py, evaluate.py and sample.py.
export: a run folder becomes a folder that transformers' AutoModelForCausalLM loads, with the same
logits and the tokenizer files that it was imported with, or a GGUF file for llama.cpp.
extend: both in one go, without a run folder, with a longer context and without training.

All compare the logits with transformers', which has to be installed (pip install -r
requirements-hf.txt). docs/huggingface.md lists the families. What has no equivalent on the other
side is refused. Only JSON, safetensors and GGUF are read, and of a ckpt.pt tensors and numbers.
"""

from nanolong import settings  # isort: skip (first: it refuses an old Python)

import functools
import importlib.util
from dataclasses import dataclass
from typing import Literal

from model import GPT, POSITIONS
from nanolong import entry
from nanolong.errors import require, run_main


@dataclass
class HFConfig:
    # type of the matrices. import: float32 or bfloat16, which takes half the space and is kept by
    # a model that has it; export: type in a GGUF file, as in the checkpoint by default
    store: Literal["auto", "float32", "bfloat16", "float16", "q8_0"] = "auto"
    # take the tokenizer files of this Hugging Face folder in place of the model's own; export: also
    # none, which then works on token ids only
    tokenizer: str = ""
    # import, extend: the context length in tokens, if the files say another one
    context_length: int = 0
    # compare the logits with transformers'
    verify: bool = True
    # export: take the checkpoint with the best validation loss of a run folder, not the newest
    best: bool = False
    # export: Python files, each with one scheme of your own, for a checkpoint trained with it
    entry: tuple[str, ...] = ()
    # extend: method, factor and the method's options, as of extend.py
    method: str = "yarn"
    factor: float = 4.0  # extend: how many times longer the context gets
    options: str = ""  # extend: beta_fast=16 for example, or a .json file of them


# setting -> what it is for
PURPOSES = {"best": ("export",), "entry": ("export",), "context_length": ("import", "extend")}
PURPOSES |= dict.fromkeys(("method", "factor", "options"), ("extend",))


def main(argv=None):
    paths = "import SOURCE out/NAME, export out/NAME TARGET, or extend SOURCE TARGET"
    args = settings.parse(cfg=HFConfig, paths=paths, argv=argv)
    cfg = args.cfg
    require(
        len(args.paths) == 3 and args.paths[0] in ("import", "export", "extend"),
        f"hf.py needs a direction and two paths: say hf.py {paths} (SOURCE is a folder, ORG/NAME, "
        "a .gguf or a ckpt.pt, and TARGET a folder or FILE.gguf)",
    )
    for name in ("transformers", "gguf"):
        require(
            importlib.util.find_spec(name),
            f"the {name} package is not installed: pip install -r requirements-hf.txt",
        )
    from nanolong.hub import rope, transfer

    direction, source, target = args.paths
    for name in sorted(args.given & PURPOSES.keys()):
        is_used = direction in PURPOSES[name]
        require(is_used, f"--{name} is not for {direction}: leave it out")
    if direction == "extend":
        options = settings.read_options(cfg.options)
        rope.check_method(cfg.method, options)
        lengthen = functools.partial(GPT.extend, method=cfg.method, factor=cfg.factor, **options)
        words = (cfg.store, cfg.tokenizer, cfg.verify, cfg.context_length)
        transfer.extend_to(GPT, source, target, lengthen, *words)
        return
    if direction == "import":
        known = cfg.store in ("auto", "float32", "bfloat16")
        require(known, f"--store={cfg.store} is for export: give float32 or bfloat16")
        options = (cfg.store, cfg.tokenizer, cfg.verify, cfg.context_length)
        transfer.import_to(GPT, source, target, *options)
        return
    entry.load_entries(cfg.entry, POSITIONS)
    model = GPT.load(source, cfg.best, dtype=None)
    transfer.export_to(model, target, cfg.verify, cfg.tokenizer, cfg.store)


if __name__ == "__main__":
    run_main(main)
