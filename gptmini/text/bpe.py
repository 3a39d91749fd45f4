"""Learn a byte-pair encoding: merge the most frequent pair of tokens, again and again.

Sennrich et al. 2016, on bytes and within words as in GPT-2. Only the neighbors of a merge are
counted again, so plain Python takes 4 seconds for 12 MB of code and 8192 tokens.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import regex

# Words as in Qwen2: letters after at most one other character; single digits; punctuation after at
# most one space; line ends; spaces. tiktoken, Hugging Face and llama.cpp all split this way. The
# possessive quantifiers (?+ ++ *+) match the same and spare the regex engine backtracking.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONG = 64  # characters; longer words are learned from in parts, or a single one could take hours
SYMBOLS = 2_000_000  # bytes of distinct words kept in memory
Pair = tuple[int, int]


def words(pattern: str, text: str) -> Iterator[str]:
    """The words of a text, as a pattern of tiktoken splits it."""
    return (found.group() for found in regex.finditer(pattern, text))


def learn(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Token ranks: the 256 bytes, then merges of pairs that occur at least twice.

    Ties go to the smaller pair, so the same text always gives the same ranks. A text with too few
    pairs gives fewer than `vocab_size`.
    """
    words = Counter[str]()
    find = regex.compile(PATTERN).findall
    for text in texts:
        words.update(find(text))
    for word in [word for word in words if len(word) > LONG]:
        count = words.pop(word)
        for start in range(0, len(word), LONG):
            words[word[start : start + LONG]] += count
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in _merges(words, vocab_size - 256):
        tokens.append(tokens[left] + tokens[right])
    return {token: rank for rank, token in enumerate(tokens)}


def _merges(word_counts: Counter[str], wanted: int) -> list[Pair]:
    """The pairs that become tokens 256, 257, ... in this order."""
    words, weights = _most_common(word_counts)
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
    while len(merges) < wanted and heap:
        count, pair = heapq.heappop(heap)
        if counts[pair] != -count:  # a stale entry: other merges took some of its occurrences
            heapq.heappush(heap, (-counts[pair], pair))
            continue
        if -count < 2:
            break
        merges.append(pair)
        changed: set[Pair] = set()
        for index in words_with.pop(pair):
            new_pairs = _merge(words[index], pair, 255 + len(merges), weights[index], counts)
            for new_pair in new_pairs:
                words_with[new_pair].append(index)
            changed |= new_pairs
        del counts[pair]
        for new_pair in changed:
            heapq.heappush(heap, (-counts[new_pair], new_pair))
    return merges


def _merge(
    word: list[int], pair: Pair, new: int, weight: int, counts: dict[Pair, int]
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
            counts[word[at - 1], new] += weight
            new_pairs.add((word[at - 1], new))
        if at + 2 < len(word):
            counts[right, word[at + 2]] -= weight
            counts[new, word[at + 2]] += weight
            new_pairs.add((new, word[at + 2]))
        word[at : at + 2] = [new]


def _most_common(word_counts: Counter[str]) -> tuple[list[list[int]], list[int]]:
    """The bytes and counts of the most frequent words, as many as fit in memory."""
    words: list[list[int]] = []
    weights: list[int] = []
    room = SYMBOLS
    for word, count in word_counts.most_common():
        words.append(list(word.encode()))
        weights.append(count)
        room -= len(words[-1])
        if room < 0:
            break
    return words, weights
