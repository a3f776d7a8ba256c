"""Numbers in texts: found, written in one way, and compared by their value."""

import re
from collections import deque
from collections.abc import Mapping
from fractions import Fraction

MINUS = "-−"
_SIGN = r"[+\-−]"

# A number begins in no word (x2, H2O, x_2), no exponent or subscript (m^2, x_{2}, x**2), no version (1.2.3).
_BEGINS = (
    r"(?<![^\W_])(?<![^\W_]_)(?<![0-9]\.)(?<!\^)(?<![\^_]\{)(?<!\^[-−])(?<!\^\{[-−])"
    r"(?<![0-9)\]}]\*\*)(?<![0-9)\]}]\*\*[-−(])(?<!\b[A-Za-z]\*\*)(?<!\b[A-Za-z]\*\*[-−(])"
    r"(?<![0-9)\]}][ ]\*\*[ ])(?<![0-9)\]}][ ]\*\*[ ][-−(])(?<!\^\.)(?<!\*\*\.)"
)
# Groups of three digits, unless a group stands before them: lists (1 2 345) are none, and no text is slow.
_SPACE = r"[ \u00a0\u2007\u2009\u202f]"
_NO_GROUP = r"(?<![0-9],)(?<![0-9]\{,\})(?<![0-9],\\!)"
_NO_SPACED = rf"(?<!\b[0-9]{_SPACE})(?<!\b[0-9]{{2}}{_SPACE})(?<!\b[0-9]{{3}}{_SPACE})(?<![0-9]\\,)"
_DIGITS = rf"""(?>
    {_NO_GROUP} [0-9]{{1,3}} (?: (?: [,_] | \{{,\}} | ,\\! ) [0-9]{{3}} (?![0-9]) )++
  | {_NO_SPACED} [0-9]{{1,3}} (?: (?: \\, | {_SPACE} ) [0-9]{{3}} (?! [0-9] | ,[0-9]{{3}}(?![0-9]) ) )++
  | [0-9]++
)"""
_EXPONENT = rf"(?:[eE]{_SIGN}?[0-9]++)?+"
_REAL = rf"{_DIGITS}(?:\.[0-9]++)?+{_EXPONENT}"
_NUMBER = re.compile(
    rf"""
    (?= [+\-−0-9.\\$€£¥] )  # costs little, and most characters begin no number
    (?P<bold> (?<=\*\*) )?+
    (?P<sign> (?<![\w)\]}}%^-]) {_SIGN} )?+
    (?: \\?[$€£¥] [ ]? (?P<second>{_SIGN})?+ )?+
    (?>
        {_BEGINS} {_NO_SPACED} (?P<whole> {_DIGITS} ) (?:
            (?: {_SPACE} | \\[,;:\ ] )?+ \\[dt]?frac [ ]?
                (?P<latex> \{{ [ ]? [0-9]{{1,3}} [ ]? \}} [ ]? \{{ [ ]? [0-9]{{1,3}} [ ]? \}} )
          | {_SPACE} (?P<slashed> [0-9]{{1,3}} [ ]? / [ ]? [0-9]{{1,3}} )
                (?! [0-9] | \.[0-9] | [ ]?/[ ]?[0-9] )
        )
      | \\[dt]?frac [ ]? \{{ [ ]? (?P<third>{_SIGN})?+ (?P<top>{_REAL}) [ ]? \}}
            [ ]? \{{ [ ]? (?P<fourth>{_SIGN})?+ (?P<bottom>{_REAL}) [ ]? \}}
      | {_BEGINS} (?P<real> {_REAL} | (?<![.)\]_]) \.[0-9]++ {_EXPONENT} )
    )
    (?:
        [ ]? (?:[×x*·]|\\times|\\cdot) [ ]? 10 [ ]? (?: \^ | \*\* ) [ ]?
            (?: \{{ [ ]? (?P<power>{_SIGN}?[0-9]++) [ ]? \}} | (?P<bare>{_SIGN}?[0-9]++) )
      | (?! \.[0-9] | (?i:st|nd|rd|th)\b | [^\W\d_]++[\d_] )  # a version, 2nd, a word such as 7f3
        (?! [ ]? \^ (?! [ ]?\{{?[ ]? (?:\\circ|°) ) )          # the base of a power
        (?(bold) | (?! \*\* \(?{_SIGN}?\.?[0-9] | \*\* [ijknpqxyzN]\b | [ ]\*\*[ ] \(?{_SIGN}?\.?[0-9] ) )
        (?: [ ]? (?P<percent> \\?% | percent\b ) | [ ]? / [ ]? (?P<under>{_REAL}) )?+
    )
    """,
    re.VERBOSE,
)


def last_number(text: str) -> str | None:
    """The last number of a text, written in one way."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _written(last[0].groupdict()) if last else None


def _written(part: Mapping[str, str | None]) -> str:
    """The one way to write a number of which these parts were found."""
    top, under = part["top"] or part["real"] or "", part["bottom"] or part["under"] or ""
    minus = sum(part[sign] in tuple(MINUS) for sign in ("sign", "second", "third", "fourth")) % 2
    if part["whole"]:
        top, under, mixed = _mixed(part["whole"], part["latex"] or part["slashed"] or "")
        minus = minus if mixed else 0
    top = _plain_real(top, part["power"] or part["bare"] or "")
    ends = f"/{_plain_real(under)}" if under else ""
    ends += "%" if part["percent"] and not part["bottom"] else ""
    return ("-" if minus and top != "0" else "") + top + ends


def _mixed(whole: str, fraction: str) -> tuple[str, str, bool]:
    """Top and bottom of a whole number with a fraction behind it, in decimals where they end; of the fraction
    alone, and `False`, where it is no part of one (`5 3/2`).
    """
    digits, (top, bottom) = re.sub(r"[^0-9]", "", whole), map(int, re.findall(r"[0-9]+", fraction))
    if not 0 < top < bottom or len(digits) > 99:
        return str(top), str(bottom), False
    decimals, left = divmod(top * 10**9, bottom)
    if left:
        return str(int(digits) * bottom + top), str(bottom), True
    return f"{digits}.{decimals:09d}", "", True


def _plain_real(text: str, power: str = "") -> str:
    """Digits without separators and needless zeros, and the exponent, if there is one."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, decimals = re.sub(r"[^0-9.]", "", mantissa).partition(".")
    decimals = decimals.rstrip("0")
    out = (whole.lstrip("0") or "0") + (f".{decimals}" if decimals else "")
    exponents = [_plain_whole(e) for e in (exponent, power) if e]
    return out if out == "0" else "e".join([out, *(e for e in exponents if e != "0")][:2])


def _plain_whole(text: str) -> str:
    digits = text.lstrip("+" + MINUS).lstrip("0") or "0"
    return f"-{digits}" if text[0] in MINUS and digits != "0" else digits


_AS_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?(?:\s*/\s*\d+)?")


def value_of(text: str) -> Fraction | None:
    """The number that a text is, and nothing else."""
    text = text.replace("\N{MINUS SIGN}", "-")
    if len(text) > 300 or not text.isascii() or not _AS_NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None
