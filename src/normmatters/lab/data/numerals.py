"""Number words, English and German: the parallel text that needs no download.

"two hundred forty-one" is "zweihunderteinundvierzig": German swaps tens and ones and writes one long word, so a
translator has to segment, reorder and translate. The rules are the two languages' own; nothing is random but the split.
"""

from __future__ import annotations

import random

LIMIT = 10_000
_EN, _EN_TENS, _DE, _DE_TENS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve "
        "thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
        "- - twenty thirty forty fifty sixty seventy eighty ninety",
        "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf "
        "dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn",
        "- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    )
)
_DE_FACTORS = ["", "ein", *_DE[2:10]]  # one digit inside a word: "ein", not "eins"


def english(number: int) -> str:
    """The English words for ``0 <= number < 10000``.

    >>> english(2041)
    'two thousand forty-one'
    """
    thousands, hundreds, rest = number // 1000, number % 1000 // 100, number % 100
    words = [_EN[thousands], "thousand"] if thousands else []
    words += [_EN[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(_EN_TENS[rest // 10] + (f"-{_EN[rest % 10]}" if rest % 10 else ""))
    elif rest or not words:
        words.append(_EN[rest])
    return " ".join(words)


def german(number: int) -> str:
    """The German word for ``0 <= number < 10000``: ones before tens, all in one word.

    >>> german(2041)
    'zweitausendeinundvierzig'
    """
    thousands, hundreds, rest = number // 1000, number % 1000 // 100, number % 100
    word = f"{_DE_FACTORS[thousands]}tausend" if thousands else ""
    word += f"{_DE_FACTORS[hundreds]}hundert" if hundreds else ""
    if rest >= 20:
        return word + (f"{_DE_FACTORS[rest % 10]}und" if rest % 10 else "") + _DE_TENS[rest // 10]
    return word + _DE[rest] if rest or not word else word


def splits() -> dict[str, tuple[list[str], list[str]]]:
    """``{"train": (english, german), "val": ..., "test": ...}``: a fixed shuffle of all numbers, cut into three."""
    numbers = list(range(LIMIT))
    random.Random(0).shuffle(numbers)
    cuts = {"train": numbers[:8000], "val": numbers[8000:9000], "test": numbers[9000:]}
    return {name: ([english(n) for n in part], [german(n) for n in part]) for name, part in cuts.items()}
