"""Small changes of what programs read, drawn from fixed seeds."""

import os
import random

COUNT = int(os.environ.get("CAPTIONER_FUZZ", "150"))
STRANGE = [
    *(b"\x00", b"\xff" * 4, b"\x80\x00\x00\x00", b"\x7f\xff\xff\xff", b"-1", b"1e999", b"NaN"),
    *(b"null", b"{}", b"[]", b"[" * 3000, b'"', b"\\u0000", b"\r", b"\n\n", b"\t", b","),
    *(b"99999999999999999999", b"../../../etc/passwd", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
    "\U0001f415\u202e".encode(),
]  # fmt: skip


def mutated(content: bytes, seed: int) -> bytes:
    """One to five changes, drawn from the seed."""
    draw = random.Random(seed)
    data = bytearray(content)
    for _ in range(draw.randint(1, 5)):
        at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at:at] = draw.choice(STRANGE)
        elif kind == 2:
            piece = draw.choice(STRANGE)
            data[at : at + len(piece)] = piece
        elif kind == 3:
            del data[at : at + draw.randint(1, 16)]
        elif kind == 4:
            data[at:at] = data[at : min(end, at + 200)]
        elif kind == 5:
            data[at : at + 8] = draw.randbytes(8)
        elif draw.random() < 0.3:
            del data[at:]
    return bytes(data)
