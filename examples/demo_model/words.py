"""Open vocabularies: names that nobody has seen before, so that answers must be copied and cannot be learned."""

from __future__ import annotations

import random

_STARTS = "b bl br c cl cr d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sh sk st t th tr v w y z".split()
_VOWELS = "a a e e i i o o u u ai ea oo".split()
_ENDS = ["", "", "", "l", "n", "r", "s", "t", "m", "nd", "rk", "st", "x", "ck"]
_SUFFIXES = {
    "place": ["ville", "burg", "ford", "mouth", "stad", "holm", " Bay", " Valley", "", ""],
    "company": [" Labs", " Systems", " Works", " Group", " Foods", " Energy", "", ""],
    "product": ["-2", "-5", " Pro", " X", " Mini", "", ""],
    "person": [""],
    "team": [" United", " Rovers", " Hawks", ""],
    "species": [" moth", " fern", " trout", " beetle", " finch"],
    "ship": [""],
    "file": [""],
}


def syllable(rng: random.Random) -> str:
    return rng.choice(_STARTS) + rng.choice(_VOWELS) + rng.choice(_ENDS)


def word(rng: random.Random) -> str:
    """A made-up word of one to three syllables, in lower case."""
    return "".join(syllable(rng) for _ in range(rng.choice((1, 2, 2, 2, 3))))


def name(rng: random.Random, kind: str) -> str:
    """A made-up name of a `kind` of thing."""
    if kind == "person":
        return f"{word(rng).capitalize()} {word(rng).capitalize()}"
    if kind == "file":
        return f"{word(rng)}.{rng.choice(('cfg', 'txt', 'log', 'json'))}"
    return word(rng).capitalize() + rng.choice(_SUFFIXES[kind])


def value(rng: random.Random, kind: str) -> str:
    """A made-up value: a number with its unit, a date, a thing, a name."""
    if kind in _SUFFIXES:
        return name(rng, kind)
    match kind:
        case "year":
            return str(rng.randint(1720, 2030))
        case "date":
            return f"{rng.randint(1, 28)} {rng.choice(_MONTHS)} {rng.randint(1900, 2030)}"
        case "count":
            return str(rng.randint(2, 9000))
        case "money":
            return f"{rng.randint(2, 990)} {rng.choice(('dollars', 'euros', 'crowns', 'million euros'))}"
        case "length":
            return f"{rng.randint(2, 980)} {rng.choice(('metres', 'kilometres', 'miles', 'feet'))}"
        case "time":
            return f"{rng.randint(1, 12)}:{rng.choice(('00', '15', '30', '45'))} {rng.choice(('am', 'pm'))}"
        case "weight":
            return f"{rng.randint(2, 980)} {rng.choice(('grams', 'kilograms', 'tonnes'))}"
        case "colour":
            return f"{rng.choice(('dark', 'pale', 'bright', 'deep'))} {rng.choice(_COLOURS)}"
        case _:
            return f"{rng.choice(_QUALITIES)} {rng.choice(_THINGS)}"


_MONTHS = "January February March April May June July August September October November December".split()
_COLOURS = "red blue green yellow grey purple orange brown silver white".split()
_QUALITIES = "wooden copper silver folded dried smoked painted hollow striped frozen woven carved plain heavy".split()
_THINGS = "lamps boats bricks ropes bells seeds stones kettles drums wheels maps glass tiles nets coins bread".split()
