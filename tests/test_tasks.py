"""Benchmarks of a checkpoint; tests/tasks/ has three small ones, which need no network."""

import json
import sys
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from conftest import ROOT, pretrained, script
from model import GPT, GPTConfig
from prepare import Tokenizer

pytest.importorskip('lm_eval')
FOLDER = ROOT / 'tests'  # the working directory from which the tasks find their data
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
def folder(tmp_path, monkeypatch):
    """A folder with a checkpoint; datasets cache theirs there too, and stay offline."""
    offline = {'HF_HOME': str(tmp_path / 'hf'), 'HF_DATASETS_CACHE': str(tmp_path / 'hf'), 'HF_HUB_OFFLINE': '1',
               'HF_DATASETS_OFFLINE': '1'}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    import datasets  # it has read the variables before, where another test has imported it
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', offline['HF_DATASETS_CACHE'])
    monkeypatch.chdir(FOLDER)
    model = tiny()
    torch.save({'model_args': asdict(model.config), 'model': model.state_dict(), 'config': {'dataset': 'none'},
                'iter_num': 7, 'tokenizer': Tokenizer.load('bytes').state()}, tmp_path / 'ckpt.pt')
    return tmp_path


@pytest.fixture
def sample(folder, monkeypatch):
    """Run sample.py in this process, without the harness's own tasks: thousands of files, which take seconds. Returns
    its variables."""
    from lm_eval.tasks import TaskManager
    index = TaskManager.__init__
    monkeypatch.setattr(TaskManager, '__init__', lambda self, **how: index(self, **{**how, 'include_defaults': False}))

    how = f'--out_dir={folder}', '--tasks_dir=tasks', '--dtype=float32', '--device=cpu', '--eval_batch=3'
    return lambda *args: script('sample.py', *how, *args)


@pytest.fixture
def language_model(sample):
    """language_model(model, batch_size=1) makes the adapter of a model that reads bytes."""
    scope = sample('--num_samples=0')
    return lambda model, batch_size=1: scope['language_model'](model, Tokenizer.load('bytes'), batch_size)


def requests_of(*names):
    """{kind: requests} of all examples of tasks of tests/tasks/."""
    from lm_eval.tasks import TaskManager
    found = {}
    for task in TaskManager(include_path='tasks', include_defaults=False).load(list(names))['tasks'].values():
        task.build_all_requests(limit=None, rank=0, world_size=1)
        for request in task.instances:
            found.setdefault(request.request_type, []).append(request)
    return found


def request(kind, *arguments):
    from lm_eval.api.instance import Instance
    return Instance(kind, {}, arguments, 0)


def plain_log_p(model, text):
    """The log-likelihood of a text that begins with end-of-text, each token predicted once, from model.forward."""
    ids = torch.tensor([256, *text.encode()])
    total, n = 0.0, len(ids) - 1
    for start in range(0, n, T):
        end = min(start + T, n)
        begin = max(0, end - T)  # the last window is as long as the others, and counts only what is new
        losses = model(ids[None, begin:end], ids[None, begin + 1:end + 1], reduction='none')[1]
        total -= losses[0, start - begin:].sum().item()
    return total


def test_command_prints_and_writes_what_the_model_gives(folder, sample, capsys):
    sample('--tasks=tiny_choice,tiny_text,tiny_answer')
    written = json.loads((folder / 'tasks.json').read_text())
    assert not (folder / 'tasks.json.part').exists()
    texts = [json.loads(line)['text'] for line in (FOLDER / 'tasks/tiny_text.jsonl').read_text('utf-8').splitlines()]
    with torch.no_grad():
        log_p = sum(plain_log_p(tiny(), text) for text in texts)
    bits = -log_p / sum(len(text.encode()) for text in texts) / torch.tensor(2.0).log().item()
    assert written['results']['tiny_text']['bits_per_byte,none'] == pytest.approx(bits, rel=1e-5)
    assert written['checkpoint'] == 'ckpt.pt' and written['step'] == 7
    assert 0 <= written['results']['tiny_choice']['acc,none'] <= 1
    assert written['results']['tiny_answer']['exact_match,none'] == 0
    assert {name: n['effective'] for name, n in written['n-samples'].items()} == dict(tiny_choice=5, tiny_text=4,
                                                                                      tiny_answer=3)
    table = capsys.readouterr().out
    assert any('bits_per_byte' in line and f'{bits:.4f}' in line for line in table.splitlines()), table
    sample('--tasks=tiny_text', '--limit=2')  # of which the numbers do not take the place of the whole
    part = json.loads((folder / 'tasks-limit-2.json').read_text())
    assert part['n-samples']['tiny_text']['effective'] == 2
    assert json.loads((folder / 'tasks.json').read_text()) == written


def test_a_task_without_room_is_refused_before_others_are_scored(folder, sample, monkeypatch):
    monkeypatch.setattr('lm_eval.simple_evaluate', lambda *_, **__: pytest.fail('it was too late'))
    saved = torch.load(folder / 'ckpt.pt')
    torch.save({**saved, 'model_args': {**saved['model_args'], 'block_size': 20}}, folder / 'ckpt.pt')
    with pytest.raises(SystemExit, match='max_gen_toks=20 of tiny_answer leaves no room'):
        sample('--tasks=tiny_text,tiny_answer')


