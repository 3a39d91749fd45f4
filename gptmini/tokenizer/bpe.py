"""Learn a byte-pair encoding: merge the most frequent pair of tokens, again and again.

Sennrich et al. 2016, on bytes and within words as in GPT-2. Only the neighbors of a merge are
counted again, so plain Python takes 4 seconds for 12 MB of code and 8192 tokens.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import regex

# Words as in Qwen2: letters after at most one other character; single digits; punctuation after at
# most one space; line ends; spaces. tiktoken, Hugging Face and llama.cpp all split this way. The
# possessive quantifiers (?+ ++ *+) match the same and spare the regex engine backtracking.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_WORD_CHARACTERS = 64  # longer words are learned in parts, or a single one could take hours
MAX_DISTINCT_WORD_BYTES = 2_000_000  # of distinct words, kept in memory
Pair = tuple[int, int]


def learn_bpe(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Learn token ranks: the 256 bytes, then merges of pairs that occur at least twice.

    Ties go to the smaller pair, so the same text always gives the same ranks. A text with too few
    pairs gives fewer than `vocab_size`.
    """
    word_counts = Counter[str]()
    pattern = regex.compile(WORD_PATTERN)
    for text in texts:
        word_counts.update(pattern.findall(text))
    for word in [word for word in word_counts if len(word) > MAX_WORD_CHARACTERS]:
        count = word_counts.pop(word)  # its parts count instead
        for start in range(0, len(word), MAX_WORD_CHARACTERS):
            word_counts[word[start : start + MAX_WORD_CHARACTERS]] += count
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in _learn_merges(word_counts, vocab_size - 256):
        tokens.append(tokens[left] + tokens[right])
    return {token: rank for rank, token in enumerate(tokens)}


def _learn_merges(word_counts: Counter[str], max_merges: int) -> list[Pair]:
    """Choose the pairs that become tokens 256, 257, ... in this order."""
    words, weights = _keep_most_common(word_counts)
    counts: dict[Pair, int] = defaultdict(int)
    words_with: dict[Pair, list[int]] = defaultdict(list)  # words that may still hold a pair
    for index, word in enumerate(words):
        pairs = Counter(pairwise(word))
        for pair, times in pairs.items():
            counts[pair] += times * weights[index]
            words_with[pair].append(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while len(merges) < max_merges and heap:
        count, pair = heapq.heappop(heap)
        if counts[pair] != -count:  # a stale entry: other merges took some of its occurrences
            heapq.heappush(heap, (-counts[pair], pair))
            continue
        if -count < 2:
            break
        merges.append(pair)
        new_token = 255 + len(merges)
        changed: set[Pair] = set()
        for index in words_with.pop(pair):
            new_pairs = _merge_pair(words[index], pair, new_token, weights[index], counts)
            for new_pair in new_pairs:
                words_with[new_pair].append(index)
            changed |= new_pairs
        del counts[pair]
        for new_pair in changed:
            heapq.heappush(heap, (-counts[new_pair], new_pair))
    return merges


def _merge_pair(
    word: list[int], pair: Pair, new_token: int, weight: int, counts: dict[Pair, int]
) -> set[Pair]:
    """Replace a pair in a word by a new token, update `counts`, and return the new pairs."""
    left, right = pair
    new_pairs: set[Pair] = set()
    at = -1
    while True:
        try:
            at = word.index(left, at + 1, len(word) - 1)
        except ValueError:
            return new_pairs
        if word[at + 1] != right:
            continue
        if at > 0:
            counts[word[at - 1], left] -= weight
            counts[word[at - 1], new_token] += weight
            new_pairs.add((word[at - 1], new_token))
        if at + 2 < len(word):
            counts[right, word[at + 2]] -= weight
            counts[new_token, word[at + 2]] += weight
            new_pairs.add((new_token, word[at + 2]))
        word[at : at + 2] = [new_token]


def _keep_most_common(word_counts: Counter[str]) -> tuple[list[list[int]], list[int]]:
    """Return the bytes and the counts of the most frequent words, as many as fit in memory."""
    words: list[list[int]] = []
    weights: list[int] = []
    total_bytes = 0
    for word, count in word_counts.most_common():
        data = word.encode()
        words.append(list(data))
        weights.append(count)
        total_bytes += len(data)
        if total_bytes > MAX_DISTINCT_WORD_BYTES:
            break
    return words, weights
