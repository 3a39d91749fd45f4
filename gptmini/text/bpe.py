"""Learning byte-pair encoding: which pairs of tokens become a token, most frequent first.

Sennrich et al. 2016, on bytes and within words as in GPT-2. Only the changed neighbours of a merge
are counted again, so plain Python needs 2 seconds for 10 MB of code and 8192 tokens.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import regex

# A word: letters behind one other character, up to three digits, marks behind a space, line ends,
# spaces. As in GPT-4, but nothing is longer than 16, so that no text can make it slow.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,16}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,16}[\r\n]{0,16}"
    r"|\s{0,16}?[\r\n]|\s{1,16}(?!\S)|\s"
)
SYMBOLS = 2_000_000  # bytes of different words that are held in memory
Pair = tuple[int, int]


def learn(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """The ranks of a vocabulary: the 256 bytes, then merges of pairs that occur at least twice.

    Equal counts are decided by the smaller pair, so the same text always gives the same ranks. They
    are fewer than vocab_size where the text has no more pairs.
    """
    words = Counter[str]()
    find = regex.compile(PATTERN).findall
    for text in texts:
        words.update(find(text))
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in _merges(words, vocab_size - 256):
        tokens.append(tokens[left] + tokens[right])
    return {token: rank for rank, token in enumerate(tokens)}


def _merges(counted: Counter[str], wanted: int) -> list[Pair]:
    """The pairs that become tokens 256, 257, ... in this order."""
    words, weights = _most_common(counted)
    counts: dict[Pair, int] = defaultdict(int)
    where: dict[Pair, list[int]] = defaultdict(list)  # the words that may hold a pair
    for index, word in enumerate(words):
        pairs = Counter(pairwise(word))
        for pair, times in pairs.items():
            counts[pair] += times * weights[index]
            where[pair].append(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while len(merges) < wanted and heap:
        count, pair = heapq.heappop(heap)
        if counts[pair] != -count:  # it has lost some to other merges since
            heapq.heappush(heap, (-counts[pair], pair))
            continue
        if -count < 2:
            break
        merges.append(pair)
        changed: set[Pair] = set()
        for index in where.pop(pair):
            made = _merge(words[index], pair, 255 + len(merges), weights[index], counts)
            for neighbours in made:
                where[neighbours].append(index)
            changed |= made
        del counts[pair]
        for neighbours in changed:
            heapq.heappush(heap, (-counts[neighbours], neighbours))
    return merges


def _merge(
    word: list[int], pair: Pair, new: int, weight: int, counts: dict[Pair, int]
) -> set[Pair]:
    """Put a new token for a pair in a word; keep the counts right and return the pairs made."""
    left, right = pair
    made: set[Pair] = set()
    at = -1
    while True:
        try:
            at = word.index(left, at + 1, len(word) - 1)
        except ValueError:
            return made
        if word[at + 1] != right:
            continue
        if at > 0:
            counts[word[at - 1], left] -= weight
            counts[word[at - 1], new] += weight
            made.add((word[at - 1], new))
        if at + 2 < len(word):
            counts[right, word[at + 2]] -= weight
            counts[new, word[at + 2]] += weight
            made.add((new, word[at + 2]))
        word[at : at + 2] = [new]


def _most_common(counted: Counter[str]) -> tuple[list[list[int]], list[int]]:
    """The bytes and counts of the most frequent words, so many as fit in memory."""
    words: list[list[int]] = []
    weights: list[int] = []
    room = SYMBOLS
    for word, count in counted.most_common():
        words.append(list(word.encode()))
        weights.append(count)
        room -= len(words[-1])
        if room < 0:
            break
    return words, weights
