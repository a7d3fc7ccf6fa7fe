"""
Benchmarks of a model through EleutherAI's lm-evaluation-harness: what sample.py does with --tasks.

The harness turns every task into requests of three kinds, which LanguageModel answers: how likely is this continuation
of this context, how likely is this text, and how does this text go on. All begin with end-of-text, as the documents do
that a model is trained on.
"""

import json
import os

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from configurator import fail


class LanguageModel(TemplateLM):
    """A GPT as the harness asks one. TemplateLM has loglikelihood: it calls tok_encode and _loglikelihood_tokens."""

    def __init__(self, model, bpe, batch_size):
        super().__init__()
        self.model, self.bpe, self.batch_size = model, bpe, batch_size
        self.block_size, self._device = model.config.block_size, model.embedding.weight.device

    @property
    def eot_token_id(self):
        return self.bpe.eot

    def tok_encode(self, string, add_special_tokens=None, **_):
        """str -> list of int, with the end-of-text before it unless add_special_tokens is False."""
        return [self.bpe.eot][:add_special_tokens is not False] + self.bpe.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """requests: [(_, context, continuation)], lists of tokens. Returns for each the log-likelihood of the
        continuation, in nats, and whether each of its tokens is the likeliest. Of a context that is too long its end
        counts; raises ValueError if a continuation alone is longer than block_size."""
        rows = [(context + continuation)[-self.block_size - 1:] for _, context, continuation in requests]
        lengths = [len(continuation) for _, _, continuation in requests]
        if max(lengths, default=0) > self.block_size:
            raise ValueError(f'a continuation of {max(lengths)} tokens is longer than block_size={self.block_size}')
        # Similar lengths waste little on padding, and the longest first shows at once whether they fit into memory.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        answers = [None] * len(rows)
        for start in tqdm(range(0, len(order), self.batch_size), 'scoring', unit='batch', disable=None):
            batch = order[start:start + self.batch_size]
            idx = pad_sequence([torch.tensor(rows[i][:-1]) for i in batch], batch_first=True)  # (B, T)
            # Padding stands at the end, where no token before it sees it. Only continuations need logits.
            for i, x in zip(batch, self.model.hidden(idx.to(self.device))):
                end = len(rows[i]) - 1
                targets = torch.tensor(rows[i][end + 1 - lengths[i]:], device=self.device)
                log_p = self.model.logits(x[end - lengths[i]:end]).log_softmax(-1)  # (length, vocab_size)
                greedy = (log_p.argmax(-1) == targets).all()
                answers[i] = log_p.gather(1, targets[:, None]).sum().item(), greedy.item()
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-likelihood of each whole text, in windows of block_size: each token is predicted once."""
        windows = [(i, *make_disjoint_window(window)) for i, request in enumerate(requests)
                   for window in get_rolling_token_windows(self.bpe.encode(request.args[0]), self.bpe.eot,
                                                           max_seq_len=self.block_size, context_len=1)]
        totals = [0.0] * len(requests)
        for (i, *_), (log_p, _) in zip(windows, self._loglikelihood_tokens(windows)):
            totals[i] += log_p
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """How the model goes on after each context, up to end-of-text or any of the strings to stop at, without it.
        Raises ValueError if block_size has no room for a context beside max_gen_toks."""
        texts = []
        for context, kwargs in tqdm([request.args for request in requests], 'generating', disable=None):
            how = normalize_gen_kwargs(kwargs)
            stops, room = [stop for stop in how['until'] if stop], self.block_size - how['max_gen_toks']
            if room < 1:
                raise ValueError(f'max_gen_toks={how["max_gen_toks"]} of a task leaves no room for its context in '
                                 f'block_size={self.block_size}')
            idx = torch.tensor([self.tok_encode(context)[-room:]], device=self.device)
            tokens, text = [], ''
            for token in self.model.generate_tokens(idx, how['max_gen_toks'], how.get('temperature', 0.0),
                                                    how.get('top_k', 0), how.get('top_p', 1.0), self.bpe.eot):
                tokens.append(token.item())
                text = self.bpe.decode(tokens).decode('utf-8', 'replace')  # a character may be more than one token
                if any(stop in text for stop in stops):
                    break
            for stop in stops:
                text = text.split(stop)[0]
            texts.append(text)
        return texts


class Tasks(TaskManager):
    """The harness's tasks, and those of a folder; ends the program where one does not exist or cannot be loaded."""

    def load(self, names):
        try:
            return super().load(names)
        except Exception as error:  # of the harness, of a task's own code, of datasets or of the network
            fail(f'--tasks={",".join(names)}: {type(error).__name__}: {error}')


def benchmark(model, tokenizer, names, folder, limit, batch_size, seed, path):
    """Evaluate a model on tasks; print the harness's table, and write the numbers as JSON to path.

    names: separated by commas. folder: one with tasks of one's own, or ''. limit: examples of each task, 0 for all.
    """
    # Standard errors that have no formula are bootstrapped. The harness would do so in processes that may, depending on
    # the system, run the main script again; in this one, 1000 resamples take seconds.
    os.environ['DISABLE_MULTIPROC'] = '1'
    results = simple_evaluate(LanguageModel(model, tokenizer, batch_size), tasks=names.split(','), limit=limit or None,
                              task_manager=Tasks(include_path=folder or None), bootstrap_iters=1000, log_samples=False,
                              torch_random_seed=seed)
    print(make_table(results))
    if 'groups' in results:
        print(make_table(results, 'groups'))
    kept = 'results', 'groups', 'versions', 'n-shot', 'n-samples', 'lm_eval_version'
    part = path.with_name(path.name + '.part')
    try:
        part.write_text(json.dumps({name: results[name] for name in kept if name in results}, indent=2, default=float))
        os.replace(part, path)
    except OSError as error:
        fail(f'{path}: {error.strerror}')
