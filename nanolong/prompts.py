"""Prompts of sample.py, read, encoded and checked, and the texts that continue them."""

import codecs
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from data import encode_prompt
from data.texts import ROWS, read_documents, why_no_text
from nanolong import chat
from nanolong.errors import UserError, note, require


@dataclass
class Prompt:
    ids: list[int]
    text: str  # the printed part
    end_ids: set[int]  # the tokens that end the text


def read_prompts(cfg, tokenizer, bos) -> list[Prompt]:
    """Return the prompts of --start: the text, the text of FILE:PATH, or every line of @PATH."""
    found = []
    texts = [cfg.start]
    if cfg.start.startswith(("FILE:", "@")):
        path = Path(cfg.start.removeprefix("@").removeprefix("FILE:"))
        texts = texts_of_file(path, cfg.start[0] == "@")
    # bos starts the next document
    end_ids = {tokenizer.bos, *tokenizer.ends} - {None}
    for text in texts:
        # bytes of the command line that are not UTF-8 are surrogate escapes
        printable = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if cfg.chat:
            ids, end_ids = chat.encode_chat(tokenizer, text, cfg.system)
            printable = ""
        else:
            note_special_tokens(text, tokenizer)
            ids = encode_prompt(tokenizer, bos, text)
        found.append(Prompt(ids, printable, end_ids if cfg.stop_at_eos else set()))
    return found


def texts_of_file(path, are_many):
    """Return the text of a file, or with are_many its lines. JSON: the texts of its rows."""
    try:
        reason = why_no_text(path)
        require(not reason, reason)
        texts = [text for _, text in read_documents(path.name, path, as_bytes=True)]
    except UserError as error:
        raise UserError(f"{path} is {error}") from None
    if path.suffix.lower() not in ROWS:
        texts = texts[0].splitlines() if are_many else texts
    problem = f"FILE:{path} is one prompt, and JSON has {len(texts)} texts"
    require(are_many or len(texts) == 1, f"{problem}: give @{path}")
    texts = [text.decode() for text in filter(None, texts)]
    require(texts, f"{path} has no prompts: write one a line")
    return texts


def note_special_tokens(text, tokenizer):
    """Print a note if a prompt has the text of a special token, which is plain text there."""
    found = [special for special in tokenizer.special_tokens if special in text]
    if found:
        advice = ""
        if chat.find_template(tokenizer) is not None:
            advice = "; for the model's chat format give the message alone, and --chat"
        note(f"{found[0]!r} in the prompt is encoded as plain text, not as a special token{advice}")


def note_length(cfg, model, folder, prompts):
    """Print a note if a text will exceed the context length."""
    config = model.config
    context = config.block_size
    total = max(len(prompt.ids) for prompt in prompts) + cfg.max_new_tokens
    if total <= context or model.scheme.bounded:
        return
    advice = ""
    # not of a model whose method replaces attention: the default would take its place
    if getattr(model.scheme, "far", None) is None:
        words = ["python", "extend.py", str(folder)]
        words.append(f"--factor={math.ceil(total / config.block_size)}")
        words += [f"--entry={','.join(cfg.entry)}"] if cfg.entry else []
        advice = f"; to extend it: {shlex.join(words)}"
    note(f"{total} tokens are more than the context length of {context}{advice}")


class TextStream:
    """The text of token ids that come one at a time, up to an id or a text that ends it.

    Bytes that do not complete a character are held back until they do, and so is what may be the
    beginning of a text that ends it.
    """

    def __init__(self, tokenizer, end_ids, end_texts):
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.end_texts = end_texts
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""
        self.is_done = False

    def add(self, token) -> str:
        """Return the text that the next id completes; "" after the end."""
        if self.is_done:
            return ""
        if token in self.end_ids:
            self.is_done = True
            return self.flush()
        held = self.held + self.decoder.decode(self.tokenizer.decode([token]))
        found = [held.index(end) for end in self.end_texts if end in held]
        if found:
            self.is_done = True
            self.held = ""
            self.decoder.reset()
            return held[: min(found)]
        # hold back text that may begin one of the stop texts
        n = max(0, len(held) + 1 - max(map(len, self.end_texts), default=1))
        self.held = held[n:]
        return held[:n]

    def flush(self) -> str:
        """Return the text that was held back: no id follows."""
        text = self.held + self.decoder.decode(b"", final=True)
        self.held = ""
        return text


def continue_text(cfg, model, tokenizer, prompt, seed, compiled):
    """Yield the prompt's text, and then the new text, piece by piece."""
    device = next(model.parameters()).device
    # a shell passes the line end of --stop='\n' as two characters
    ends = [end.replace("\\n", "\n") for end in cfg.stop if end]
    stream = TextStream(tokenizer, prompt.end_ids, ends)
    ids = torch.tensor([prompt.ids], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    sampling = {name: getattr(cfg, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling |= {"generator": generator, "compiled": compiled}
    text = prompt.text
    for token in model.generate(ids, cfg.max_new_tokens, **sampling):
        yield text + stream.add(token.item())
        text = ""
        if stream.is_done:
            break
    yield text + stream.flush()
