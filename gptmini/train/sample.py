"""The text that a model writes at each evaluation of its training."""

import math
import time

from gptmini import machine
from gptmini.config.settings import Config
from gptmini.console import show_elapsed
from gptmini.generate.engine import TorchEngine
from gptmini.generate.run import Run
from gptmini.generate.sampler import sample_tokens
from gptmini.generate.sequence import build_token_bias
from gptmini.plan.minutes import MAX_SAMPLE_SHARE
from gptmini.train.state import Training

MAX_SAMPLE_TOKENS = 120  # drawn at each evaluation
MIN_SAMPLE_TOKENS = 20
# Drawing a token takes as long as training on 20 to 30 (SmolLM2-135M on a CPU), so a sample takes
# a quarter of the time of the updates before it at most, if it may be that short.
TRAINED_TOKENS_PER_SAMPLE_TOKEN = 100


@show_elapsed("writing a sample")
def generate_sample(training: Training) -> str:
    """Return what the model would write now; drawing it does not touch the run.

    A model that learns to answer is asked a question that was held out, which is returned as well.
    """
    limits = {"max_new_tokens": _limit_sample_tokens(training.config), "overflow": "stop"}
    settings = training.config.sample.model_copy(update=limits)
    model = training.model.eval()
    tokenizer = training.corpus.tokenizer
    question = training.corpus.read_question()
    if len(question) + settings.max_new_tokens > model.config.context_length:
        question = []  # the answer must fit as well
    run = Run(training.run.path, training.config, tokenizer, model)
    bias = build_token_bias(tokenizer, settings)
    text = run.create_text(0, question or "", settings, bias)
    started = time.perf_counter()
    seconds = _get_sample_seconds(training)
    with training.enter_inference(), machine.allow_varying_algorithms():
        for _, token, _ in sample_tokens(TorchEngine(model), [text]):
            text.decode_token(token)
            if time.perf_counter() - started > seconds:
                break
    special = tokenizer.special_tokens.values()
    shown = tokenizer.decode([token for token in text.prompt_tokens if token not in special])
    return (shown + text.text).lstrip()


def _limit_sample_tokens(config: Config) -> int:
    """Return how many tokens a sample may have; few where little is trained between samples."""
    train = config.train
    trained = min(train.eval_every, train.steps) * train.batch_size * config.seq_len
    worthwhile = max(MIN_SAMPLE_TOKENS, trained // TRAINED_TOKENS_PER_SAMPLE_TOKEN)
    return min(MAX_SAMPLE_TOKENS, worthwhile, config.sample.max_new_tokens)


def _get_sample_seconds(training: Training) -> float:
    """Return how long a sample may take: a share of the minutes, where those limit the run.

    On several processes there is no such limit. Their clocks differ, but they must draw equally
    many tokens.
    """
    minutes = training.config.train.minutes
    if minutes is None or not training.steps_follow_minutes or training.group.world_size > 1:
        return math.inf
    return MAX_SAMPLE_SHARE * 60 * minutes
