"""Text from outside, made safe to show: on one line, without control characters.

Names of folders, classes, settings and tokens come from files that others may have written. Shown
as they are, an escape code in one of them would control the terminal, and a line break would forge
a line of a table or a second command.
"""

import re
import shlex
from pathlib import Path

# Control characters, line and paragraph separators, changes of direction, lone surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: object) -> str:
    r"""The text with control characters and lone surrogates as escape sequences.

    Example:
        >>> print(one_line("red: \x1b[31m, two\nlines"))
        red: \x1b[31m, two\nlines
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def first_line(text: object) -> str:
    r"""The first line of a longer text, such as an error of another library.

    Example:
        >>> first_line(ValueError("size is wrong\nException raised from ..."))
        'size is wrong'
    """
    return one_line(str(text).strip().partition("\n")[0])


def shell_word(text: object) -> str:
    r"""The text as one word of a shell command, on one line.

    Example:
        >>> print(shell_word("runs/ptb"), shell_word("my run; rm x"), shell_word("a\nb"))
        runs/ptb 'my run; rm x' $'a\nb'
    """
    word = str(text)
    if isinstance(text, Path) and word.startswith("-"):
        word = f"./{word}"  # otherwise it would be read as an option
    if not _CONTROL.search(word):
        return shlex.quote(word)
    return "$'" + one_line(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"
