"""The two digests: known answers, every byte and its place, and what there is not."""

from __future__ import annotations

import pytest

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.core.digests import BLAKE3, DIGEST_SIZE_BYTES, NO_DIGESTS, XXH3, chosen, digest_of

ALGORITHMS = [XXH3, BLAKE3]


@pytest.mark.parametrize(
    ("algorithm", "of_nothing", "of_abc"),
    [  # both by their authors' test vectors
        (XXH3, "99aa06d3014798d86001c324468d497f", "06b05ab6733a618578af5f94892f3950"),
        (BLAKE3, "af1349b9f5f9a1a6a0404dea36dcc949", "6437b3ac38465133ffb63b75273a8db5"),
    ],
)
def test_they_are_what_their_names_say(algorithm, of_nothing, of_abc):
    assert digest_of([], algorithm).hex() == of_nothing
    assert digest_of([b"abc"], algorithm).hex() == of_abc


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_byte_and_its_place_counts_and_how_it_is_cut_does_not(algorithm):
    content = bytes(range(256)) * 40
    whole = digest_of([memoryview(content)], algorithm)
    assert len(whole) == DIGEST_SIZE_BYTES
    assert digest_of([content[:1], b"", content[1:5000], content[5000:]], algorithm) == whole
    swapped = content[1:2] + content[:1] + content[2:]
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    assert len({whole, *(digest_of([other], algorithm) for other in (swapped, flipped, content[:-1]))}) == 4


def test_they_are_chosen_by_name():
    assert chosen("blake3", verify=True) == BLAKE3
    assert chosen("xxh3_128", verify=True) == XXH3
    assert chosen("xxh3_128", verify=False) == NO_DIGESTS
    with pytest.raises(UsageError, match="'sha1': choose one of xxh3_128, blake3"):
        chosen("sha1", verify=True)
    with pytest.raises(UsageError, match="'none'"):
        chosen("none", verify=True)
    with pytest.raises(UsageError, match="leave verify=True"):
        chosen("blake3", verify=False)
