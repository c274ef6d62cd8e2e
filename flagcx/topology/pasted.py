"""Undoes what terminals, logs, office programs and programs that print strings do to a text."""

from __future__ import annotations

import html
import re
import unicodedata

_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]"
    # A colour whose first character was lost on the way, or is written out.
    r"|(?:\^\[|\\(?:u001b|x1b|033|e))?\[[0-9]{1,3}(?:;[0-9]{1,3}){0,4}m"
)
#: What syslog writes for control characters, in octal.
_SYSLOG = re.compile(r"#0(11|12|15|33)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "", '"': '"'}
_ROOT = re.compile(r"<\?xml|<!DOCTYPE|<system|<graphs")
_END = "</system>"


class _Plain(dict):
    """What stands for each character: itself, or the character of ASCII that is like it."""

    def __missing__(self, code: int) -> str:
        mark = chr(code)
        category = unicodedata.category(mark)
        if mark in "\v\x85\u2028\u2029":
            found = "\n"
        elif category in ("Cf", "Mn"):
            found = ""
        elif code < 128 or category[0] in "LMN":
            found = mark
        elif category == "Pd" or mark == "\u2212":
            found = "-"
        elif mark in "\u201c\u201d\u201e\u201f\u00ab\u00bb":
            found = '"'
        else:
            found = " "
        self[code] = found
        return found


def plain(text: str) -> str:
    """A text without colours, with control characters as characters, and with symbols as ASCII has them."""
    text = _SYSLOG.sub(lambda code: chr(int(code[1], 8)), text)
    if "^IGPU" in text:  # cat -A
        text = re.sub(r"\$$", "", text.replace("^I", "\t").replace("^M", ""), flags=re.MULTILINE)
    text = re.sub(r"[^\n]\x08", "", _ESCAPES.sub("", text))  # bold of man pages
    if text.count("\\n") > text.count("\n") or "\\tGPU" in text or '=\\"' in text:
        text = re.sub(r"""(['"]),\s*\1""", "\n", text)  # a list of lines
        text = re.sub(r'\\+([ntr"])', lambda code: _ESCAPED[code[1]], text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return text.translate(_Plain())


def is_xml(text: str) -> bool:
    """Whether a text has the beginning or the end of NCCL's XML, perhaps escaped for HTML."""
    return _ROOT.search(text) is not None or "&lt;system" in text or _END in text


def document(text: str) -> tuple[str, int]:
    """The first XML document of a text, whose lines keep their numbers, and how many others follow.

    Args:
        text: A document, perhaps with prompts, prose or quote marks around it.
    """
    if "&lt;system" in text:
        text = html.unescape(text)
    text = plain(text)
    start = _ROOT.search(text)
    if start is None:
        return text, 0
    found, end, rest = text[start.start() :].partition(_END)
    return "\n" * text.count("\n", 0, start.start()) + found + end, rest.count(_END)
