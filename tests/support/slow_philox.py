"""Philox-4x32-10 on Python's own integers, one word at a time: the oracle of `tandem.philox`."""

WORD = 2**32


def philox_block(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds over four counter words with two key words, as the paper's figure draws them."""
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], WORD)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], WORD)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return counter


def word(seed: int, epoch: int, index: int, purpose: int, unit: int) -> int:
    """Random word number `unit` of a dataset index."""
    block, place = divmod(unit, 4)
    high, low = divmod(seed % 2**64, WORD)
    return philox_block([block, index, epoch, purpose], [low, high])[place]
