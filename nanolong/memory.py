"""The memory of a training step, counted from shapes.

The model is not compiled: torch.compile changes which tensors exist. Measured by
tests/test_counted_memory.py, tests/test_sequence_parallel.py and
tests/simulated_gpu/test_memory.py.
"""

import os
from dataclasses import dataclass

from nanolong.errors import UserError


@dataclass
class Memory:
    """The memory of a training step in bytes, estimated by counting."""

    parameters: int  # gradients take as much
    optimizer: int
    peak: int


def count_memory(
    model,
    B,
    T,
    dtype="bfloat16",
    checkpointing=False,
    optimizer="adamw",
    device="cuda",
    accumulation=1,
    shards=1,
    parts=1,
):
    """Count the memory of a training step of a GPT on B sequences of T tokens.

    Notation: N = B T tokens, C width, A = H D channels of all heads, K = Hk D, M width of the MLP,
    V vocabulary, e bytes per element of a product (2 under autocast to bfloat16, else 4).
    Parameters, the residual stream, norms and sums are float32. The model may be on the meta
    device. dtype "float32" or "bfloat16"; optimizer "adamw" or "muon"; accumulation: micro-batches
    of B sequences in a step; shards: processes over which --parallel=fsdp divides the parameters;
    parts: processes that share a sequence, each of which has T tokens of it.
    """
    config = model.config
    e = 4 if dtype == "float32" else 2
    N = B * T
    C = config.n_embd
    A = config.n_head * config.head_dim

    # parameters and the optimizer's moments: Muon keeps one for the blocks' matrices, AdamW two
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    parameters = count_parameters(model)
    others = parameters - matrices
    moments = 8 * parameters if optimizer == "adamw" else 8 * parameters - 4 * matrices

    # at the end of the forward pass: activations, and the gradients of earlier micro-batches
    block = N * block_bytes_per_token(config, T, e, device)
    block += N * A * e if parts > 1 else 0  # attention's output before and after the exchange
    of_block = N * (4 * C + A * e + 4 * config.n_head) if checkpointing else block
    autocast_copies = matrices * 2 if e < 4 else 0
    earlier = 4 * parameters if accumulation > 1 else 0
    kept = config.n_layer * of_block + autocast_copies + earlier

    # in the backward pass, of which the loss or the last MLP may be the peak
    at_loss, at_mlp = count_backward(config, N, e, kept, block if checkpointing else 0, device)

    # At the end of the backward pass the embedding's gradient comes last and is added to the
    # head's, if they share weights, and to that of earlier micro-batches.
    at_end = max(earlier, 4 * parameters // shards)
    if shards == 1:
        at_end += 4 * config.vocab_size * C * (config.tie_embeddings + (accumulation > 1))
    else:
        # embedding and head are gathered; later a block and the next one, which is copied
        at_loss += 4 * others
        at_mlp += 3 * 4 * matrices // config.n_layer
        # of all that is in no block two gradients, or one and the copy that is sent
        at_end += 2 * 4 * others
    return Memory(
        parameters=4 * parameters // shards,
        optimizer=moments // shards,
        peak=(4 * parameters + moments) // shards + max(at_loss, at_mlp, at_end),
    )


def count_parameters(model):
    return sum(p.numel() for p in model.parameters())


def count_backward(config, N, e, kept, recomputed, device):
    """The bytes at the loss and at the last MLP, above parameters and moments.

    kept: at the end of the forward pass; recomputed: by a block in the backward pass.
    """
    C = config.n_embd
    norm_copy = 4 * C if device == "cpu" else 0
    final_norm = N * (2 * 4 * C + norm_copy)  # the last block's output and the normed states
    at_loss = kept + final_norm + 4 * N * C + count_loss(config, N, e)
    mlp_gradients = N * (2 * config.mlp_dim * e + 2 * 4 * C)  # two of its width, two of width C
    at_mlp = kept + recomputed + 4 * config.vocab_size * C + mlp_gradients
    return at_loss, at_mlp


def count_loss(config, N, e):
    """The bytes of the logits that exist at a time, of their inputs, and of the head's gradient.

    A chunk holds logits and softmax first, then the softmax and its share of the head's gradient.
    """
    V, C = config.vocab_size, config.n_embd
    chunk = (1 << 25) // V // 128 * 128
    R = min(N, max(128, chunk))  # tokens whose logits exist at a time
    head = V * C
    head_copy = 0
    if e < 4:  # autocast multiplies by a copy of the head, and so has a copy of its gradient
        head_copy = e * head
    part = 4 * head + head_copy
    # the sum of the gradients of the chunks before
    of_other_chunks = 0
    if N > R:
        of_other_chunks = 4 * head
    forward = R * V * (4 + e)
    backward = R * V * e + part
    return head_copy + R * C * e + of_other_chunks + max(forward, backward)


def block_bytes_per_token(config, T, e, device):
    """What a block keeps for its backward pass, in bytes per token. e: bytes of a product.

    attention  its input, 4 C; the normed input of q, k and v, C e each under autocast and once in
               float32; q, k, v and the output, (2 A + 2 K) e; the log-sum-exp, 4 H
    MLP        its input, 4 C; the normed input of gate and up, as above; gate, silu(gate), up and
               their product, 4 M e; with GELU there is no gate: up and gelu(up), 2 M e
    dropout    masks, 8 C
    On a CPU the norms also keep their result before the gain, 4 C each. bfloat16 attention below
    512 tokens is computed there in float32 (kernels/eager.py), so that its four tensors take 4
    bytes, and the output exists in bfloat16 too.
    """
    C = config.n_embd
    A = config.n_head * config.head_dim
    K = config.n_kv_head * config.head_dim
    is_autocast = e < 4
    norms = 2 * (4 * C if device == "cpu" else 0)
    attention = (2 * A + 2 * K) * e
    if is_autocast and device == "cpu" and T < 512:
        attention = (2 * A + 2 * K) * 4 + A * e
    normed = 3 * e * C if is_autocast else 4 * C
    attention += 4 * C + normed + 4 * config.n_head
    n_inputs, n_hidden = (2, 4) if config.is_gated else (1, 2)
    normed = n_inputs * e * C if is_autocast else 4 * C
    mlp = 4 * C + normed + n_hidden * config.mlp_dim * e
    dropout = 8 * C if config.dropout else 0
    return norms + attention + mlp + dropout


def check_weights_fit(model):
    """Raise UserError when the machine has less memory than the weights of a model take."""
    require_memory(4 * count_parameters(model))


def require_memory(size):
    """Raise UserError when the machine has less memory than `size` bytes, which the weights take.

    Linux grants memory that it does not have; a process that then uses it is killed without a word.
    """
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return
    if size > available:
        sizes = f"{size / 2**30:,.0f} GiB, and this machine has {available / 2**30:,.0f} GiB"
        raise UserError(f"the weights alone take {sizes}: lower --n_layer or --n_embd")
