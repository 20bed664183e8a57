"""Import public checkpoints from Hugging Face's format, and export ours to it.

    python hf.py import SmolLM-135M/ out/smollm
    python hf.py import SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2
    python hf.py export out/rope-yarn4 exported/
    python hf.py export out/rope-yarn4 exported.gguf --store=q8_0

import: a local directory, or a GGUF file of llama.cpp, becomes a run folder, for extend.py,
evaluate.py and sample.py.
export: a run folder becomes a directory that transformers' AutoModelForCausalLM loads, with the
same logits and the tokenizer files that it was imported with, or a GGUF file for llama.cpp.

docs/huggingface.md lists the families, from Llama, Qwen, Gemma 3, Olmo and Phi to Pythia and BLOOM;
GGUF files have the architectures llama, qwen2, qwen3 and smollm3. What has no equivalent on the
other side is refused. Only JSON, safetensors and GGUF files are read.
"""

from nanolong import settings  # isort: skip (first: --help before torch is imported)

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model import GPT, POSITIONS
from nanolong import entry
from nanolong.errors import UserError, run_main
from nanolong.hub import exporting, gguf_export, gguf_import, importing


@dataclass
class HFConfig:
    # type of the weights: of the checkpoint of an import, by default float32 (bfloat16 takes half
    # the space, and of bfloat16 weights, as most models have, it loses nothing), and of an exported
    # GGUF file, by default as in the checkpoint, which float16 and q8_0 round
    store: Literal["auto", "float32", "bfloat16", "float16", "q8_0"] = "auto"
    # take the tokenizer files of this Hugging Face directory instead of the model's own; export of
    # a GGUF file: also none, which then works on token ids only
    tokenizer: str = ""
    # export: let transformers, if it is installed, load what was written, and compare logits
    verify: bool = True
    # export: of a run folder take the checkpoint with the best validation loss, not the newest
    best: bool = False
    # export: Python files, each with one scheme of your own, for a checkpoint trained with it
    entry: tuple[str, ...] = ()


def main(argv=None):
    args = settings.parse(
        cfg=HFConfig,
        paths="import DIR or FILE.gguf out/NAME, or export out/NAME DIR or FILE.gguf",
        argv=argv,
    )
    cfg = args.cfg
    if len(args.paths) != 3 or args.paths[0] not in ("import", "export"):
        raise UserError(
            "hf.py needs a direction and two paths: say hf.py import DIR out/NAME, "
            "hf.py import FILE.gguf out/NAME, or hf.py export out/NAME DIR (or FILE.gguf)"
        )
    direction, source, target = args.paths
    if direction == "import":
        for name in sorted(args.given - {"store", "tokenizer"}):
            raise UserError(f"--{name} is for export: leave it out")
        if cfg.store not in ("auto", "float32", "bfloat16"):
            raise UserError(f"--store={cfg.store} is for export: give float32 or bfloat16")
        is_gguf = source.lower().endswith(".gguf") or Path(source).is_file()
        read = gguf_import.import_gguf if is_gguf else importing.import_checkpoint
        read(GPT, source, target, cfg.store.replace("auto", "float32"), cfg.tokenizer)
        return
    is_gguf = target.lower().endswith(".gguf")
    if cfg.store != "auto" and not is_gguf:
        raise UserError("--store is for import and for GGUF files: leave it out")
    if is_gguf and "verify" in args.given:
        raise UserError("--verify is for directories, which transformers loads: leave it out")
    entry.load_entries(cfg.entry, POSITIONS)
    model = GPT.load(source, cfg.best, dtype=None)
    if is_gguf:
        gguf_export.export_gguf(model, target, cfg.store, cfg.tokenizer)
    else:
        exporting.export_checkpoint(model, target, cfg.verify, cfg.tokenizer)


if __name__ == "__main__":
    run_main(main)
