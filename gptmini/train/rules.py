"""Which rules of the built-in stories a model has learnt.

A rule determines words by what stands before them (`data/stories.py`). A place is right if each of
its tokens is the most likely one to the model, which reads the story up to there.

Letters: B stories at once, T positions, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice

import numpy as np
import torch

from gptmini.data.stories import RULES, SEED, Story, iter_stories
from gptmini.model.gpt import GPT
from gptmini.tokenizer.tokenizers import Tokenizer
from gptmini.train.evaluate import LearntRule

N_STORIES = 300
STORIES_AT_ONCE = 16
UNSEEN_SEED = SEED + 1


@torch.inference_mode()
def measure_rules(model: GPT, tokenizer: Tokenizer) -> list[LearntRule]:
    """Measure the rules that a model has learnt, on stories that it cannot have read.

    Places beyond the context are left out.
    """
    model.eval()
    rights: defaultdict[str, list[bool]] = defaultdict(list)
    # By a seed whose first stories are not in the text.
    stories = list(islice(iter_stories(UNSEEN_SEED), N_STORIES))
    for first in range(0, len(stories), STORIES_AT_ONCE):
        batch = stories[first : first + STORIES_AT_ONCE]
        for rule, is_right in _check_places(model, tokenizer, batch):
            rights[rule].append(is_right)
    return [_summarize(rule, rights[rule]) for rule in RULES if rights[rule]]


def _check_places(model: GPT, tokenizer: Tokenizer, stories: list[Story]) -> list[tuple[str, bool]]:
    """Return the rule of each place of some stories, and whether the model is right there."""
    context_length = model.config.context_length
    encoded = [tokenizer.encode(story.text)[:context_length] for story in stories]
    longest = max(map(len, encoded))
    inputs = np.full((len(stories), longest), tokenizer.eos_token_id)  # (B, T)
    for row, tokens in zip(inputs, encoded, strict=True):
        row[1 : len(tokens)] = tokens[:-1]  # after an end-of-text token
    logits = model(torch.from_numpy(inputs).to(model.device))  # (B, T, V)
    likeliest = logits.argmax(-1).cpu().numpy()  # (B, T)
    byte_lengths = tokenizer.compute_byte_lengths()  # (V,)
    results = []
    for story, tokens, guesses in zip(stories, encoded, likeliest, strict=True):
        ends = byte_lengths[tokens].cumsum()  # of each token in the story, which is ASCII
        starts = ends - byte_lengths[tokens]
        is_right = guesses[: len(tokens)] == tokens
        for place in story.places:
            if place.end <= ends[-1]:
                of_place = (starts < place.end) & (ends > place.start)
                results.append((place.rule, bool(is_right[of_place].all())))
    return results


def _summarize(rule: str, rights: list[bool]) -> LearntRule:
    """Count what is right, with the interval of Agresti and Coull (1998)."""
    n = len(rights)
    right = sum(rights)
    middle = (right + 2) / (n + 4)
    half_width = 2 * math.sqrt(middle * (1 - middle) / (n + 4))
    return LearntRule(rule, right / n, half_width, n, 1 / RULES[rule][0])


def format_rules(rules: Iterable[LearntRule]) -> list[str]:
    """Format what was measured as the lines of a table, with an example of each rule."""
    lines = ["rule      right         chance  example"]
    for each in rules:
        right = f"{100 * each.right:3.0f} % ± {100 * each.half_width:.0f}"
        chance = f"{100 * each.chance:4.0f} %"
        lines.append(f"{each.rule:8}  {right:12}  {chance}  {RULES[each.rule][1]}")
    return [*lines, "", "±: margin of error; a rule near its chance, or below, is not learnt yet"]
