"""Import and export: a model from a folder, a hub id or a file becomes a run folder, and back."""

import copy
from dataclasses import asdict
from pathlib import Path

import torch

from data import tokenizer_from_json
from nanolong import run, tokenizer_files
from nanolong.errors import require
from nanolong.hub import gguf_model, gguf_tokenizer, nanogpt
from nanolong.hub.convert import export_model, import_model
from nanolong.hub.folder import check_absent, find_folder, read_folder, whole, write_folder
from nanolong.hub.rope import by_kind, check_types
from nanolong.hub.tokenizer import make_exported
from nanolong.hub.verify import as_user_error, compare, compare_stored, load_theirs

# -----------------------------------------------------------------------------
# Import


def import_to(GPT, source, target, store="auto", tokenizer="", verify=True, context_length=0):
    """Write a model as the first checkpoint of a run folder; return its folder.

    The other parameters are as in read_model(). Raises UserError, with nothing written.
    """
    target = Path(target)
    require(not run.list_steps(target), f"{target} holds a run already: choose another folder")
    model = read_model(GPT, source, store, tokenizer, verify, context_length)
    folder = target / "step-000000"
    meta = {"config": asdict(model.config), **model.meta}
    run.write_checkpoint(folder, {"model": model.weights()}, meta)
    print(f"wrote {folder}")
    return folder


def read_model(GPT, source, store, tokenizer, verify, context_length, check=None):
    """Return a model as GPT.load() does, compared with transformers'; print what it is.

    GPT: the class of model.py. source: a folder, ORG/NAME of the hub, a .gguf, or a ckpt.pt of
    nanoGPT. store: dtype of the matrices, by default bfloat16 if the file has it. tokenizer: the
    folder of the tokenizer, if it is another. context_length: in tokens, if the files say another.
    check: a function that refuses a model before the comparison, which takes longest.
    """
    place, found = open_source(source)
    with as_user_error(source):
        check_types(found.c)
        theirs = load_theirs(found.c, found.tensors)
        model = import_model(GPT, found.c, theirs.state_dict(), context_length)
        if check:
            check(model)
        kept, ends, note = open_tokenizer(place, found, tokenizer, model.config.vocab_size)
        report = compare(model, theirs) if verify else []
        is_rounded = round_weights(model, store)
        rounded = compare_stored(model, theirs) if verify and is_rounded else ""
    model.meta = {
        "tokenizer": kept and kept.to_json(),
        "bos": ends.bos,
        "ends": ends.ids,
        "family": found.c.model_type,
        "imported": Path(source).resolve().name,
    }
    model.stored_dtype = model.embed.weight.dtype
    print_summary(source, model)
    print(ends.describe(kept))
    if note:
        print(f"note: {note}")
    print_report(report, rounded)
    return model


def open_source(source):
    """Return where a model is on this machine, and its Source."""
    path = Path(source)
    is_run = run.list_steps(path) or (path / "meta.json").is_file()
    remedy = "give it to extend.py, evaluate.py or sample.py, or to hf.py export"
    require(not is_run, f"{source} is a run folder already: {remedy}")
    if not path.is_file():
        folder = find_folder(source)
        return folder, read_folder(folder)
    with open(path, "rb") as stream:
        start = stream.read(4)
    # ollama's files have no suffix
    is_gguf = start == b"GGUF" or path.suffix.lower() == ".gguf"
    return path, gguf_model.read_gguf(path) if is_gguf else nanogpt.read_checkpoint(path)


def open_tokenizer(place, found, named, vocab_size):
    """Return (tokenizer or None, its Ends, a note or nothing).

    named: the folder that the user gives, or nothing.
    """
    folder = Path(named or place)
    ids, starter = tokenizer_files.read_ids(place), ""
    if found.metadata:
        ids, starter = gguf_tokenizer.read_ids(place, found.metadata, vocab_size)
    if named or (folder / "tokenizer.json").is_file():
        tokenizer, ends = tokenizer_files.read_tokenizer(folder, ids, vocab_size, starter)
        if found.metadata:
            gguf_tokenizer.check_same_tokens(place, found.metadata, folder, tokenizer.package)
        return tokenizer, ends, ""
    if found.metadata:
        return gguf_tokenizer.read_tokenizer(place, found.metadata, vocab_size)
    note = f"no tokenizer.json belongs to {place}: the model works on token ids only (for text, "
    note += "give --tokenizer=DIR of one; of a tokenizer.model transformers writes it)"
    return None, tokenizer_files.find_ends(None, ids, vocab_size), note


