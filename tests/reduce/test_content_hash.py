"""The content hash: by bits, in logical order, from pieces, the same everywhere."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tensortap as tt
from tensortap.reduce import _kernel
from tensortap.reduce import numpy_kernel as fallback
from tensortap.reduce.content_hash import combine
from tensortap.reduce.statistics import ROW
from tensortap.types import DTYPE_CODE

SIZES = (0, 1, 7, 8, 15, 16, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 4096, 16385, 70_001)


def standard(data: bytes) -> int:
    """CRC-64/XZ bit by bit, as its definition has it."""
    state = 2**64 - 1
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0xC96C5795D7870F42 if state & 1 else 0)
    return int(np.uint64(state ^ (2**64 - 1)).view(np.int64))


def hash_of(array: np.ndarray, module=_kernel, name: str | None = None) -> int:
    row = np.zeros((), ROW)
    code = DTYPE_CODE[name or str(array.dtype)]
    module.reduce(row.ctypes.data, 0, array.ctypes.data, code, array.shape, array.strides, True)
    return int(row["hash"])


@pytest.fixture(autouse=True)
def _restore():
    level, threads = _kernel.level(), _kernel.threads()
    yield
    _kernel.set_level(level)
    _kernel.set_threads(threads)


def everywhere(array: np.ndarray, name: str | None = None) -> set[int]:
    """The hashes that all levels, with one thread and several, and NumPy give."""
    found = {hash_of(array, fallback, name)}
    for level, threads in itertools.product(_kernel.LEVELS, (1, 4)):
        _kernel.set_level(level)
        _kernel.set_threads(threads)
        found.add(hash_of(array, name=name))
    return found


def test_it_is_the_published_code():
    """The hash of bytes is what the catalogue of CRCs says of CRC-64/XZ."""
    assert everywhere(np.frombuffer(b"123456789", np.uint8)) == {0x995DC9BBDF1939FA - 2**64}


@pytest.mark.parametrize("n", SIZES)
def test_all_ways_agree(n):
    """Every level, every number of threads and NumPy give the hash that the definition gives."""
    raw = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    assert everywhere(raw) == {standard(raw.tobytes())}


@pytest.mark.parametrize("name", DTYPE_CODE)
def test_every_type_by_its_bits(name):
    """Whatever the type, the hash is that of the bytes: negative zeros and payloads of NaN count."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    raw = np.random.default_rng(1).integers(0, 256, 5000 * dtype.itemsize, dtype=np.uint8)
    array = (raw & 1).view(bool) if name == "bool" else raw.view(dtype)
    assert everywhere(array, name) == {standard(array.tobytes())}


def test_zeros_signs_and_payloads_tell_apart():
    """Values that compare equal, and NaNs that no comparison tells apart, have hashes of their own."""
    bits = np.array([0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001], np.uint32)
    hashes = {hash_of(np.full(100, word, np.uint32).view(np.float32)) for word in bits}
    assert len(hashes) == len(bits)


def test_length_counts():
    """Zeros more or fewer, at the beginning or the end, change the hash."""
    arrays = [np.zeros(n, np.float32) for n in range(50)] + [np.eye(1, 9, k, dtype=np.float32)[0] for k in range(9)]
    assert len({hash_of(array) for array in arrays}) == len(arrays)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("steps", [(1, 1, 1), (-1, 2, 1), (2, -3, -1)])
def test_strides_do_not_matter(axes, steps):
    """Transposed, reversed and thinned views have the hash of a copy in C order."""
    whole = np.random.default_rng(0).standard_normal((20, 30, 50), np.float32)
    view = whole.transpose(axes)[tuple(slice(None, None, step) for step in steps)]
    assert everywhere(view) == {hash_of(np.ascontiguousarray(view))}


def test_broadcast_and_misaligned_memory():
    """A repeated row counts as often as it appears; memory need not be aligned."""
    row = np.arange(70, dtype=np.float32)
    assert everywhere(np.broadcast_to(row, (60, 70))) == {hash_of(np.tile(row, (60, 1)))}
    raw = np.zeros(4 * 4001 + 1, np.uint8)
    raw[1:] = np.random.default_rng(0).integers(0, 256, raw.size - 1)
    assert everywhere(raw[1:].view(np.float32)) == {standard(raw[1:].tobytes())}


def test_large_transposed_tensors_in_threads():
    """Chunks that several threads take of a transposed tensor are put together in its order."""
    array = np.random.default_rng(2).standard_normal((900, 800), np.float32).T
    assert everywhere(array) == {hash_of(np.ascontiguousarray(array))}


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(st.sampled_from([np.float32, np.float16, np.uint8, np.complex128]), st.integers(0, 300), elements=None),
    st.data(),
)
def test_pieces_give_the_hash_of_the_whole(array, data):
    """Hashes of pieces in order, wherever they are cut, combine into that of the whole."""
    cuts = sorted(data.draw(st.lists(st.integers(0, array.size), max_size=4)))
    pieces = np.split(array, cuts)
    total = hash_of(pieces[0])
    for piece in pieces[1:]:
        total = combine(total, hash_of(piece), piece.nbytes)
    assert total == hash_of(array)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.data())
def test_one_flipped_bit_is_seen(n, data):
    """One bit that flips, anywhere, changes the hash; and so do two."""
    raw = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    seen = {hash_of(raw)}
    for _ in range(2):
        raw[data.draw(st.integers(0, n - 1))] ^= 1 << data.draw(st.integers(0, 7))
        seen.add(hash_of(raw))
    assert len(seen) >= 2


def test_a_recorded_hash_is_read_back(tmp_path):
    """A probe that keeps the hash writes it; other rows have none."""
    x = np.random.default_rng(0).standard_normal((3, 4))
    with tt.watch(tt.probe("x", keep=[tt.stats(), tt.hash()]), "y", to=tmp_path / "run") as tap:
        for _ in range(2):
            tt.tap(x.T, "x")
            tt.tap(x, "y")
            tap.step()
    expected = standard(np.ascontiguousarray(x.T).tobytes())
    run = tt.open_run(tmp_path / "run")
    assert [record["hash"] for record in run.records("x")] == [expected] * 2
    assert [record.summary.hash for record in run.records("y")] == [None] * 2
    assert run.table(columns=["site", "hash"]).to_pydict()["hash"] == [expected, None] * 2
    assert tt.summarize(x.T, hash=True).hash == expected and tt.summarize(x).hash is None


@pytest.mark.parametrize("function", [tt.content_hash, tt.hash], ids=["content_hash", "hash"])
def test_a_call_is_asked_for(function):
    """The function itself, by either name, is answered with the call."""
    expected = r"keep=content_hash is the function itself; call it: keep=content_hash\(\)"
    with pytest.raises(tt.TensortapError, match=expected):
        tt.probe("x", keep=function)


@pytest.mark.parametrize("size", SIZES)
def test_of_bytes_alone(size: int) -> None:
    """Bytes are hashed without their statistics: the same number, in C and by NumPy."""
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert _kernel.hash_bytes(raw.ctypes.data, size) == fallback.hash_bytes(raw.ctypes.data, size) == hash_of(raw)
