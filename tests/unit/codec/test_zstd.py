from __future__ import annotations

import resource
import struct
import threading
import time

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from penstock.codec import compress, decompress
from penstock.errors import Corrupt, LimitExceeded

MIB = 1024 * 1024
CONTENT = b"The same words, again and again. " * 200


def frame(data: bytes, *, size: bool = True, checksum: bool = False) -> bytes:
    maker = zstandard.ZstdCompressor(level=3, write_content_size=size, write_checksum=checksum)
    if size:
        return maker.compress(data)
    stream = maker.compressobj()
    return stream.compress(data) + stream.flush()


def bomb(blocks: int) -> bytes:
    """Return a frame without a content size whose 4-byte blocks each expand to 128 KiB of one byte."""
    block = (1 << 1 | (128 * 1024) << 3).to_bytes(3, "little") + b"x"
    last = (1 | 1 << 1 | 1 << 3).to_bytes(3, "little") + b"x"
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * blocks + last


def unpacked(data: bytes, bytes_max: int = MIB) -> bytes:
    return bytes(decompress(memoryview(data), bytes_max=bytes_max))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_compressed_parts_are_decompressed_joined(parts: list[bytes]) -> None:
    packed = compress([memoryview(part) for part in parts], size=sum(map(len, parts)))
    assert unpacked(packed) == b"".join(parts)
    parameters = zstandard.get_frame_parameters(packed)
    assert parameters.has_checksum
    assert parameters.content_size == sum(map(len, parts))


@pytest.mark.parametrize("content", [b"", b"x", CONTENT], ids=len)
@pytest.mark.parametrize("size", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_every_kind_of_frame_is_accepted(content: bytes, size: bool, checksum: bool) -> None:
    assert unpacked(frame(content, size=size, checksum=checksum)) == content


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_several_frames_are_one_content(first: bool, second: bool) -> None:
    joined = frame(CONTENT, size=first) + frame(b"", size=second) + frame(b"end", size=second, checksum=True)
    assert unpacked(joined) == CONTENT + b"end"


def test_a_skippable_frame_is_skipped() -> None:
    skippable = struct.pack("<II", 0x184D2A50, 100) + bytes(100)
    assert unpacked(skippable + frame(CONTENT)) == CONTENT
    assert unpacked(frame(CONTENT) + skippable) == CONTENT
    assert unpacked(skippable) == b""


@pytest.mark.parametrize("size", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_frame_cut_anywhere_is_corrupt(size: bool, checksum: bool) -> None:
    packed = frame(CONTENT, size=size, checksum=checksum)
    for end in range(len(packed)):
        with pytest.raises(Corrupt):
            unpacked(packed[:end])


def test_a_second_frame_cut_anywhere_is_corrupt() -> None:
    first, second = frame(b"first"), frame(b"second", checksum=True)
    for end in range(1, len(second)):
        with pytest.raises(Corrupt):
            unpacked(first + second[:end])


def test_a_flipped_bit_under_a_checksum_is_corrupt() -> None:
    packed = bytearray(frame(bytes(range(256)), checksum=True))
    packed[100] ^= 1
    with pytest.raises(Corrupt):
        unpacked(bytes(packed))


@pytest.mark.parametrize("junk", [b"", b"?", b"not a frame at all", bytes(40), b"\x28\xb5\x2f\xfd"])
def test_data_that_is_not_a_frame_is_corrupt(junk: bytes) -> None:
    with pytest.raises(Corrupt):
        unpacked(junk)
    if junk:
        with pytest.raises(Corrupt):
            unpacked(frame(CONTENT) + junk)


def test_a_wrong_content_size_is_corrupt() -> None:
    honest = frame(bytes(1000))
    header = zstandard.frame_header_size(honest)
    for lie in (999, 1001, 70_000):
        # A single-segment frame with a four-byte content size.
        lying = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", lie) + honest[header:]
        with pytest.raises(Corrupt):
            unpacked(lying)


def test_a_declared_size_above_the_cap_is_refused_unread() -> None:
    header = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**60)
    with pytest.raises(LimitExceeded):
        unpacked(header + b"\x01\x00\x00")
    with pytest.raises(LimitExceeded):
        unpacked(frame(CONTENT), bytes_max=len(CONTENT) - 1)
    assert unpacked(frame(CONTENT), bytes_max=len(CONTENT)) == CONTENT


def test_an_undeclared_bomb_is_stopped_near_the_cap() -> None:
    packed = bomb(100_000)  # 400 kB that would become 12 GiB
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    with pytest.raises(LimitExceeded):
        unpacked(packed, bytes_max=4 * MIB)
    assert time.monotonic() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 * 1024


def test_a_bomb_below_the_cap_is_only_large() -> None:
    assert len(unpacked(bomb(16), bytes_max=4 * MIB)) == 16 * 128 * 1024 + 1


def test_many_small_frames_cannot_pass_the_cap_together() -> None:
    with pytest.raises(LimitExceeded):
        unpacked(frame(CONTENT) * 3, bytes_max=2 * len(CONTENT))


def test_threads_do_not_share_a_context() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(30):
                content = bytes([seed, number]) * 20_000
                assert unpacked(compress([memoryview(content)], size=len(content))) == content
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
