"""The errors of a file system that pass: one list for calls that are repeated, and for texts that are judged.

NFS answers with ESTALE or EIO, Lustre with ENOTCONN, while a server restarts or a network is cut. Sockets report some
of the same errors when another process has died. So in a text such an error counts only beside the name of a file.
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
"""Errors after which the same call succeeds later although nobody changes anything."""
LACKING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""Errors that pass when somebody changes something: room, a quota, a mount, a limit of open files."""
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