def round_weights(model, store):
    """Give a model the weights that are stored; return whether that has changed them.

    store: dtype of the weights of linear layers and embeddings; all others are float32.
    """
    matrices = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    kinds = {id(m.weight): m.weight.dtype for m in matrices}
    if store == "auto":
        store = "bfloat16" if set(kinds.values()) == {torch.bfloat16} else "float32"
    is_rounded = False
    for p in model.parameters():
        # not in place: transformers' model may share this memory
        before, p.data = p.data, p.data.to(getattr(torch, store if id(p) in kinds else "float32"))
        is_rounded |= not torch.equal(before.float(), p.data.float())
    return is_rounded


def differ(tensors, others):
    """Return whether tensors of the same names have other values; their dtypes do not count."""
    shared = tensors.keys() & others.keys()  # a tied head is left out of files
    return any(not torch.equal(tensors[name].float(), others[name].float()) for name in shared)


def print_summary(source, model):
    config = model.config
    text = f"{source}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    text += f", context length {config.block_size} tokens"
    extension = config.extension
    if extension:
        text += f" (originally {config.original_length}, {extension['method']}, "
        text += f"factor {extension['factor']:g})"
    print(text)
    if extension and extension["method"] == "dynamic-ntk":
        print(
            "note: a dynamic scale follows the length of the text rounded up to a quarter of the "
            "original length; transformers takes the exact length, and keeps keys of older scales"
        )


def print_report(report, rounded):
    """rounded: what compare_stored() returns; "" if the weights were not rounded."""
    if not report:
        print("not verified: its logits were not compared with transformers' (--verify=false)")
        return
    when = " before rounding" if rounded else ""
    print(f"verified{when}: largest logit difference from transformers: {'; '.join(report)}")
    if rounded:
        print(f"as stored, with rounded weights: {rounded}")


# -----------------------------------------------------------------------------
# Export


def export_to(model, target, verify=True, tokenizer_from="", store="auto"):
    """Write a loaded model and its tokenizer, whole or not at all: a folder, or a .gguf file.

    tokenizer_from: a Hugging Face folder whose tokenizer is written in place of the model's own, or
    "none". store: dtype of a GGUF's matrices. Raises UserError for a model that has no equivalent,
    or if transformers computes other logits.
    """
    target = Path(target)
    is_gguf = check_target(target, store)
    own = tokenizer_from_json(model.meta.get("tokenizer"))
    tokenizer = find_tokenizer(model, own, tokenizer_from)
    c, tensors = gguf_model.export_model(model) if is_gguf else export_model(model)
    known = tokenizer or own
    ends = known.ends if known else model.meta.get("ends", [])
    c.bos_token_id = known.bos if known else model.meta.get("bos")
    c.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    if store == "auto":
        # scaled queries are float32, and so are some norms: a folder has one dtype
        which = [x for x in tensors.values() if x.dim() == 2 or not is_gguf]
        is_stored = all(torch.equal(x.to(model.stored_dtype).float(), x.float()) for x in which)
        store = str(model.stored_dtype if is_stored else torch.float32).removeprefix("torch.")

    def write(part):
        if is_gguf:
            gguf_model.write_gguf(part, model, c, tensors, store, tokenizer)
            found = gguf_model.read_gguf(part)
        else:
            stored = {name: x.to(getattr(torch, store)) for name, x in tensors.items()}
            write_folder(part, load_theirs(c, stored), tokenizer)
            found = read_folder(part)
        kind = by_kind(getattr(c, "rope_parameters", None))[0].get("rope_type", "none")
        length = model.config.block_size
        print(f"{target}: {c.model_type}, rope_type {kind}, {length} tokens, {store}")
        if not verify:
            print_report([], "")
            return
        # The written file is read again. No bound holds for matrices that GGUF has rounded.
        is_rounded = is_gguf and store != "float32" and differ(tensors, found.tensors)
        report = compare(model, load_theirs(found.c, tensors if is_rounded else found.tensors))
        rounded = ""
        if is_rounded:
            rounded = compare_stored(model, load_theirs(found.c, found.tensors))
        print_report(report, rounded)

    whole(target, write)
    if not is_gguf:
        note_clients(c, model.config)


