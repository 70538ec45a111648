"""Errors of a file system that are temporary: one list for repeating calls and for judging the texts of errors.

NFS answers with ESTALE or EIO, Lustre with ENOTCONN, while a server restarts or a network is cut. Sockets report some
of the same errors when another process has died. So such an error in a text counts only if the text also names a file.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

FAILING = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
    }
)
"""Errors after which the same call succeeds later without any action of a user."""
LACKING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""Errors that end when a user frees space or raises a quota, remounts a file system or closes files."""
_ALSO_OF_SOCKETS = frozenset({errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EBUSY, errno.EINTR})


def names_passing_error(text: str) -> bool:
    """Whether the text of an error names an error of a file system that passes, in the words of Python or of C."""
    return bool(_PASSING.search(text))


def _pattern() -> re.Pattern[str]:
    plain = (FAILING | LACKING) - _ALSO_OF_SOCKETS
    texts = "|".join(re.escape(os.strerror(number)) for number in sorted(plain))
    beside_a_file = rf"^(?=.*['\"][^'\"\n]*/).*\[Errno ({_either(_ALSO_OF_SOCKETS)})\]"
    return re.compile(rf"{texts}|\[Errno ({_either(plain)})\]|{beside_a_file}", re.IGNORECASE | re.MULTILINE)


def _either(numbers: Iterable[int]) -> str:
    return "|".join(map(str, sorted(numbers)))


_PASSING = _pattern()
