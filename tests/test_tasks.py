"""Benchmarks of a checkpoint; tests/tasks/ has three small ones, which need no network."""

import json
import sys
from dataclasses import asdict

import pytest
import torch

from conftest import ROOT, pretrained, script
from model import GPT, GPTConfig
from prepare import Tokenizer

lm_eval = pytest.importorskip('lm_eval')
T = 64


def tiny(**changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**dict(vocab_size=257, block_size=T, n_layer=2, n_head=2, n_embd=32, ffn_width=96,
                                    ffn_multiple=8, tie_embeddings=False), **changes}))
    for weight in set(model.parameters()):
        weight.data *= 3  # so that predictions are far from uniform
    model.head.weight.data[128:] *= 0.6  # and most of what is generated is text
    return model.eval()


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """sample(model, *flags) runs sample.py with tests/tasks/ on a checkpoint of a model that reads bytes."""
    import datasets
    from lm_eval.tasks import TaskManager
    for name in ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE'):
        monkeypatch.setenv(name, '1')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    monkeypatch.chdir(ROOT / 'tests')  # from which the tasks find their data
    index = TaskManager.__init__  # without the harness's own tasks: thousands of files, which take seconds
    monkeypatch.setattr(TaskManager, '__init__', lambda self, **how: index(self, **{**how, 'include_defaults': False}))

    def sample(model, *flags):
        torch.save({'model_args': asdict(model.config), 'model': model.state_dict(), 'config': {'dataset': 'none'},
                    'iter_num': 7, 'tokenizer': Tokenizer.load('bytes').state()}, tmp_path / 'ckpt.pt')
        script('sample.py', f'--out_dir={tmp_path}', '--tasks_dir=tasks', '--dtype=float32', '--device=cpu', *flags)
    return sample


@pytest.fixture
def language_model(sample, monkeypatch):
    """language_model(model, batch_size=1) is what sample.py gives to the harness."""
    given = []

    def evaluate(lm, **_):
        given.append(lm)
        return {}

    def language_model(model, batch_size=1):
        monkeypatch.setattr(lm_eval, 'simple_evaluate', evaluate)
        sample(model, '--tasks=tiny_text', f'--eval_batch={batch_size}')
        return given[-1]
    return language_model


def requests_of(name):
    """The harness's requests for a task of tests/tasks/."""
    from lm_eval.tasks import TaskManager
    task = TaskManager(include_path='tasks').load(name)['tasks'][name]
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return task.instances


def request(kind, *arguments):
    from lm_eval.api.instance import Instance
    return Instance(kind, {}, arguments, 0)


def generate(lm, context='The', n=20, until=(), **how):
    return lm.generate_until([request('generate_until', context, dict(until=list(until), max_gen_toks=n, **how))])[0]


def plain_log_p(model, text):
    """The log-likelihood of a text that begins with end-of-text, each token predicted once, from model.forward."""
    ids, total = torch.tensor([[256, *text.encode()]]), 0.0
    for start in range(0, ids.size(1) - 1, T):
        end = min(start + T, ids.size(1) - 1)
        begin = max(0, end - T)  # the last window is as long as the others, and counts only what is new
        log_p = model(ids[:, begin:end])[0].log_softmax(-1).gather(2, ids[:, begin + 1:end + 1, None])
        total += log_p[0, start - begin:].sum().item()
    return total


def test_numbers_and_table(tmp_path, sample, capsys):
    sample(tiny(), '--tasks=tiny_choice,tiny_text,tiny_answer')
    written = json.loads((tmp_path / 'tasks.json').read_text())
    texts = [json.loads(line)['text'] for line in open('tasks/tiny_text.jsonl', encoding='utf-8')]
    with torch.no_grad():
        log_p = sum(plain_log_p(tiny(), text) for text in texts)
    bits = -log_p / sum(len(text.encode()) for text in texts) / torch.tensor(2.0).log().item()
    assert written['results']['tiny_text']['bits_per_byte,none'] == pytest.approx(bits, rel=1e-5)
    assert 0 <= written['results']['tiny_choice']['acc,none'] <= 1
    assert written['results']['tiny_answer']['exact_match,none'] == 0
    assert written['checkpoint'] == 'ckpt.pt' and written['step'] == 7
    assert any('bits_per_byte' in line and f'{bits:.4f}' in line for line in capsys.readouterr().out.splitlines())
    sample(tiny(), '--tasks=tiny_text', '--limit=2')  # goes to another file
    part = json.loads((tmp_path / 'tasks-limit-2.json').read_text())
    assert part['n-samples']['tiny_text']['effective'] == 2
    assert json.loads((tmp_path / 'tasks.json').read_text()) == written


