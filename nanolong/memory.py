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
    peak_at: str


def count_memory(
    config,
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
    """Count the memory of a training step of GPT(config) on B sequences of T tokens.

    Notation: N = B T tokens, C width, A = H D channels of all heads, K = Hk D, M width of the MLP,
    V vocabulary, e bytes per element of a product (2 under autocast to bfloat16, else 4).
    Parameters, the residual stream, norms and sums are float32. dtype "float32" or "bfloat16";
    optimizer "adamw" or "muon"; accumulation: micro-batches of B sequences in a step; shards:
    processes over which --parallel=fsdp divides the parameters; parts: processes that share a
    sequence, each of which has T tokens of it.
    """
    e = 4 if dtype == "float32" else 2
    N = B * T
    C = config.n_embd
    A = config.n_head * config.head_dim

    # parameters and the optimizer's moments: Muon keeps one for the blocks' matrices, AdamW two
    matrices = count_block_matrices(config)
    others = count_other_parameters(config)
    parameters = matrices + others
    moments = 8 * parameters if optimizer == "adamw" else 8 * parameters - 4 * matrices

    # activations at the end of the forward pass
    block = N * block_bytes_per_token(config, T, e, device)
    block += N * A * e if parts > 1 else 0  # attention's output before and after the exchange
    of_block = N * (4 * C + A * e + 4 * config.n_head) if checkpointing else block
    autocast_copies = matrices * 2 if e < 4 else 0
    activations = config.n_layer * of_block + autocast_copies

    # the gradients of the micro-batches before this one
    earlier = 4 * parameters if accumulation > 1 else 0
    recomputed = block if checkpointing else 0
    candidates = count_candidates(config, N, e, activations + earlier, recomputed, device)
    end = max(earlier, 4 * parameters // shards) + count_last_gradients(
        config, accumulation, shards
    )
    candidates["end of the backward pass"] = end
    if shards > 1:
        # embedding and head are gathered; later a block and the next one, which is copied
        candidates["loss"] += 4 * others
        candidates["last MLP"] += 3 * 4 * matrices // config.n_layer
    peak_at = max(candidates, key=candidates.get)
    return Memory(
        parameters=4 * parameters // shards,
        optimizer=moments // shards,
        peak=(4 * parameters + moments) // shards + candidates[peak_at],
        peak_at=peak_at,
    )


def count_candidates(config, N, e, kept, recomputed, device):
    """The bytes at the moments of a step that may be its peak, above parameters and moments.

    kept: at the end of the forward pass; recomputed: by a block in the backward pass.
    """
    C = config.n_embd
    V = config.vocab_size
    norm_copy = 4 * C if device == "cpu" else 0
    final_norm = N * (2 * 4 * C + norm_copy)  # the last block's output and the normed states
    mlp_gradients = N * (2 * config.mlp_dim * e + 2 * 4 * C)  # two of its width, two of width C
    return {
        "loss": kept + final_norm + 4 * N * C + count_loss(config, N, e),
        "last MLP": kept + recomputed + 4 * V * C + mlp_gradients,
    }


def count_last_gradients(config, accumulation, shards):
    """The bytes at the end of the backward pass besides the gradients that a process keeps.

    The embedding's comes last and is added to the head's, if they share weights, and to that of
    earlier micro-batches. In shards there are two of all that is in no block: these two, or one and
    the copy that is sent.
    """
    if shards > 1:
        return 2 * 4 * count_other_parameters(config)
    n_added = config.tie_embeddings + (accumulation > 1)
    return 4 * config.vocab_size * config.n_embd * n_added


def count_loss(config, N, e):
    """The bytes of the logits that exist at a time, of their inputs, and of the head's gradient.

    A chunk holds logits and softmax first, then the softmax and its share of the head's gradient.
    """
    V, C = config.vocab_size, config.n_embd
    R = min(N, max(128, (1 << 25) // V // 128 * 128))  # tokens whose logits exist at a time
    head = V * C
    head_copy = 0
    part = 4 * head
    # autocast multiplies by a copy of the head, and so has a copy of its gradient
    if e < 4:
        head_copy = e * head
        part = (4 + e) * head
    # the sum of the gradients of the chunks before
    of_other_chunks = 0
    if N > R:
        of_other_chunks = 4 * head
    forward = R * V * (4 + e)
    backward = R * V * e + part
    return head_copy + R * C * e + of_other_chunks + max(forward, backward)


def count_block_matrices(config):
    """The parameters of the blocks that are matrices."""
    A = config.n_head * config.head_dim
    K = config.n_kv_head * config.head_dim
    attention = config.n_embd * (A + 2 * K) + A * config.n_embd
    n_mlp = 3 if config.is_gated else 2
    return config.n_layer * (attention + n_mlp * config.n_embd * config.mlp_dim)


def count_other_parameters(config):
    """The parameters of embeddings, head, norms, biases and learned positions."""
    embeddings = config.vocab_size * (1 if config.tie_embeddings else 2)
    norms_per_block = 4 if config.norm_position == "both" else 2
    norms = (norms_per_block * config.n_layer + 1) * (1 if config.norm == "rmsnorm" else 2)
    positions = config.max_positions if config.pos == "learned" else 0
    # one for each row of a block's matrices
    A = config.n_head * config.head_dim
    K = config.n_kv_head * config.head_dim
    biases = A + 2 * K if config.bias != "none" else 0
    if config.bias == "all":
        n_mlp = 2 if config.is_gated else 1
        biases += 2 * config.n_embd + n_mlp * config.mlp_dim
    return config.n_embd * (embeddings + norms + positions) + config.n_layer * biases


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
    attention += 4 * C + (3 * e if is_autocast else 4) * C + 4 * config.n_head
    n_inputs, n_hidden = (2, 4) if config.is_gated else (1, 2)
    mlp = 4 * C + (n_inputs * e if is_autocast else 4) * C + n_hidden * config.mlp_dim * e
    dropout = 8 * C if config.dropout else 0
    return norms + attention + mlp + dropout


def check_weights_fit(config):
    """Raise UserError when the machine has less memory than the weights of a model take."""
    require_memory(4 * (count_block_matrices(config) + count_other_parameters(config)))


def require_memory(size):
    """Raise UserError when the machine has less memory than `size` bytes, which the weights take.

    Linux grants memory that it does not have; a process that then uses it is killed without a word.
    """
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return
    if size > available:
        raise UserError(
            f"the weights alone take {size / 2**30:,.0f} GiB, and this machine has "
            f"{available / 2**30:,.0f} GiB: lower --n_layer or --n_embd"
        )
