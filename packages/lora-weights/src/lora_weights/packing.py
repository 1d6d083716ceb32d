"""Members -> packed modules: q/k/v to ``qkv_proj``, gate/up to ``gate_up_proj``, any mapping given.

Knows no model family. Shapes: `P` slices, `O_p` rows of slice p, `r` rank, `I` in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_weights.errors import InvalidAdapterError, Problem, ProblemCode
from lora_weights.rows import count_rows, take_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lora_weights.bound import BoundPart
    from lora_weights.modules import LoraPair


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedPart:
    """What one packed module gets: a part for each slice, in the order of its rows."""

    parts: tuple[BoundPart | None, ...]
    """`P` parts; None leaves the slice as the base computes it."""

    @property
    def slices(self) -> tuple[LoraPair | None, ...]:
        """The pairs of the slices, `P` of them; each keeps its own rank."""
        return tuple(None if part is None else part.pair for part in self.parts)

    @property
    def rank(self) -> int:
        """Largest rank of any slice or of the experts' pairs; 0 when there is none."""
        return max((part.rank for part in self.parts if part is not None), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all slices, a factor that several share counted once."""
        tensors = {}
        for part in self.parts:
            if part is not None and part.pair is not None:
                for tensor in (part.pair.lora_a, part.pair.lora_b):
                    tensors[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
        rest = sum(p.nbytes - (p.pair.nbytes if p.pair else 0) for p in self.parts if p)
        return sum(tensors.values()) + rest


def pack_parts(
    parts: Mapping[str, BoundPart],
    packed_modules: Mapping[str, Sequence[str]],
    *,
    slice_sizes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, PackedPart]:
    """Group the parts of a bound adapter by packed module.

    Args:
        parts: module path -> part, as `bind_adapter` returns it.
        packed_modules: name of a packed module -> names of its members in row order, such as
            ``{"qkv_proj": ("q_proj", "k_proj", "v_proj")}``.
        slice_sizes: path of a packed module -> rows `O_p` of its slices. Needed to cut a part
            that was trained on the packed module itself, or on several slices at once; members
            are checked against it.

    A part is cut by rows as a whole: B, gain, bias and a whole weight, with A shared. The slices
    of a packed module follow one another; a projection whose rows alternate between them head by
    head is not one.

    Returns:
        Path -> packed part. Members go under ``<parent>.<packed name>``, an absent one as None;
        every other module goes under its own path with one slice.

    Raises:
        InvalidAdapterError: a part's rows match no run of slices or not the slice of its name, or
            a packed module and its member both have a part; names all of them.
        ValueError: `packed_modules` gives one member to two packed modules.
    """
    members = _Members(packed_modules)
    groups: dict[str, dict[str, BoundPart]] = {}
    names: dict[str, Sequence[str]] = {}
    for path, part in parts.items():
        home = members.find(path)
        owner, member = (path, "") if home is None else (home.path, home.member)
        groups.setdefault(owner, {})[member] = part
        if home is not None:
            names[owner] = home.members
    packed: dict[str, PackedPart] = {}
    problems: list[Problem] = []
    for owner, group in groups.items():
        sizes = None if slice_sizes is None else slice_sizes.get(owner)
        try:
            packed[owner] = _pack_group(owner, group, names.get(owner, ()), sizes)
        except InvalidAdapterError as error:
            problems += error.problems
    if problems:
        raise InvalidAdapterError(problems)
    return packed


def unpack_parts(
    packed: Mapping[str, PackedPart], packed_modules: Mapping[str, Sequence[str]]
) -> dict[str, BoundPart]:
    """Give every slice of a packed module to the member of that name: the inverse of packing.

    With it an adapter that was trained on a fused projection serves a base that has the
    projections apart: pack with the sizes of the slices, then unpack.

    Args:
        packed: path -> packed part, as `pack_parts` returns it.
        packed_modules: name of a packed module -> names of its members in row order.

    Returns:
        Path of a member -> its part, absent slices left out; other modules under their own path.

    Raises:
        InvalidAdapterError: a packed part has another number of slices than its module members;
            names all of them.
    """
    parts: dict[str, BoundPart] = {}
    problems: list[Problem] = []
    for path, part in packed.items():
        parent, _, name = path.rpartition(".")
        members = packed_modules.get(name, ("",))
        if len(members) != len(part.parts):
            found, expected = f"{len(part.parts)} slices", f"{len(members)}, one a member"
            problems += _error(path, found, expected).problems
            continue
        for member, piece in zip(members, part.parts, strict=True):
            if piece is not None:
                home = f"{parent}.{member}" if parent and member else member or path
                parts[home] = piece
    if problems:
        raise InvalidAdapterError(problems)
    return parts


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a member belongs."""

    path: str
    member: str
    members: Sequence[str]


@dataclass(slots=True)
class _Members:
    """Finds the packed module a path belongs to. Member names may have dots."""

    packed_modules: Mapping[str, Sequence[str]]
    _owners: dict[str, str] = field(default_factory=dict)
    _depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for packed, names in self.packed_modules.items():
            for name in names:
                other = self._owners.setdefault(name, packed)
                if other != packed:
                    raise ValueError(f"{name!r} is a member of both {other!r} and {packed!r}")
        self._depths = tuple(sorted({name.count(".") + 1 for name in self._owners}))

    def find(self, path: str) -> _Home | None:
        segments = path.split(".")
        for depth in self._depths:
            member = ".".join(segments[-depth:])
            packed = self._owners.get(member)
            if packed is not None and depth <= len(segments):
                home = ".".join([*segments[:-depth], packed])
                return _Home(home, member, self.packed_modules[packed])
        return None


def _pack_group(
    path: str,
    group: Mapping[str, BoundPart],
    members: Sequence[str],
    sizes: Sequence[int] | None,
) -> PackedPart:
    """Pack the members found for one module, or cut the part it has itself."""
    whole = group.get("")
    if whole is not None and len(group) > 1:
        found = f"adapted as a whole and by its member {next(name for name in group if name)}"
        raise _error(path, found, "one of the two")
    if whole is not None:
        # One slice is the module itself; a replaced head may have rows of its own number.
        if sizes is None or len(sizes) == 1 or not _has_rows(whole):
            return PackedPart(parts=(whole,))
        return PackedPart(parts=tuple(_cut(path, whole, sizes)))
    found_parts = [group.get(name) for name in members]
    if sizes is None:
        return PackedPart(parts=tuple(found_parts))
    if len(sizes) == len(members):
        _check_members(path, members, found_parts, sizes)
        return PackedPart(parts=tuple(found_parts))
    return PackedPart(parts=tuple(_spread(path, members, found_parts, sizes)))


def _has_rows(part: BoundPart) -> bool:
    """Return whether a part can be cut by rows: not of an embedding, not of experts."""
    return part.experts is None and (part.pair is None or not part.pair.is_embedding)


def _rows(path: str, part: BoundPart) -> int:
    """Return the output rows of a part that must have some."""
    try:
        rows = count_rows(part)
    except ValueError as error:
        raise _error(path, f"inconsistent: {error}", "one number of rows") from error
    if rows is None:
        raise _error(path, "an empty part", "a pair, a gain, a bias or a whole weight")
    return rows


def _check_members(
    path: str, members: Sequence[str], parts: Sequence[BoundPart | None], sizes: Sequence[int]
) -> None:
    """Refuse members whose rows are not those of their slices, all of them in one error."""
    problems: list[Problem] = []
    for name, part, size in zip(members, parts, sizes, strict=True):
        rows = size if part is None else _rows(f"{path}[{name}]", part)
        if rows != size:
            expected = f"{size}, the rows of its slice"
            problems += _error(f"{path}[{name}]", f"{rows} rows wide", expected).problems
    if problems:
        raise InvalidAdapterError(problems)


def _cut(path: str, part: BoundPart, sizes: Sequence[int]) -> Iterator[BoundPart]:
    """Yield one part per slice: rows in order, A shared."""
    rows = _rows(path, part)
    if rows != sum(sizes):
        expected = f"{sum(sizes)} ({' + '.join(map(str, sizes))} for its slices)"
        raise _error(path, f"{rows} rows wide", expected)
    start = 0
    for size in sizes:
        yield part if size == rows else take_part(part, [(start, start + size)])
        start += size


def _spread(
    path: str,
    members: Sequence[str],
    parts: Sequence[BoundPart | None],
    sizes: Sequence[int],
) -> Iterator[BoundPart | None]:
    """Yield one part per slice when a member covers several slices."""
    rows = [None if part is None else _rows(path, part) for part in parts]
    runs = list(_match_runs(rows, sizes))
    if len(runs) != 1:
        found = ", ".join(f"{name} {count}" for name, count in zip(members, rows, strict=True))
        how = "more than one way of dividing" if runs else "no way of dividing"
        raise _error(path, f"{found} rows wide, {how} {list(sizes)}", "exactly one")
    position = 0
    for name, part, count in zip(members, parts, runs[0], strict=True):
        run = sizes[position : position + count]
        position += count
        if part is None:
            yield from (None for _ in run)
        else:
            yield from _cut(f"{path}[{name}]", part, run)


def _match_runs(rows: Sequence[int | None], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to give each member a run of slices: its length for each member.

    A member that is present takes slices whose sizes add up to its rows; an absent one takes any
    number of at least one.
    """
    if not rows:
        if not sizes:
            yield ()
        return
    total = 0
    for count in range(1, len(sizes) - len(rows) + 2):
        total += sizes[count - 1]
        if rows[0] is None or rows[0] == total:
            for rest in _match_runs(rows[1:], sizes[count:]):
                yield (count, *rest)


def _error(path: str, found: str, expected: str) -> InvalidAdapterError:
    problem = Problem(code=ProblemCode.SHAPE_MISMATCH, module=path, found=found, expected=expected)
    return InvalidAdapterError([problem])