def test_answers_are_those_of_the_harness_own_adapter(tmp_path, language_model):
    """HFLM has a Llama of the same weights and a tokenizer of the same ids."""
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')  # which HFLM imports
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer as Tokenizers, decoders, models, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    fast = Tokenizers(models.BPE(vocab={**vocab, '<|endoftext|>': 256}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing('<|endoftext|> $A', special_tokens=[('<|endoftext|>', 256)])
    special = dict.fromkeys(('bos_token', 'eos_token', 'pad_token'), '<|endoftext|>')
    bpe = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **special)
    llama = pretrained(tmp_path, vocab_size=257, eos_token_id=256, max_position_embeddings=T)
    llama.lm_head.weight.data[128:] *= 0.6  # so that most of what is generated is text
    llama.save_pretrained(tmp_path)
    lm = language_model(GPT.from_pretrained(tmp_path), batch_size=3)
    # loglikelihood_rolling of HFLM puts end-of-text before texts by itself, the others where add_bos_token says so.
    theirs, theirs_rolling = (HFLM(llama, tokenizer=bpe, max_length=T, batch_size=4, device='cpu', add_bos_token=bos)
                              for bos in (True, False))

    greedy = generate(lm, n=12)
    requests = requests_of('tiny_choice') + [request('loglikelihood', context, continuation) for context, continuation
                                             in (('', 'y' * T), ('The', greedy), ('x' * 70, 'y' * T), (' ', 'a space'))]
    (mine, are_greedy), (other, others_are) = (zip(*which.loglikelihood(requests)) for which in (lm, theirs))
    assert mine == pytest.approx(other, abs=1e-3) and are_greedy == others_are and set(are_greedy) == {True, False}
    requests = requests_of('tiny_text') + [request('loglikelihood_rolling', 'x' * n) for n in (T - 1, T + 1, 2 * T)]
    assert lm.loglikelihood_rolling(requests) == pytest.approx(theirs_rolling.loglikelihood_rolling(requests), abs=1e-3)
    requests = requests_of('tiny_answer') + [
        request('generate_until', 'The', dict(until=stop, max_gen_toks=n)) for stop, n in (
            (greedy[4:6], 12), ([greedy[5], greedy[3:6]], 12), ([], 40), ('never there', 32), ([''], 1))]
    mine = lm.generate_until(requests)
    assert mine == theirs.generate_until(requests) and len(set(mine)) > 4


def test_batches_of_mixed_lengths_do_not_change_answers(language_model):
    lm = language_model(tiny(mixer='titans', memory_chunk=8), batch_size=16)
    requests = requests_of('tiny_choice')
    for one, (log_p, greedy) in zip(requests, lm.loglikelihood(requests)):
        assert lm.loglikelihood([one])[0] == (pytest.approx(log_p, abs=1e-3), greedy)


def test_sampling_follows_temperature_and_seed(language_model):
    lm, drawn = language_model(tiny()), dict(do_sample=True, temperature=1.0)

    def text(seed, **how):
        torch.manual_seed(seed)
        return generate(lm, **how)
    assert text(1, **drawn) == text(1, **drawn) != text(2, **drawn)
    assert text(1) == text(2) == text(3, do_sample=False, temperature=1.0) == text(4, top_k=1, **drawn)


def test_what_block_size_cannot_hold(language_model):
    lm = language_model(tiny())
    with pytest.raises(ValueError):
        lm.loglikelihood([request('loglikelihood', 'x', 'y' * (T + 1))])
    # a context keeps its end, at least half of block_size, however much is to be generated
    assert generate(lm, 'a' * 99 + 'b' * (T // 2), n=2 * T) == generate(lm, 'c' * 9 + 'b' * (T // 2), n=2 * T)


@pytest.mark.parametrize('flags', ['--tasks=no_such_task', '--tasks=no_data', '--tasks=tiny_text,no_such_task',
                                   '--tasks=,', '--tasks=tiny_text --tasks_dir=elsewhere', '--tasks=not_installed'])
def test_tasks_that_cannot_be_run_are_one_line(tmp_path, sample, monkeypatch, flags):
    if flags == '--tasks=not_installed':
        monkeypatch.setitem(sys.modules, 'lm_eval', None)
    (tmp_path / 'tasks.json').write_text('of another run')
    with pytest.raises(SystemExit) as left:
        sample(tiny(), *flags.split())
    assert flags in left.value.code and '\n' not in left.value.code  # a text is printed, and the status is 1
    assert (tmp_path / 'tasks.json').read_text() == 'of another run'
