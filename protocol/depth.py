"""Refuse deeply nested msgpack before a recursive decoder reads it. Pure.

hivemind's `MSGPackSerializer.loads` decodes nested extension types recursively in C: a value of 937 bytes from any DHT
node ends the process (SIGSEGV) before a validator runs. The check here uses no recursion. It also descends into the
payload of extension types, in which hivemind stores tuples, so the depth is known before anything is decoded.
"""

import struct

from shoal.protocol.limits import CONTROL_DEPTH_MAX

# format byte -> bytes of its length field or payload; msgpack specification, "formats"
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_LENGTH = {1: ">B", 2: ">H", 4: ">I"}
TUPLE_EXT = 0x40


class TooDeep(ValueError):
    """The value nests deeper than any honest message, is truncated, or is not msgpack."""


def check_depth(data: bytes | bytearray | memoryview) -> None:
    """Raise `TooDeep` if `data` is not a sequence of whole msgpack values nested at most `CONTROL_DEPTH_MAX` deep.

    The time is linear in `len(data)`, however deep the nesting.
    """
    view = memoryview(data)
    end = len(view)
    at = 0
    # Open containers: [items left, end offset of the enclosing region]. A tuple extension opens a new region.
    open_items: list[list[int]] = []
    while at < end or open_items:
        while open_items and (open_items[-1][0] == 0 or at >= open_items[-1][1]):
            if open_items[-1][0] not in (0, -1):
                raise TooDeep("a value is cut short")
            open_items.pop()
        if at >= end:
            break
        if open_items and open_items[-1][0] > 0:
            open_items[-1][0] -= 1
        region_end = open_items[-1][1] if open_items else end
        tag = view[at]
        at += 1
        items = 0
        if tag <= 0x7F or tag >= 0xE0 or tag in (0xC0, 0xC2, 0xC3):
            pass
        elif tag <= 0x8F:
            items = 2 * (tag & 0x0F)
        elif tag <= 0x9F:
            items = tag & 0x0F
        elif tag <= 0xBF:
            at += tag & 0x1F
        elif tag in _FIXED:
            at += _FIXED[tag]
        elif tag in _SIZED:
            width = _SIZED[tag]
            # Most lengths have one byte; a function call for each of them would be most of the cost.
            at += 1 + view[at] if width == 1 and at < end else width + _length(view, at, width)
        elif tag in (0xDC, 0xDD, 0xDE, 0xDF):
            width = 2 if tag in (0xDC, 0xDE) else 4
            items = _length(view, at, width) * (2 if tag >= 0xDE else 1)
            at += width
        elif tag in _FIXEXT or tag in _EXT:
            if tag in _FIXEXT:
                size = _FIXEXT[tag]
            else:
                size = _length(view, at, _EXT[tag])
                at += _EXT[tag]
            if at >= region_end:
                raise TooDeep("a value is cut short")
            code = view[at]
            at += 1
            if at + size > region_end:
                raise TooDeep("a value is cut short")
            if code == TUPLE_EXT:
                open_items.append([-1, at + size])  # a region: any number of values until its end
            else:
                at += size
        else:
            raise TooDeep(f"0x{tag:02x} is not msgpack")
        if at > region_end:
            raise TooDeep("a value is cut short")
        if items:
            open_items.append([items, region_end])
        if len(open_items) > CONTROL_DEPTH_MAX:
            raise TooDeep(f"a value nests deeper than {CONTROL_DEPTH_MAX}")


def _length(view: memoryview, at: int, width: int) -> int:
    if at + width > len(view):
        raise TooDeep("a value is cut short")
    length: int = struct.unpack_from(_LENGTH[width], view, at)[0]
    return length
