"""The built-in stories: little texts from a grammar, in which one can see what a model has learnt.

Each plot below is a story with gaps. Some gaps are free: a name, a colour, a number. Others are
determined by what stands before them, by one of the RULES, and marked with it: `{A|name}` is a
place where only that name is right. So a model's mistakes say what it does not know yet. The same
seed gives the same stories on every machine.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Of each rule: how many words could stand at its places, for somebody who knows all but the rule;
# and an example.
RULES = {
    "pronoun": (2, "Ella had none. So [she] ..."),
    "turn": (2, '"Are you hungry?" asked Ella. "Yes," said [Ben].'),
    "name": (2, "Ella gave the key to Ben, and Ben gave the drum to [Ella]."),
    "copy": (10, "Ella found a red kite. She took the [red] [kite] home."),
    "place": (10, "I live in the mill. ... They came to the [mill]."),
    "day": (7, "On Monday she began. On [Tuesday] she painted it."),
    "rank": (3, "Ada was faster than Ben. So [Ada] was first."),
    "sum": (12, "Ella had five plums. She gave two to Ben. Now Ella had [three] left."),
    "binding": (2, "a red kite and a blue drum: so the kite is [red]"),
}

GIRLS = "Ada Ella Eva Ida Iris Ivy Kate Lily Lucy Mia Nora Rosa Ruth Tess Zoe".split()
BOYS = "Adam Ben Carl Dan Finn Jack Jon Leo Max Noah Otto Paul Sam Theo Tom".split()
COLOURS = "red blue green white black yellow brown grey pink purple".split()
THINGS = "kite drum key ball boat hat lamp bell cup coat".split()
FOOD = "plums pears nuts cakes figs cherries rolls carrots beans lemons".split()
PLACES = "barn school garden kitchen mill harbour library market station castle".split()
ANIMALS = "bear fox cat dog goose horse mouse rabbit hen frog".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBERS = "no one two three four five six seven eight nine ten eleven twelve".split()
# Between a cause and its effect, so that a model has to look back past them.
ASIDES = (
    "The sun was warm. ",
    "It rained a little. ",
    "The wind was cold. ",
    "A bell rang far away. ",
    "Birds sang in the trees. ",
    "The street was quiet. ",
    "It was nearly noon. ",
    "",
    "",
    "",
)

# Gaps: names A, B, C and their pronouns; colours c and d; things s and t; places p, q and r; an
# animal; days u, v and w, one after the other; numbers m and n, m the smaller, their sum and what
# is left; aside, another sentence or none each time.
PLOTS = (
    '{A} had {n} {food}. {B} had none. {aside}"Are you hungry?" asked {A|name}. "Yes," said '
    "{B|turn}. So {she_A|pronoun} gave {m} {food|copy} to {B|name}. Now {A|name} had {left|sum} "
    "{food|copy} left, and {B|name} had {m|copy}.",
    "In the morning {A} picked {n} {food} for {B}. {aside}In the evening {she_A|pronoun} picked "
    '{m} more. "How many do you have now?" asked {B|turn}. "I have {sum|sum} {food|copy}," said '
    "{A|turn}, and put them on the table. {B|name} ate one and thanked {him_A|pronoun}.",
    "{A} had a {c} {s}, and {B} had a {d} {t}. {A} liked the {t|copy} better, and {B} liked the "
    '{s|copy} better. {aside}"Shall we swap?" asked {A}. So {A|name} gave the {s|copy} to '
    "{B|name}, and {B|name} gave the {t|copy} to {A|name}. Now {A|name} has the {d|binding} "
    "{t|copy}, and {B|name} has the {c|binding} {s|copy}.",
    "{A} lost {his_A|pronoun} {c} {s} in the {p}. {B} helped {him_A|pronoun} to look for it. "
    '{aside}First they found a {d} {s|copy}. "Is it this one?" asked {B|turn}. "No, mine is '
    '{c|copy}," said {A|turn}. Then {B} looked under a bench and found the {c|copy} {s|copy}. '
    '"Thank you, {B|name}," said {A|name}, and took {his_A|pronoun} {s|copy} home.',
    '{A} met a {c} {animal} in the {p}. "Hello," said the {animal|copy}. "I live in the {q}, but I '
    'am lost." {aside}"Do not be sad," said {A|name}. {She_A|pronoun} walked with the '
    "{animal|copy} over a bridge, past the {r} and up a hill, until they came to the {q|place}. "
    'The {animal|copy} was glad and said: "Thank you, {A|name}."',
    "On {u} {A} began to make a {s} for {B}. {aside}On {v|day} {she_A|pronoun} painted it {c}. "
    "On {w|day} {she_A|pronoun} carried it to the {p}, where {B|name} was waiting. {B|name} "
    'looked at the {c|copy} {s|copy} and smiled. "Is it for me?" asked {B|turn}. "Yes," said '
    "{A|turn}.",
    "{A}, {B} and {C} ran from the {p} to the {q}. {aside}{A} was faster than {B}, and {B} was "
    "faster than {C}. So {A|rank} was first, {B|rank} was second, and {C|rank} was last. At the "
    "{q|place} {C} sat down. {She_C|pronoun} was tired, but {she_C|pronoun} laughed.",
    "{A}, {B} and {C} climbed a ladder in the {p}. {aside}{B} was higher than {C}, and {A} was "
    "higher than {B}. So {A|rank} was at the top, {C|rank} was at the bottom, and {B|rank} was "
    'between them. "I can see the {q} from here!" called {A|name}.',
    '"Where are you going, {A}?" asked {B}. "To the {p}," said {A|turn}. "What for?" asked '
    '{B|turn}. "To get a {c} {s}," said {A|turn}. "May I come with you?" asked {B|turn}. "Yes," '
    "said {A|turn}. {aside}So they went to the {p|place} together and came back with a {c|copy} "
    "{s|copy}.",
    "{A} put a {c} {s} in the {p} and went out. {aside}Then {B} came and carried the {s|copy} to "
    "the {q}. When {A|name} came back, {she_A|pronoun} looked for it in the {p|place}, but it was "
    'not there. "Where is my {s|copy}?" asked {A|name}. "It is in the {q|place}," said {B|turn}.',
    '{A} wrote a letter to {B}. {She_A|pronoun} wrote: "Come to the {p} on {u}, and bring your '
    '{c} {s}." {aside}{B|name} read it twice and put it on the shelf. The days went by. On '
    "{u|copy} {B|name} took the {c|copy} {s|copy} and went to the {p|place}. {A|name} was there "
    "already.",
    "{A} is {m} years old. {aside}{B} is {n} years older than {A}. {B} has a birthday today, and "
    '{A|name} brings {him_B|pronoun} a {c} {s}. "How old are you now, {B|name}?" asked {A|turn}. '
    '"I am {sum|sum}," said {B|turn}, and held the {s|copy} up to the light.',
)

COUNT = 2900  # stories of the built-in text
BYTES = 713_000  # about, in UTF-8
SEED = 1
_GAP = re.compile(r"\{(\w+)(?:\|(\w+))?\}")


@dataclass(frozen=True)
class Place:
    """A stretch of a story that what stands before it determines, by a rule.

    `start` and `end` count characters of the story.
    """

    start: int
    end: int
    rule: str


@dataclass(frozen=True)
class Story:
    """A story, and its determined places in their order."""

    text: str
    places: tuple[Place, ...]


def iter_stories(seed: int = SEED) -> Iterator[Story]:
    """Yield one story after another, without end; no two of them have the same text."""
    told: set[str] = set()
    number = 0
    while True:
        story = _tell(_Dice(seed, number))
        number += 1
        if story.text not in told:
            told.add(story.text)
            yield story


class _Dice:
    """Random choices that are the same for ever: hashes of a seed, a story and a counter."""

    def __init__(self, seed: int, story: int) -> None:
        self._name = f"{seed} {story}"
        self._count = 0

    def draw(self, n: int) -> int:
        """Draw a number below `n`."""
        self._count += 1
        digest = hashlib.sha256(f"{self._name} {self._count}".encode()).digest()
        return int.from_bytes(digest[:8]) % n

    def pick(self, words: list[str], count: int) -> list[str]:
        """Pick different words."""
        left = list(words)
        return [left.pop(self.draw(len(left))) for _ in range(count)]


def _tell(dice: _Dice) -> Story:
    """Fill the gaps of a plot, and note where the determined ones are."""
    plot = PLOTS[dice.draw(len(PLOTS))]
    words = _choose_words(dice)
    text = ""
    places = []
    copied = 0  # characters of the plot
    for gap in _GAP.finditer(plot):
        text += plot[copied : gap.start()]
        copied = gap.end()
        key, rule = gap.groups()
        word = ASIDES[dice.draw(len(ASIDES))] if key == "aside" else words[key]
        if rule:
            places.append(Place(len(text), len(text) + len(word), rule))
        text += word
    return Story(text + plot[copied:], tuple(places))


def _choose_words(dice: _Dice) -> dict[str, str]:
    """Choose a word for each gap."""
    words: dict[str, str] = {}
    people = zip("ABC", dice.pick(GIRLS + BOYS, 3), strict=True)
    for letter, name in people:
        words[letter] = name
        is_girl = name in GIRLS
        words[f"she_{letter}"] = "she" if is_girl else "he"
        words[f"She_{letter}"] = "She" if is_girl else "He"
        words[f"him_{letter}"] = "her" if is_girl else "him"
        words[f"his_{letter}"] = "her" if is_girl else "his"
    words["c"], words["d"] = dice.pick(COLOURS, 2)
    words["s"], words["t"] = dice.pick(THINGS, 2)
    words["p"], words["q"], words["r"] = dice.pick(PLACES, 3)
    words["food"] = FOOD[dice.draw(len(FOOD))]
    words["animal"] = ANIMALS[dice.draw(len(ANIMALS))]
    day = dice.draw(len(DAYS))
    for after, letter in enumerate("uvw"):
        words[letter] = DAYS[(day + after) % len(DAYS)]
    n = 4 + dice.draw(4)  # 4 to 7
    m = 2 + dice.draw(n - 3)  # 2 to 5, so that at least 2 are left
    words["n"] = NUMBERS[n]
    words["m"] = NUMBERS[m]
    words["left"] = NUMBERS[n - m]
    words["sum"] = NUMBERS[n + m]
    return words
