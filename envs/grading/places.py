"""Qualifiers of places: Battle Creek, Michigan is Battle Creek; Springfield, IL has its state."""

from __future__ import annotations

_STATES = (
    "alabama/al alaska/ak arizona/az arkansas/ar california/ca colorado/co connecticut/ct "
    "delaware/de florida/fl georgia/ga hawaii/hi idaho/id illinois/il indiana/in iowa/ia kansas/ks "
    "kentucky/ky louisiana/la maine/me maryland/md massachusetts/ma michigan/mi minnesota/mn "
    "mississippi/ms missouri/mo montana/mt nebraska/ne nevada/nv new_hampshire/nh new_jersey/nj "
    "new_mexico/nm new_york/ny north_carolina/nc north_dakota/nd ohio/oh oklahoma/ok oregon/or "
    "pennsylvania/pa rhode_island/ri south_carolina/sc south_dakota/sd tennessee/tn texas/tx "
    "utah/ut vermont/vt virginia/va washington/wa west_virginia/wv wisconsin/wi wyoming/wy"
)
_COUNTRIES = (
    "afghanistan albania algeria argentina armenia australia austria azerbaijan bangladesh belarus "
    "belgium bolivia bosnia botswana brazil bulgaria cambodia cameroon canada chile china colombia "
    "croatia cuba cyprus czechia czech_republic denmark ecuador egypt england estonia ethiopia "
    "finland france germany ghana greece guatemala haiti honduras hungary iceland india indonesia "
    "iran iraq ireland israel italy jamaica japan jordan kazakhstan kenya kuwait latvia lebanon "
    "libya lithuania luxembourg malaysia malta mexico mongolia morocco myanmar nepal netherlands "
    "new_zealand nicaragua nigeria north_korea northern_ireland norway oman pakistan palestine "
    "panama paraguay peru philippines poland portugal qatar romania russia rwanda saudi_arabia "
    "scotland senegal serbia singapore slovakia slovenia somalia south_africa south_korea spain "
    "sri_lanka sudan sweden switzerland syria taiwan tanzania thailand tunisia turkey uganda uk "
    "ukraine united_kingdom united_states uruguay us usa uzbekistan venezuela vietnam wales yemen "
    "zambia zimbabwe ontario quebec british_columbia"
)
_LONG = dict(pair.split("/")[::-1] for pair in _STATES.split())
_QUALIFIERS = frozenset(_LONG.values()) | frozenset(_COUNTRIES.split())


def place(text: str) -> tuple[str, tuple[str, ...]]:
    """A lower-case text as its first part and the states and countries behind it; no qualifiers
    when a part behind a comma is neither."""
    first, *rest = [part.strip().strip(".") for part in text.lower().split(",")]
    found = tuple(_LONG.get(part, part.replace(" ", "_")) for part in rest)
    if not first or not found or not all(part in _QUALIFIERS for part in found):
        return text.lower(), ()
    return first, found


def compatible(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether neither list of qualifiers contradicts the other."""
    return set(one) <= set(other) or set(other) <= set(one)
