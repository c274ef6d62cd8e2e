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
#: Marks of footnotes, with their number.
_DAGGER = re.compile("[\u2020\u2021\u00a7\u00b6][0-9a-z]?")
#: Characters that may be footnotes, and what makes them a device's number.
_NOT_ASCII = re.compile(r"(NV|GPU|NIC)?([^\x00-\x7f]+)")
#: Letters and signs that look like a Latin capital: Cyrillic and Greek ones, and crosses.
_ALIKE = str.maketrans(
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0405\u0406\u03a7\u00d7\u2715\u2716",
    "ABEKMHOPCTYXSIXXXX",
)
_ROOT = re.compile(r"<\?xml|<!DOCTYPE|<system|<graphs")
_END = "</system>"


class _Plain(dict):
    """What stands for each character: itself, or the character of ASCII that is like it."""

    def __missing__(self, code: int) -> str:
        mark = chr(code)
        category = unicodedata.category(mark)
        if mark in "\v\x85\u2028\u2029":
            found = "\n"
        elif category in ("Cf", "Mn", "Me"):
            found = ""
        elif category == "Nd":
            found = str(unicodedata.digit(mark))
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
        text = _DAGGER.sub(" ", text)
        text = unicodedata.normalize("NFKC", _NOT_ASCII.sub(_without_footnotes, text).translate(_ALIKE))
    return text.translate(_Plain())


def _without_footnotes(found: re.Match[str]) -> str:
    """Characters that are not ASCII, without raised and circled ones, unless they are a device's number."""
    kinds = [unicodedata.decomposition(mark).partition(" ")[0] for mark in found[2]]
    if found[1] and len(set(kinds)) == 1:
        return found[0]
    marks = zip(found[2], kinds, strict=True)
    return (found[1] or "") + "".join(
        mark
        for mark, kind in marks
        if unicodedata.category(mark) != "No" and kind not in ("<super>", "<sub>", "<circle>")
    )


def is_xml(text: str) -> bool:
    """Whether a text has the beginning or the end of NCCL's XML, perhaps escaped for HTML."""
    return _ROOT.search(text) is not None or "&lt;system" in text or _END in text


def document(text: str) -> tuple[str, list[str]]:
    """The first XML document of a text, whose lines keep their numbers, and the others.

    Args:
        text: A document, perhaps with prompts, prose or quote marks around it.
    """
    if "&lt;system" in text:
        text = html.unescape(text)
    text = plain(text)
    start = _ROOT.search(text)
    if start is None:
        return text, []
    found, end, rest = text[start.start() :].partition(_END)
    return "\n" * text.count("\n", 0, start.start()) + found + end, rest.split(_END)[:-1]
