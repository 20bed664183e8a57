"""Import public checkpoints from Hugging Face's format, and export ours to it.

    python hf.py import SmolLM-135M/ out/smollm
    python hf.py import SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2
    python hf.py export out/rope-yarn4 exported/

import: a local directory, or a GGUF file of llama.cpp, becomes a run folder, for extend.py,
evaluate.py and sample.py.
export: a run folder becomes a directory that transformers' AutoModelForCausalLM loads, with the
same logits and the tokenizer files that it was imported with.

Imported: twenty families, from Llama, Qwen, Gemma 3, Olmo and Phi to Pythia and BLOOM, with any
rope_parameters or rope_scaling; docs/huggingface.md lists them. Exported: the one that a model is
of. What has no equivalent on the other side is refused. Only JSON, safetensors and GGUF files are
read; of the last the architectures llama, qwen2, qwen3 and smollm3, in any quantisation that the
gguf package reads.
"""

from nanolong import python_version  # noqa: F401  # isort: skip

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model import GPT, POSITIONS
from nanolong import cli, entry, run
from nanolong.errors import UserError
from nanolong.hub import exporting, gguf_import, importing


@dataclass
class HFConfig:
    # import: dtype of the weights in the checkpoint; bfloat16 takes half the space, and where the
    # original has bfloat16 weights, as most have, it loses nothing
    store: Literal["float32", "bfloat16"] = "float32"
    # export: copy the tokenizer files of this Hugging Face directory instead of the model's own
    tokenizer: str = ""
    # export: let transformers, if it is installed, load what was written, and compare logits
    verify: bool = True
    # export: of a run folder take the checkpoint with the best validation loss, not the newest
    best: bool = False
    # export: Python files, each with one scheme of your own, for a checkpoint trained with it
    entry: tuple[str, ...] = ()


def main():
    usage = "import DIR or FILE.gguf out/NAME, or export out/NAME DIR"
    cfg, given, words = cli.parse(HFConfig, about=__doc__, paths=usage)
    if len(words) != 3 or words[0] not in ("import", "export"):
        raise UserError(
            "hf.py needs a direction and two paths: say hf.py import DIR out/NAME, "
            "hf.py import FILE.gguf out/NAME, or hf.py export out/NAME DIR"
        )
    direction, source, target = words
    if direction == "export":
        if "store" in given:
            raise UserError("--store is for import: leave it out")
        entry.load_entries(cfg.entry, POSITIONS)
        model = run.open_model(GPT, source, cfg.best)
        exporting.export_checkpoint(model, target, cfg.verify, cfg.tokenizer)
        return
    for name in sorted(given - {"store"}):
        raise UserError(f"--{name} is for export: leave it out")
    read = importing.import_checkpoint
    if source.lower().endswith(".gguf") or Path(source).is_file():
        read = gguf_import.import_gguf
    read(GPT, source, target, cfg.store)


if __name__ == "__main__":
    cli.run_main(main)
