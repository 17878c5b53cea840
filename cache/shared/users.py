"""Who uses a segment: a number for each, which the kernel knows to be alive, and what each has counted.

User n (1 to 1022) is a row of eight 8-byte numbers at 4096 + 64 · n:

    tenure << 32 | process id      the tenure grows each time that the number is taken
    hits, misses, hit bytes, puts, put bytes, passed, dropped

A user is alive as long as its lock is held. Only its user writes to a row, so counting needs no lock; what users
before it counted stays in it. A user holds the lock of byte `user_byte(n)`. A claim on a slot names number and tenure
(10 and 22 bits), so that who gets the number of a dead user does not get its claims. Beyond 1022 users one goes
without a number: it reads, and neither fills nor counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from cache.shared.layout import USER_BYTES, USERS, USERS_AT
from cache.shared.locks import Descriptor, user_byte

__all__ = ["SUSPECT", "CacheStats", "Users"]

SUSPECT = 0xFFFFFFFF  # in place of an owner: the bytes are to be checked before use
_NUMBER_BITS = 10
_WORDS = USER_BYTES // 8
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class CacheStats:
    """What all users of a segment have done since it was made, dead ones included; `users` are those alive."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    puts: int = 0
    put_bytes: int = 0
    passed: int = 0
    dropped: int = 0
    users: int = 0


class Users:
    """The rows of a segment, as its holder of `lock` sees them."""

    def __init__(self, table: memoryview, lock: Descriptor) -> None:
        self._rows = table[USERS_AT : USERS_AT + USERS * USER_BYTES].cast("Q")
        self._lock = lock
        self.number = 0
        self.owner = 0  # what this user signs its claims with; 0 without a number

    def join(self) -> None:
        """Take the first free number, if there is one."""
        for number in range(1, USERS - 1):
            if self._lock.try_alone(user_byte(number)):
                tenure = (self._rows[number * _WORDS] >> 32) + 1 & _LOW
                self._rows[number * _WORDS] = tenure << 32 | os.getpid() & _LOW
                self.number, self.owner = number, _owner(tenure, number)
                return

    def is_alive(self, owner: int) -> bool:
        """Whether the user that signed with `owner` can still finish what it claimed."""
        number = owner & (1 << _NUMBER_BITS) - 1
        if not 0 < number < USERS - 1 or owner != _owner(self._rows[number * _WORDS] >> 32, number):
            return False
        return number == self.number or self._lock.is_held(user_byte(number))

    def add(self, column: int, count: int) -> None:
        """Count something: column 1 hits, 2 misses, 3 hit bytes, 4 puts, 5 put bytes, 6 passed, 7 dropped."""
        if self.number:
            self._rows[self.number * _WORDS + column] += count

    def pids(self) -> Iterator[int]:
        """Process ids of those alive, as they see them themselves (containers have their own)."""
        for number in range(1, USERS - 1):
            pid = self._rows[number * _WORDS] & _LOW
            if pid and (number == self.number or self._lock.is_held(user_byte(number))):
                yield pid

    def stats(self) -> CacheStats:
        """The sums over all rows."""
        names = ("hits", "misses", "hit_bytes", "puts", "put_bytes", "passed", "dropped")
        sums = {name: sum(self._rows[column::_WORDS].tolist()) for column, name in enumerate(names, 1)}
        return CacheStats(**sums, users=sum(1 for _ in self.pids()))


def _owner(tenure: int, number: int) -> int:
    return (tenure << _NUMBER_BITS | number) & _LOW