def check_target(target, store):
    """Refuse what cannot be written, before the work; return whether it is a GGUF file."""
    is_gguf = target.suffix.lower() == ".gguf"
    require(store == "auto" or is_gguf, "--store is for import and for GGUF: leave it out")
    check_absent(target)
    return is_gguf


def extend_to(GPT, source, target, extend, store, tokenizer, verify, context_length):
    """Import a model, extend it and export it: what has no export is refused at first.

    extend: a function that extends a model in place. tokenizer: the folder of the tokenizer, if it
    is another, or "none". The other parameters are as in read_model() and export_to().
    """
    target = Path(target)
    is_gguf = check_target(target, store)

    def check(model):
        trial = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # shares the weights
        extend(trial)
        export = gguf_model.export_model if is_gguf else export_model
        export(trial)

    read, written = (tokenizer, "") if tokenizer != "none" else ("", "none")
    model = read_model(GPT, source, "auto", read, verify, context_length, check)
    extend(model)
    export_to(model, target, verify, written, store)
    print_ways(target, is_gguf, model.config.block_size)


def print_ways(target, is_gguf, length):
    """Print how to open an export in other programs, all of its context."""
    if is_gguf:
        lines = f"FROM {target.resolve()}\\nPARAMETER num_ctx {length}\\n"
        print(
            f"open it: llama-cli -m {target} -c {length}; printf '{lines}' > Modelfile && ollama "
            f"create {target.stem.lower()}; mlx-lm reads no GGUF, and transformers not its scaling "
            "of RoPE: for these write a folder, which has no .gguf in its name"
        )
        return
    print(
        f"open it: mlx_lm.generate --model {target} --prompt TEXT; in transformers "
        f'AutoModelForCausalLM.from_pretrained("{target}"); llama.cpp and Ollama need a file: give '
        "OUT.gguf"
    )


def find_tokenizer(model, own, named):
    """Return the tokenizer whose files are exported, or None.

    own: the checkpoint's; named: the folder of another, "none" or nothing.
    """
    config = model.config
    if named == "none":
        tokenizer = None
    elif named:
        tokenizer, _ = tokenizer_files.read_tokenizer(named, vocab_size=config.vocab_size)
    else:
        tokenizer = make_exported(own, model.meta.get("bos") is not None, config.block_size)
    if tokenizer is None:
        print(
            "note: no tokenizer is written, because only one of bytes and a tokenizer.json are: "
            "the export works on token ids (for text, give --tokenizer=DIR of a tokenizer.json of "
            "this vocabulary)"
        )
    return tokenizer


# what mlx-lm 0.32.2 computes as transformers does: without a window, only with RoPE that is not
# scaled, and with a window
MLX_LM = {*"llama mistral ministral3 qwen2 qwen3 smollm3 phi3 olmo2 granite".split()}
MLX_LM_PLAIN = {"gemma"}
MLX_LM_WINDOW = {"olmo3", "gemma3_text"}


def note_clients(c, config):
    """Print whether mlx-lm may compute otherwise: it reads fewer fields, and says nothing."""
    rope = by_kind(getattr(c, "rope_parameters", None))[0]
    kind = rope.get("rope_type", "default")
    known = MLX_LM | MLX_LM_WINDOW | (MLX_LM_PLAIN if kind == "default" else set())
    is_read = c.model_type in (MLX_LM_WINDOW if config.window else known)
    is_read &= rope.get("truncate", True)
    if c.model_type == "olmo3":
        is_read &= not config.rope_local_base
    if c.model_type == "gemma3_text":
        is_read &= hasattr(c, "sliding_window_pattern")
    if not is_read:
        print(f"note: mlx-lm has no {c.model_type} like this, or computes it otherwise")
