"""nanoGPT's ckpt.pt, as a config of transformers' GPT-2 and its tensors."""

import torch
from transformers import AutoConfig

from nanolong.errors import UserError
from nanolong.hub.folder import Source

SIZES = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"}


def read_checkpoint(file):
    """Return the Source of a ckpt.pt, to which biases of zeros are added.

    Raises UserError for any other file. No program in it is run.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        sizes = {name: int(content["model_args"][name]) for name in SIZES}
        stored = {name.removeprefix("_orig_mod."): x for name, x in content["model"].items()}
        # as nanoGPT's model.py has it, with GELU by erf
        c = AutoConfig.for_model(
            "gpt2",
            n_positions=sizes.pop("block_size"),
            activation_function="gelu",
            layer_norm_epsilon=1e-5,
            bos_token_id=None,
            eos_token_id=None,
            **sizes,
        )
        matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        tensors = {}
        for name, x in stored.items():
            # GPT-2 has them as (in, out), and biases always
            is_matrix = name.removesuffix(".weight").endswith(matrices)
            tensors[name] = x.t() if is_matrix and x.dim() == 2 else x
            bias = f"{name.removesuffix('weight')}bias"
            is_layer = name.startswith(("transformer.h.", "transformer.ln_f")) and x.dim()
            if is_layer and name.endswith(".weight") and bias not in stored:
                tensors[bias] = x.new_zeros(len(x))
    # what torch and a wrong kind of content raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise UserError(
            f"{file} is no ckpt.pt of nanoGPT ({reason}): give one, a .gguf, or the folder of a "
            "Hugging Face checkpoint"
        ) from None
    return Source(c, tensors)
