"""The conversation of sample.py --chat: a user's message in an Instruct model's chat template.

transformers renders the template, which is one of the files that a tokenizer came with.
"""

import importlib.util

from data.tokenizer import token_text
from nanolong.errors import UserError, require

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
ANSWER = {"role": "assistant", "content": "The answer is 42."}


def encode_chat(tokenizer, message: str, system: str = ""):
    """Encode a conversation up to where the model is to answer.

    tokenizer: a checkpoint's. message: the user's. system: the system message, none if empty.
    Returns the token ids, and the set of ids that end an answer: the tokens that end a text, and
    the token that the template puts after an answer. Raises UserError.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": message})
    prompt = render(tokenizer, messages, add_generation_prompt=True)
    answered = render(tokenizer, [*messages, ANSWER], add_generation_prompt=False)
    _, found, after = answered.rpartition(ANSWER["content"])
    following = tokenizer.encode_with_special_tokens(after) if found else []
    special = set(tokenizer.special_tokens.values())
    # the first one: those that follow may begin the next turn
    stops = [i for i in following if i in special][:1]
    return tokenizer.encode_with_special_tokens(prompt), {*tokenizer.ends, *stops}


def find_template(tokenizer):
    """Return the chat template of a tokenizer, or several by name, or None.

    As in transformers a file of its own counts more than tokenizer_config.json.
    """
    files = getattr(tokenizer, "files", {})
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode(errors="replace")
    return tokenizer.settings.get("chat_template") if files else None


def render(tokenizer, messages, add_generation_prompt) -> str:
    """Render the chat template of a tokenizer for messages. Raises UserError, with the remedy."""
    template = find_template(tokenizer)
    require(
        template is not None,
        "this checkpoint has no chat template: leave --chat out, or import an Instruct model with "
        "its tokenizer_config.json or chat_template.jinja",
    )
    require(
        importlib.util.find_spec("transformers"),
        "transformers, which renders chat templates, is not installed: "
        "pip install -r requirements-hf.txt",
    )
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {name: token_text(tokenizer.settings, name) for name in SPECIAL_TOKENS}
    try:
        # a template sees no token but these, so that any tokenizer will do
        theirs = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **words
        )
        return theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    # a template can fail in any way
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the model's chat template does not take this conversation ({reason}): "
            "leave --system out, or --chat"
        ) from None
