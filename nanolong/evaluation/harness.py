"""Checkpoints as a model of lm_eval, EleutherAI's package of tasks: python evaluate.py lm_eval."""

import sys

import torch
import torch.nn.functional as F
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data import encode_prompt, random_positions, tokenizer_from_json
from nanolong.errors import UserError, require
from nanolong.evaluation.loss import evaluation_mode
from nanolong.prompts import TextStream


def main(words, open_model):
    """Run lm_eval's command line. open_model: function of a run folder and of settings by name that
    returns a GPT and the dtype of its matrix products.
    """
    NanoLong.open_model = staticmethod(open_model)
    sys.argv = ["lm_eval", *words]
    cli_evaluate()


@register_model("nanolong")
class NanoLong(TemplateLM):
    """lm_eval encodes and pairs the texts, and this class computes the tokens."""

    def __init__(self, run="", max_length=0, batch_size=1, max_batch_size=None, **settings):
        super().__init__()
        if settings.get("device") == "cuda:0":  # lm_eval's default, on every machine
            settings["device"] = "auto"
        self.model, self.dtype = self.open_model(run, settings)
        self.tokenizer = tokenizer_from_json(self.model.meta.get("tokenizer"))
        require(self.tokenizer, f"{run} has no tokenizer: use another checkpoint")
        self.bos = self.model.meta.get("bos")  # before every text, or None
        self.max_length = max_length or self.model.config.max_positions
        # padding would change what depends on the length of the input
        is_alone = self.model.pos.is_dynamic or self.model.config.random_positions
        self.batch_size = 1 if is_alone else 16 if batch_size == "auto" else int(batch_size)

    @property
    def eot_token_id(self):
        """The token before a text without context."""
        starts = (self.bos, self.tokenizer.bos, encode_prompt(self.tokenizer, None, "")[0])
        return next(token for token in starts if token is not None)

    def tok_encode(self, string, add_special_tokens=True, **kwargs):
        has_bos = self.bos is not None and add_special_tokens is not False
        return [self.bos] * has_bos + self.tokenizer.encode(string)

    def in_batches(self, requests, compute, length, **groups):
        collator = Collator(requests, sort_fn=lambda request: -length(request), **groups)
        batches = collator.get_batched(n=self.batch_size)
        return collator.get_original([x for batch in batches for x in compute(batch)])

    def _loglikelihood_tokens(self, requests, **kwargs):
        return self.in_batches(requests, self.score, lambda request: len(request[1] + request[2]))

    def score(self, requests):
        """Return (log-likelihood, whether it is greedy) of each (texts, context, continuation)."""
        texts = [(context or [self.eot_token_id]) + ids for _, context, ids in requests]
        texts = [torch.tensor(text[-self.max_length - 1 :]) for text in texts]
        found = []
        with evaluation_mode(self.model, self.dtype) as device:
            # padded on the right, which no earlier token sees
            x = torch.nn.utils.rnn.pad_sequence([text[:-1] for text in texts], True).to(device)
            hidden = self.model.hidden_states(x, random_positions(self.model.config, *x.shape, 0))
            for row, text, (_, _, ids) in zip(hidden, texts, requests, strict=True):
                n, end = len(ids), len(text) - 1
                problem = f"a text of {n} tokens is longer than the context of {self.max_length}"
                require(n <= end, f"{problem}: give --model_args run=FOLDER,max_length={n}")
                logits = self.model.head(row[end - n : end]).float()
                loss = (
                    F.cross_entropy(logits, text[-n:].to(device), reduction="none").double().sum()
                )
                found.append((-loss.item(), logits.argmax(-1).tolist() == ids))
        return found

    def loglikelihood_rolling(self, requests, **kwargs):
        sums = []
        for request in requests:
            ids = self.tokenizer.encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
        return sums

    def generate_until(self, requests, **kwargs):
        groups = {"group_by": "gen_kwargs", "group_fn": lambda args: args[1]}
        args = [request.args for request in requests]
        return self.in_batches(args, self.write, lambda args: len(args[0]), **groups)

    def write(self, requests):
        """Continue each (text, options) up to a stop text or the end of a text; equal options."""
        options = normalize_gen_kwargs(requests[0][1])
        del options["do_sample"]
        until, n = options.pop("until"), options.pop("max_gen_toks")
        unknown = ", ".join(options.keys() - {"temperature", "top_k", "top_p", "min_p"})
        require(not unknown, f"generation has no setting {unknown}: leave it out of the task")
        problem = f"{n} new tokens fill the context of {self.max_length}"
        require(n < self.max_length, f"{problem}: give --gen_kwargs max_gen_toks=N")
        prompts = [encode_prompt(self.tokenizer, self.bos, text) for text, _ in requests]
        end_ids = {self.tokenizer.bos, *self.tokenizer.ends} - {None}
        streams = [TextStream(self.tokenizer, end_ids, list(filter(None, until))) for _ in prompts]
        texts = [""] * len(prompts)
        with evaluation_mode(self.model, self.dtype) as device:
            ids = [torch.tensor(prompt[n - self.max_length :], device=device) for prompt in prompts]
            for tokens in self.model.generate(ids, n, **{"temperature": 0.0, **options}):
                new = zip(streams, tokens[:, 0].tolist(), strict=True)
                texts = [text + stream.add(i) for text, (stream, i) in zip(texts, new, strict=True)]
                if all(stream.is_done for stream in streams):
                    break
        return [text + stream.flush() for text, stream in zip(texts, streams, strict=True)]

    def chat_template(self, chat_template=False):
        raise UserError("lm_eval cannot write chats of nanoLong: leave out --apply_chat_template")