def test_answers_are_those_of_the_harness_own_adapter(folder, language_model):
    """Every request, to HFLM with a Llama of the same weights and a tokenizer of the same ids."""
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')  # which HFLM imports
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer as Tokenizers, decoders, models, pre_tokenizers, processors

    # GPT-2's characters for the bytes: those that can be printed are themselves, the others come after them
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    fast = Tokenizers(models.BPE(vocab={**vocab, '<|endoftext|>': 256}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing('<|endoftext|> $A', special_tokens=[('<|endoftext|>', 256)])
    special = dict.fromkeys(('bos_token', 'eos_token', 'pad_token'), '<|endoftext|>')
    bpe = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **special)

    llama = pretrained(folder, vocab_size=257, eos_token_id=256, max_position_embeddings=T)
    llama.lm_head.weight.data[128:] *= 0.6  # so that most of what is generated is text
    llama.save_pretrained(folder)
    lm = language_model(GPT.from_pretrained(folder), batch_size=3)
    # It puts the end-of-text before texts where it is told so; before a text of loglikelihood_rolling it does in any
    # case, and would then have two.
    theirs = {bos: HFLM(llama, tokenizer=bpe, max_length=T, batch_size=4, device='cpu', add_bos_token=bos)
              for bos in (True, False)}

    requests = requests_of('tiny_choice', 'tiny_text', 'tiny_answer')
    assert Counter({kind: len(rs) for kind, rs in requests.items()}) == dict(
        loglikelihood=12, loglikelihood_rolling=4, generate_until=3)
    greedy = lm.generate_until([request('generate_until', 'The', dict(until=[], max_gen_toks=12))])[0]
    requests['loglikelihood'] += [
        request('loglikelihood', context, continuation) for context, continuation in (
            ('', 'y' * T), ('The', greedy), ('x' * 70, 'y' * T), (' ', 'after a space'))]
    requests['generate_until'] += [
        request('generate_until', 'The', dict(until=stop, max_gen_toks=n)) for stop, n in (
            (greedy[4:6], 12), ([greedy[5], greedy[3:6]], 12), ([], 40), ('never there', 63), ([''], 1))]
    requests['loglikelihood_rolling'] += [request('loglikelihood_rolling', 'x' * n) for n in (T - 1, T + 1, 2 * T)]

    for text in ('The é 🌲', ' \n', greedy):
        assert lm.tok_encode(text) == theirs[True].tok_encode(text)
    mine, other = (which.loglikelihood(requests['loglikelihood']) for which in (lm, theirs[True]))
    for (a, a_greedy), (b, b_greedy) in zip(mine, other, strict=True):
        assert a == pytest.approx(b, abs=1e-3) and a_greedy == b_greedy
    assert {is_greedy for _, is_greedy in mine} == {True, False}
    mine, other = (which.loglikelihood_rolling(requests['loglikelihood_rolling']) for which in (lm, theirs[False]))
    assert mine == pytest.approx(other, abs=1e-3)
    mine, other = (which.generate_until(requests['generate_until']) for which in (lm, theirs[True]))
    assert mine == other and len(set(mine)) > 4


@pytest.mark.parametrize('mixer', ['gated', 'titans'])
def test_batches_of_mixed_lengths_do_not_change_answers(folder, language_model, mixer):
    requests = requests_of('tiny_choice')['loglikelihood']
    lm = language_model(tiny(mixer=mixer, memory_chunk=8), batch_size=16)
    batched = lm.loglikelihood(requests)
    for one, (log_p, greedy) in zip(requests, batched):
        (alone, alone_greedy), = lm.loglikelihood([one])
        assert log_p == pytest.approx(alone, abs=1e-3) and greedy == alone_greedy
    assert lm.generate_until([request('generate_until', 'The', dict(until=['\n'], max_gen_toks=9))])[0]


def test_sampling_follows_temperature_and_seed(folder, language_model):
    lm = language_model(tiny())

    def text(seed, **kwargs):
        torch.manual_seed(seed)
        return lm.generate_until([request('generate_until', 'The', dict(until=[], max_gen_toks=20, **kwargs))])[0]
    drawn = dict(do_sample=True, temperature=1.0)
    assert text(1, **drawn) == text(1, **drawn) != text(2, **drawn)
    assert text(1) == text(2) == text(3, do_sample=False, temperature=1.0) == text(4, top_k=1, **drawn)


def test_what_block_size_cannot_hold_is_an_error(folder, language_model):
    lm = language_model(tiny())
    with pytest.raises(ValueError, match='continuation of 65 tokens'):
        lm.loglikelihood([request('loglikelihood', 'x', 'y' * (T + 1))])
    with pytest.raises(ValueError, match='max_gen_toks=64'):
        lm.generate_until([request('generate_until', 'x', dict(max_gen_toks=T))])


@pytest.mark.parametrize('name', ['no_such_task', 'no_data', 'tiny_text,no_such_task'])
def test_tasks_that_cannot_be_loaded_are_one_line(folder, sample, name):
    with pytest.raises(SystemExit) as error:
        sample(f'--tasks={name}')
    message = error.value.code  # a text is printed, and the status is 1
    assert message.startswith(f'--tasks={name}: ') and 'no_such' in message and '\n' not in message, message
    assert not (folder / 'tasks.json').exists()


def test_a_folder_of_tasks_that_is_not_there(folder, sample):
    with pytest.raises(SystemExit, match='tasks_dir=elsewhere: no such folder'):
        sample('--tasks=mine', '--tasks_dir=elsewhere')


def test_command_without_the_harness_is_one_line(folder, run, monkeypatch):
    monkeypatch.setitem(sys.modules, 'lm_eval', None)  # as if it were not installed
    done = run('sample.py', f'--out_dir={folder}', '--tasks=tiny_text', status=1)
    assert 'pip install -U lm-eval' in done.stderr and done.stderr.count('\n') == 1, done.stderr
