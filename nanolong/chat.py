"""Chat templates: a conversation as the text that an Instruct model was trained on.

A template is Jinja, in one of the files that a tokenizer came with. It is rendered in a sandbox,
with what transformers' apply_chat_template() offers to a template.
"""

import functools
import importlib.util
import json
from datetime import datetime

import numpy as np

from data.tokenizer import token_text
from nanolong.errors import UserError, require

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
ANSWER = {"role": "assistant", "content": "The answer is 42."}


def encode_chat(tokenizer, message: str, system: str = ""):
    """Encode a conversation up to where the model is to answer.

    tokenizer: a checkpoint's. message: the user's. system: the system message, none if empty.
    Returns the token ids, and the set of ids that end an answer. Raises UserError.
    """
    require(
        find_template(tokenizer) is not None,
        "this checkpoint has no chat template: leave --chat out, or import an Instruct model with "
        "its tokenizer_config.json or chat_template.jinja",
    )
    messages = [{"role": "user", "content": message}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    prompt = render(tokenizer, messages, add_generation_prompt=True)
    return tokenizer.encode_with_special_tokens(prompt), find_stops(tokenizer, messages)


def find_stops(tokenizer, messages):
    """Return the ids that end an answer to messages, the last of which is the user's.

    A token that ends a text is one, and so is the token that the template puts after an answer.
    """
    stops = {*tokenizer.ends}
    text = render(tokenizer, [*messages, ANSWER], add_generation_prompt=False)
    _, found, after = text.rpartition(ANSWER["content"])
    ids = tokenizer.encode_with_special_tokens(after) if found else []
    # the first one: those that follow may begin the next turn
    stops.update([i for i in ids if i in tokenizer.special_tokens.values()][:1])
    return stops


def encode_conversation(tokenizer, messages):
    """Encode a conversation to train on: its token ids, and which of them are scored, (T,) bool.

    Scored are the tokens of each answer, from where a prompt ends to the token that ends the turn.
    messages: dicts of "role" and "content". Raises UserError for a template that does not mark the
    end of an answer, or writes an earlier turn in another way once the conversation goes on.
    """
    remedy = "change this conversation, or use a model with another template"
    text = render(tokenizer, messages, False, remedy)
    found = tokenizer.find_tokens(text)
    ids, ends = found.ids, [end for _, end in found.offsets]
    is_scored = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], True, remedy)
        answered = render(tokenizer, messages[: i + 1], False, remedy)
        is_kept = answered.startswith(prompt) and text.startswith(answered)
        problem = f"the model's chat template writes message {i + 1} in another way than a prompt"
        problem += " and a later turn show it"
        require(is_kept, f"{problem}: let a conversation end with its first answer, or {remedy}")
        first, last = np.searchsorted(ends, (len(prompt), len(answered)), "right")
        stops = find_stops(tokenizer, messages[:i])
        # what follows the end of the turn, such as a line end, is the template's
        stopping = [n for n in range(first, last) if ids[n] in stops]
        problem = "the model's chat template ends an answer with no token that ends a turn"
        require(stopping, f"{problem}: use a model with another template")
        is_scored[first : stopping[-1] + 1] = True
    return ids, is_scored


def find_template(tokenizer):
    """Return the chat template of a tokenizer, or None.

    As in transformers a file of its own counts more than tokenizer_config.json.
    """
    files = getattr(tokenizer, "files", {})
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode(errors="replace")
    template = tokenizer.settings.get("chat_template") if files else None
    if isinstance(template, list):
        # several by name, such as one for tools
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    return template if isinstance(template, str) else None


def render(
    tokenizer, messages, add_generation_prompt, remedy="leave --system out, or --chat"
) -> str:
    """Render the chat template of a tokenizer for messages. Raises UserError, with the remedy."""
    require(
        importlib.util.find_spec("jinja2"),
        "the jinja2 package, which renders chat templates, is not installed: "
        "pip install -r requirements-hf.txt",
    )
    words = {name: token_text(tokenizer.settings, name) for name in SPECIAL_TOKENS}
    words = {name: text for name, text in words.items() if text is not None}
    words |= {"messages": messages, "tools": None, "documents": None}
    try:
        template = compile_template(find_template(tokenizer))
        return template.render(**words, add_generation_prompt=add_generation_prompt)
    # a template can fail in any way
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the model's chat template does not take this conversation ({reason}): {remedy}"
        ) from None


@functools.lru_cache(maxsize=8)
def compile_template(text):
    """Compile a template in the sandbox, with the additions of chat templates to Jinja."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks text that a model is trained on, and changes no text."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, **options):
        # Jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)
