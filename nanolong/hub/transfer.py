"""Import and export: a model from a folder, a hub id or a file becomes a run folder, and back."""

from dataclasses import asdict
from pathlib import Path

import torch

from data import tokenizer_from_json
from nanolong import run, tokenizer_files
from nanolong.errors import require
from nanolong.hub import gguf_tokenizer, nanogpt
from nanolong.hub.convert import export_model, import_model
from nanolong.hub.folder import check_absent, find_folder, read_folder, whole, write_folder
from nanolong.hub.rope import by_kind, check_types
from nanolong.hub.tokenizer import make_exported, with_length
from nanolong.hub.verify import as_user_error, compare, load_theirs

# -----------------------------------------------------------------------------
# Import


def import_to(GPT, source, target, tokenizer="", verify=True, context_length=0):
    """Write a model as the first checkpoint of a run folder; return its folder.

    The other parameters are as in read_model(). Raises UserError, with nothing written.
    """
    target = Path(target)
    require(not run.list_steps(target), f"{target} holds a run already: choose another folder")
    model = read_model(GPT, source, tokenizer, verify, context_length)
    folder = target / "step-000000"
    meta = {"config": asdict(model.config), **model.meta}
    run.write_checkpoint(folder, {"model": model.weights()}, meta)
    print(f"wrote {folder}")
    return folder


def read_model(GPT, source, tokenizer, verify, context_length):
    """Return a model as GPT.load() does, compared with transformers'; print what it is.

    GPT: the class of model.py. source: a folder, ORG/NAME of the hub, a .gguf, or a ckpt.pt of
    nanoGPT. tokenizer: the folder of the tokenizer, if it is another. context_length: in tokens, if
    the files say another.
    """
    place, found = open_source(source)
    with as_user_error(source):
        check_types(found.c)
        theirs = load_theirs(found.c, found.tensors)
        model = import_model(GPT, found.c, theirs.state_dict(), context_length)
        kept, ends, note = open_tokenizer(place, found, tokenizer, model.config.vocab_size)
        report = compare(model, theirs) if verify else []
        set_dtypes(model)
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
    print_report(report)
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
    if not is_gguf:
        return path, nanogpt.read_checkpoint(path)
    from nanolong.hub import gguf_model  # needs the gguf package, and folders do not

    return path, gguf_model.read_gguf(path)


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
    note += "give --tokenizer=DIR; transformers writes it from a tokenizer.model)"
    return None, tokenizer_files.find_ends(None, ids, vocab_size), note


def set_dtypes(model):
    """Keep matrices that are all bfloat16; the other weights become float32."""
    matrices = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    kinds = {id(m.weight): m.weight.dtype for m in matrices}
    dtype = torch.bfloat16 if set(kinds.values()) == {torch.bfloat16} else torch.float32
    for p in model.parameters():
        # not in place: transformers' model may share this memory
        p.data = p.data.to(dtype if id(p) in kinds else torch.float32)


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


def print_report(report):
    if report:
        print(f"verified: largest logit difference from transformers: {'; '.join(report)}")
    else:
        print("not verified: its logits were not compared with transformers' (--verify=false)")


# -----------------------------------------------------------------------------
# Export


def export_to(model, target, verify=True, tokenizer_from=""):
    """Write a loaded model and its tokenizer to a folder, whole or not at all.

    tokenizer_from: a Hugging Face folder whose tokenizer is written in place of the model's own, or
    "none". Raises UserError for a model that has no equivalent, or if transformers computes other
    logits.
    """
    target = Path(target)
    problem = f"{target} is a GGUF file, which llama.cpp's convert_hf_to_gguf.py makes of a folder"
    require(target.suffix.lower() != ".gguf", f"{problem}: give a folder")
    check_absent(target)
    own = tokenizer_from_json(model.meta.get("tokenizer"))
    tokenizer = find_tokenizer(model, own, tokenizer_from)
    c, tensors = export_model(model)
    known = tokenizer or own
    ends = known.ends if known else model.meta.get("ends", [])
    c.bos_token_id = known.bos if known else model.meta.get("bos")
    c.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    # scaled queries are float32, and a folder has one dtype
    dtype = model.stored_dtype
    if not all(torch.equal(x.to(dtype).float(), x.float()) for x in tensors.values()):
        dtype = torch.float32

    def write(part):
        stored = {name: x.to(dtype) for name, x in tensors.items()}
        write_folder(part, load_theirs(c, stored), tokenizer)
        kind = by_kind(getattr(c, "rope_parameters", None))[0].get("rope_type", "none")
        name = str(dtype).removeprefix("torch.")
        print(
            f"{target}: {c.model_type}, rope_type {kind}, {model.config.block_size} tokens, {name}"
        )
        report = []
        if verify:  # the written folder is read again
            found = read_folder(part)
            report = compare(model, load_theirs(found.c, found.tensors))
        print_report(report)

    whole(target, write)


def find_tokenizer(model, own, named):
    """Return the tokenizer whose files are exported, or None.

    own: the checkpoint's; named: the folder of another, "none" or nothing.
    """
    config = model.config
    if named == "none":
        tokenizer = None
    elif named:
        tokenizer, _ = tokenizer_files.read_tokenizer(named, vocab_size=config.vocab_size)
        tokenizer = with_length(tokenizer, config.block_size)
    else:
        tokenizer = make_exported(own, model.meta.get("bos") is not None, config.block_size)
    if tokenizer is None:
        print(
            "note: no tokenizer is written, because only one of bytes and a tokenizer.json are: "
            "the export works on token ids (for text, give --tokenizer=DIR of a tokenizer.json of "
            "this vocabulary)"
        )
    return tokenizer
