"""nanoGPT's ckpt.pt, as a config of transformers' GPT-2 and its tensors."""

import re

import numpy as np
import torch
from transformers import AutoConfig

from nanolong.errors import UserError
from nanolong.hub.folder import Source

# the function that makes a NumPy number of bytes, by its names in NumPy 1 and 2
SCALAR = np.float64().__reduce__()[0]
NUMBERS = [(SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
NUMBERS += [np.dtype, *(type(np.dtype(name)) for name in ("f4", "f8", "i4", "i8"))]
SIZES = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"}


def read_checkpoint(file):
    """Return the Source of a ckpt.pt, to which biases of zeros are added.

    Raises UserError for any other file. No program in it is run.
    """
    try:
        with torch.serialization.safe_globals(NUMBERS):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        sizes = {name: int(content["model_args"][name]) for name in SIZES}
        # DDP and torch.compile have put prefixes before the names
        prefix = re.compile(r"^((module|_orig_mod)\.)+")
        stored = {prefix.sub("", name): x for name, x in content["model"].items()}
        # the table may have been cut since
        sizes["block_size"] = len(stored["transformer.wpe.weight"])
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
    # errors of torch and of a wrong kind of content
    except Exception as error:
        # without the colours of torch
        reason = " ".join(re.sub(r"\x1b\[\d+m", "", str(error)).split())[:120]
        reason = f"{type(error).__name__}: {reason}"
        raise UserError(
            f"{file} is no ckpt.pt of nanoGPT ({reason}): give one, a .gguf, or the folder of a "
            "Hugging Face checkpoint"
        ) from None
    return Source(c, tensors)
