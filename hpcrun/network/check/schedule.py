"""The schedule of a check, by rounds: every pair once, all nodes at the same time."""

import random

Pair = tuple[int, int]

MOST_NODES_FOR_ALL_PAIRS = 64
_MATCHINGS = 10


def all_pairs(count: int) -> list[list[Pair]]:
    """Return rounds in which each pair of ``count`` nodes meets once, and no node meets two at a time.

    The circle method: node 0 stays, the other nodes move by one place per round. An odd number of nodes gets
    an empty place, so that one node rests in each round. There are ``count - 1`` rounds for an even number of
    nodes, and ``count`` for an odd number.
    """
    places: list[int | None] = list(range(count))
    if count % 2:
        places.append(None)
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        mirrored = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(a, b) for a, b in mirrored if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def random_matchings(count: int, seed: int) -> list[list[Pair]]:
    """Return ten rounds of random pairs that share no node; the same for the same seed."""
    dice = random.Random(seed)
    rounds = []
    for _ in range(_MATCHINGS):
        nodes = list(range(count))
        dice.shuffle(nodes)
        rounds.append(list(zip(nodes[0::2], nodes[1::2], strict=False)))
    return rounds


def rounds_for(count: int, seed: int = 0) -> list[list[Pair]]:
    """Return every pair for up to 64 nodes, and ten random matchings for more."""
    if count > MOST_NODES_FOR_ALL_PAIRS:
        return random_matchings(count, seed)
    return all_pairs(count)
