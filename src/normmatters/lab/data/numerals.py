"""Number words, English and German: the parallel text that needs no download.

"two hundred forty-one" is "zweihunderteinundvierzig": German swaps tens and ones and writes one long word, so a
translator has to segment, reorder and translate. The rules are the two languages' own; nothing is random but the split.
"""

from __future__ import annotations

import random

__all__ = ["LIMIT", "english", "german", "splits"]

LIMIT = 10_000


def _words(*lines: str) -> list[str]:
    return " ".join(lines).split()


_EN_ONES = _words(
    "zero one two three four five six seven eight nine ten",
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
)
_EN_TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")
_DE_ONES = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn",
    "elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn",
)
_DE_TENS = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


def english(number: int) -> str:
    """The English words for ``0 <= number < 10000``.

    >>> english(2041)
    'two thousand forty-one'
    """
    _check(number)
    parts = []
    if number >= 1000:
        parts += [_EN_ONES[number // 1000], "thousand"]
    if number % 1000 >= 100:
        parts += [_EN_ONES[number % 1000 // 100], "hundred"]
    rest = number % 100
    if rest >= 20:
        parts.append(_EN_TENS[rest // 10] + (f"-{_EN_ONES[rest % 10]}" if rest % 10 else ""))
    elif rest or not parts:
        parts.append(_EN_ONES[rest])
    return " ".join(parts)


def german(number: int) -> str:
    """The German word for ``0 <= number < 10000``: ones before tens, all in one word.

    >>> german(2041)
    'zweitausendeinundvierzig'
    """
    _check(number)
    word = ""
    if number >= 1000:
        word += _joint(number // 1000) + "tausend"
    if number % 1000 >= 100:
        word += _joint(number % 1000 // 100) + "hundert"
    rest = number % 100
    if rest >= 20:
        word += (_joint(rest % 10) + "und" if rest % 10 else "") + _DE_TENS[rest // 10]
    elif rest or not word:
        word += _DE_ONES[rest]
    return word


def splits(train: int, val: int, test: int) -> dict[str, tuple[list[str], list[str]]]:
    """``{"train": (english, german), "val": ..., "test": ...}``: disjoint draws from 0..9999, the same ever again."""
    if min(train, val, test) < 0 or train + val + test > LIMIT:
        raise ValueError(f"expected sizes of at least 0 that sum to at most {LIMIT}, got {train}, {val} and {test}")
    numbers = list(range(LIMIT))
    random.Random(0).shuffle(numbers)
    cuts = {"train": numbers[:train], "val": numbers[train : train + val], "test": numbers[train + val :][:test]}
    return {name: ([english(n) for n in part], [german(n) for n in part]) for name, part in cuts.items()}


def _joint(digit: int) -> str:
    """A one-digit factor inside a German word: "ein", not "eins"."""
    return "ein" if digit == 1 else _DE_ONES[digit]


def _check(number: int) -> None:
    if not 0 <= number < LIMIT:
        raise ValueError(f"expected a number from 0 to {LIMIT - 1}, got {number}")
