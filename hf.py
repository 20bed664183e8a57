"""Import public checkpoints from Hugging Face's format, extend them, and export ours to it.

    python hf.py import HuggingFaceTB/SmolLM2-135M out/smollm2     downloaded from huggingface.co
    python hf.py import SmolLM2-135M/ out/smollm2                  a folder
    python hf.py import SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2
    python hf.py import ../nanoGPT/out/ckpt.pt out/nanogpt
    python hf.py export out/rope-yarn4 exported/
    python hf.py extend SmolLM2-135M/ longer/ --method=yarn --factor=4

import: a model becomes a run folder, for extend.py, evaluate.py and sample.py.
export: a run folder becomes a folder that transformers' AutoModelForCausalLM loads, with the same
logits and the tokenizer files that it was imported with. llama.cpp makes a GGUF file of it.
extend: a folder or a GGUF file gets a longer context in a second, of any size and quantization. Its
settings change, and its weights do not.

The first two compare the logits with transformers', which has to be installed (pip install -r
requirements-hf.txt). docs/checkpoints.md lists the families. What has no equivalent on the other
side is refused. Only JSON, safetensors and GGUF are read, and of a ckpt.pt tensors and numbers.
"""

from nanolong import settings  # isort: skip (first: it refuses an old Python)

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from model import GPT, POSITIONS
from nanolong import entry
from nanolong.errors import require, run_main


@dataclass
class HFConfig:
    # take the tokenizer files of this Hugging Face folder in place of the model's own; export: also
    # none, which then works on token ids only
    tokenizer: str = ""
    # import: the context length in tokens, if the files say another one
    context_length: int = 0
    # compare the logits with transformers'
    verify: bool = True
    # export: take the checkpoint with the best validation loss of a run folder, not the newest
    best: bool = False
    # export: Python files, each with one scheme of your own, for a checkpoint trained with it
    entry: tuple[str, ...] = ()
    method: str = "yarn"  # extend: pi, yarn, ntk, abf, llama3 or longrope, as of extend.py
    factor: float = 4.0  # extend: how many times longer the context gets
    options: str = ""  # extend: beta_fast=16 for example, or a .json file of them


# setting -> what it is for
PURPOSES = {"best": ("export",), "entry": ("export",), "context_length": ("import",)}
PURPOSES |= dict.fromkeys(("tokenizer", "verify"), ("import", "export"))
PURPOSES |= dict.fromkeys(("method", "factor", "options"), ("extend",))


def main(argv=None):
    paths = "import SOURCE out/NAME, export out/NAME TARGET, or extend SOURCE TARGET"
    args = settings.parse(cfg=HFConfig, paths=paths, argv=argv)
    cfg = args.cfg
    require(
        len(args.paths) == 3 and args.paths[0] in ("import", "export", "extend"),
        f"hf.py needs a direction and two paths: say hf.py {paths} (SOURCE is a folder, ORG/NAME, "
        "a .gguf or a ckpt.pt, and TARGET a folder, or for extend of the same kind)",
    )
    direction, source, target = args.paths
    for name in ("transformers", "gguf") if Path(source).is_file() else ("transformers",):
        require(
            importlib.util.find_spec(name),
            f"the {name} package is not installed: pip install -r requirements-hf.txt",
        )
    for name in sorted(args.given & PURPOSES.keys()):
        is_used = direction in PURPOSES[name]
        require(is_used, f"--{name} is not for {direction}: leave it out")
    if direction == "extend":
        from nanolong.hub.extend import extend_to

        extend_to(source, target, cfg.method, cfg.factor, settings.read_options(cfg.options))
        return
    from nanolong.hub import transfer

    if direction == "import":
        options = (cfg.tokenizer, cfg.verify, cfg.context_length)
        transfer.import_to(GPT, source, target, *options)
        return
    entry.load_entries(cfg.entry, POSITIONS)
    model = GPT.load(source, cfg.best, dtype=None)
    transfer.export_to(model, target, cfg.verify, cfg.tokenizer)


if __name__ == "__main__":
    run_main(main)
