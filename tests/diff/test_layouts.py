"""Runs spread over ranks and microbatches, compared with one process: pieces, copies, names, and bad input."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt
from tensortap.diff.cause import first_cause
from tensortap.diff.pieces import Arrangement, Piece, arrange, whole_shape
from tensortap.diff.site_names import common_names, unwrapped
from tensortap.diff.whole import merge_summaries
from tensortap.distributed.mesh import mesh_of
from tensortap.errors import RunError
from tensortap.types import Place

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
FULL = [tt.stats(), tt.full()]


@pytest.fixture
def spread(make_run):
    """Write one run of what each rank saw; of a rank a list of arrays is its calls."""

    def write(name, *ranks, keep=FULL, about=None):
        for rank, sites in enumerate(ranks):
            path = make_run([(sites, {})], name=name, rank=rank, keep=keep, about=about)
        return path

    return write


@pytest.mark.parametrize("keep", [FULL, [tt.stats()], [tt.stats(), tt.sample(20)]], ids=["full", "stats", "sample"])
@pytest.mark.parametrize(
    ("halves", "how"),
    [
        (np.split(X, 2), "blocks"), ([X[::2], X[1::2]], "strided"), (np.split(X, 2, axis=1), "columns"),
        ([X, X], "copies"),
    ],
)  # fmt: skip
def test_pieces_make_the_whole(spread, keep, halves, how):
    """Rows in blocks, rows in turns, columns and copies are told apart; one wrong element is found."""
    one = spread("one", {"fc": X})
    assert tt.diff(one, spread("same", *({"fc": half} for half in halves), keep=keep))
    wrong = [half.copy() for half in halves]
    wrong[1][0, 0] += 9
    found = tt.diff(one, spread("wrong", *({"fc": half} for half in wrong), keep=keep))
    assert not found and found.cause.site == "fc:output" and (found.cause.rank == 1) == (how == "copies")


@pytest.mark.parametrize(
    ("parts", "how"),
    [(([0, 1, 6, 7], [2, 3, 4, 5]), "head and tail"), (([0, 2, 4, 6], [1, 3, 5, 7]), "every n-th")],
)
def test_which_tokens_context_parallel_ranks_have(spread, parts, how):
    """The model's input tells it; what follows is put together alike, heads in blocks, and a wrong value is found."""
    rng = np.random.default_rng(0)
    tokens, hidden = rng.integers(0, 99, (4, 8)), rng.normal(size=(4, 8, 6)).astype(np.float32)
    weight = rng.normal(size=(6, 8)).astype(np.float32)
    one = spread("one", {":input": tokens, "up": hidden, "core": hidden, "up.weight:param": weight})

    def ranks(*wrong):
        halves = np.split(hidden, 2, axis=2)
        return [
            {":input": tokens[:, own], "up": hidden[:, own] + (i in wrong), "core": half, "up.weight:param": weight}
            for i, (own, half) in enumerate(zip(parts, halves, strict=True))
        ]

    found = tt.diff(one, spread("same", *ranks()))
    assert found and found.layouts.endswith(f"tokens by {how}")
    assert tt.diff(one, spread("wrong", *ranks(1))).cause.site == "up:output"


def test_microbatches(spread):
    """Calls of a step are put together where the other run had the whole batch in one call."""
    one = spread("one", {"fc": X, "out": X * 2})
    parts = np.split(X, 4)
    assert tt.diff(one, spread("micro", {"fc": parts, "out": [part * 2 for part in parts]}))
    assert tt.diff(spread("micro2", {"fc": parts}), spread("one2", {"fc": X}))
    found = tt.diff(one, spread("bad", {"fc": parts, "out": [part * 2.01 for part in parts]}))
    assert found.cause.site == "out:output"


def test_a_mesh_that_the_user_gives(spread):
    """Four ranks in a grid: rows along one side, columns along the other."""
    pieces = [half for rows in np.split(X, 2) for half in np.split(rows, 2, axis=1)]
    one, grid = spread("one", {"fc": X}), spread("grid", *({"fc": piece} for piece in pieces))
    found = tt.diff(one, grid, mesh={"dp": 2, "tp": 2})
    assert found and found[0].worst.kept == "full" and "dp 2 × tp 2" in found.layouts


def test_a_mesh_that_must_be_given(spread):
    """Ranks that hold copies of pieces, of which nothing was recorded, lead to an error that says what to write."""
    halves = [{"fc.w:param": half} for half in np.split(X, 2)]
    one, grid = spread("one", {"fc.w:param": X}), spread("grid", *halves, *halves)
    with pytest.raises(RunError, match=r"Say how the ranks lie.*mesh={'dp': 2, 'tp': 2}"):
        tt.diff(one, grid)
    assert tt.diff(one, grid, mesh={"dp": 2, "tp": 2})


def test_the_batch_is_known_by_its_hash(spread):
    """Other tokens with the same statistics are another batch, though no element was kept."""
    tokens = np.arange(12).reshape(3, 4)
    keep = [tt.stats(), tt.hash()]
    runs = [spread(name, {":input": x, "fc": X}, keep=keep) for name, x in (("a", tokens), ("b", tokens[::-1].copy()))]
    assert tt.diff(*runs).cause.kind == "input"


def test_partial_sums_that_were_not_reduced_are_told(spread):
    """Where the ranks' values add up to the reference, the note says so."""
    part = np.random.default_rng(1).normal(size=X.shape).astype(np.float32) + 1
    found = tt.diff(spread("one", {"fc": X}), spread("two", {"fc": part}, {"fc": X - part}))
    assert not found and "partial sums" in found.first.note


@pytest.mark.parametrize("port", ["output", "grad_input"])
def test_partial_sums_that_are_reduced_outside(spread, port):
    """A part of a sum is right where the module around it, or who uses it, has the whole, and wrong where not."""
    parts = [np.random.default_rng(n).normal(size=X.shape).astype(np.float32) for n in (1, 2)]
    whole = parts[0] + parts[1]
    one = spread("one", {f"mlp.fc2:{port}": whole, f"mlp:{port}": whole, f"norm:{port}": X})
    good = [{f"mlp.fc2:{port}": part, f"mlp:{port}": whole, f"norm:{port}": X} for part in parts]
    assert tt.diff(one, spread("good", *good))
    bad = [{f"mlp.fc2:{port}": part, f"mlp:{port}": part, f"norm:{port}": np.tanh(part)} for part in parts]
    assert tt.diff(one, spread("bad", *bad)).cause.site == f"mlp.fc2:{port}"
    later = [{**of, f"norm:{port}": X + 1} for of in good]
    assert tt.diff(one, spread("later", *later)).cause.site == f"norm:{port}"


def test_partial_sums_near_the_whole(spread):
    """A part of a sum that a wide tolerance would let pass is still a part, and allows nothing of later values."""
    one = spread("one", {"mlp.fc2": X, "mlp": X, "norm": X})
    good = [{"mlp.fc2": X * np.float32(part), "mlp": X, "norm": X} for part in (0.9, 0.1)]
    assert tt.diff(one, spread("good", *good), rtol=0.3)
    later = [{**of, "norm": X * 1.8} for of in good]
    assert tt.diff(one, spread("later", *later), rtol=0.3).cause.site == "norm:output"


def test_averages_of_parameters(spread):
    """What no optimizer holds may differ by what the updates of such parameters do, and not by more."""
    apart = X * np.float32(1 + 6e-5)  # within the tolerance of an update, beyond that of a parameter
    sites = {"w:param": X, "w:grad": X, "w:update": X, "ema.w:param": X}
    one = spread("one", sites)
    for name, average, site in (("near", apart, None), ("far", X + 1, "ema.w:param")):
        cause = tt.diff(one, spread(name, {**sites, "w:update": apart, "ema.w:param": average}), mesh={"dp": 1}).cause
        assert (cause and cause.site) == site


def test_names_of_wrappers(spread):
    """Prefixes of wrappers and pipeline stages do not matter; other names are given by a function."""
    one = spread("one", {"blocks.0.fc": X, "blocks.1.fc": X + 1})
    halves = np.split(X, 2)
    ddp = [{"module.blocks.0.fc": half, "module._orig_mod.blocks.1.fc": half + 1} for half in halves]
    assert len(tt.diff(one, spread("ddp", *ddp))) == 2
    assert len(tt.diff(one, spread("stages", {"stage0.blocks.0.fc": X}, {"stage1.blocks.1.fc": X + 1}))) == 2
    port = spread("port", *({"h0": half, "h1": half + 1} for half in halves))
    assert len(tt.diff(one, port, map=lambda name: name.replace("h", "blocks.") + ".fc")) == 2
    assert unwrapped("module.stage2.module.x") == "x"
    names = common_names([Place("", "input"), Place("module", "input"), Place("module.a", "output")])
    assert names == {Place("module", "input"): Place("", "input"), Place("module.a"): Place("a")}


def test_a_rank_that_is_missing(make_run, spread):
    """The error names the rank and what to copy."""
    one = spread("one", {"fc": X})
    path = make_run([({"fc": X[:4]}, {})], name="half", rank=0, keep=FULL, about={"world": 2})
    with pytest.raises(RunError, match=r"has nothing of rank 1 of 2: .* Copy the folder rank=1 into the run"):
        tt.diff(one, path, mesh={"dp": 2})


@pytest.mark.parametrize(
    ("mesh", "said"),
    [({"dp": 1}, "must multiply to 2"), ({}, "must give each side a size"), ({"dp": 0}, "must give each side a size")],
)
def test_a_mesh_that_cannot_be(spread, mesh, said):
    """The error says what the sizes must come to."""
    with pytest.raises(RunError, match=said):
        tt.diff(spread("one", {"fc": X}), spread("two", {"fc": X[:4]}, {"fc": X[4:]}), mesh=mesh)


def test_runs_that_share_no_site(spread):
    """There is an error with an example of both, and not a list."""
    with pytest.raises(RunError, match="give a map of names"):
        tt.diff(spread("one", {"fc": X}), spread("two", {"conv": X[:3]}, {"conv": X[:2]}))


def test_counts_of_own_rows(spread):
    """A buffer whose values on all ranks add up to the reference's is no difference; one that does not is."""
    counts = np.array([3.0, 5.0, 0.0, 8.0], np.float32)
    equal = [{"fc": half, "moe.counts:buffer": counts / 2} for half in np.split(X, 2)]
    assert tt.diff(spread("both", {"fc": X, "moe.counts:buffer": counts}), spread("equal", *equal))
    one = spread("one", {"fc": X, "moe.counts:buffer": counts})
    halves, parts = np.split(X, 2), (np.array([1.0, 5, 0, 2], np.float32), np.array([2.0, 0, 0, 6], np.float32))
    ranks = [{"fc": half, "moe.counts:buffer": part} for half, part in zip(halves, parts, strict=True)]
    found = tt.diff(one, spread("same", *ranks))
    assert found
    ranks[1]["moe.counts:buffer"] = parts[1] + 1
    assert tt.diff(one, spread("wrong", *ranks)).cause.kind == "buffer"


def test_matrices_side_by_side(spread):
    """Parts of queries, keys and values in one tensor are pieces of three; another order is wrong."""
    whole = np.random.default_rng(2).normal(size=(4, 12)).astype(np.float32)
    cut = [np.concatenate([m[:, at : at + 2] for m in np.split(whole, 3, axis=1)], 1) for at in (0, 2)]
    one = spread("one", {":input": X, "qkv": whole})
    assert tt.diff(one, spread("cut", *({":input": X, "qkv": part} for part in cut)))
    wrong = spread("wrong", *({":input": X, "qkv": part[:, ::-1].copy()} for part in cut))
    assert tt.diff(one, wrong).cause.site == "qkv:output"


def test_a_loss_of_own_rows(spread):
    """A number that each rank makes of its own rows agrees by its mean, and is not compared where that says nothing."""
    one = spread("one", {":input": X, "loss": np.float32(2.0), "fc": X})
    for name, losses in (("equal", (1.5, 2.5)), ("unequal", (1.5, 2.9))):
        ranks = [
            {":input": half, "loss": np.float32(loss), "fc": half}
            for half, loss in zip(np.split(X, 2), losses, strict=True)
        ]
        assert tt.diff(one, spread(name, *ranks))
    copies = spread("copies", *({":input": X, "loss": np.float32(2 + n), "fc": X} for n in (0, 1)))
    assert tt.diff(one, copies).cause.rank == 1  # of the same rows


def test_gradients_of_values_without_rows(spread):
    """Their parts are summed over ranks and microbatches with rows of their own, and not over others."""
    gradient = np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32)
    part = gradient * 0.3
    one = spread("one", {":input": X, "wpe:grad_output": gradient})
    ranks = [
        {":input": half, "wpe:grad_output": g} for half, g in zip(np.split(X, 2), (part, gradient - part), strict=True)
    ]
    assert tt.diff(one, spread("rows", *ranks))
    micro = {":input": np.split(X, 2), "wpe:grad_output": [part, gradient - part]}
    assert tt.diff(one, spread("micro", micro))
    copies = [{":input": X, "wpe:grad_output": g} for g in (part, gradient - part)]
    assert not tt.diff(one, spread("copies", *copies))


def test_statistics_merge_exactly():
    """Those of the pieces together are those of the whole, histogram included."""
    parts = [tt.summarize(part) for part in np.split(X.astype(np.float64), 4)]
    merged, whole = merge_summaries(parts, X.shape), tt.summarize(X.astype(np.float64))
    for name in ("numel", "min", "max", "mean", "std", "l1", "l2", "skewness", "kurtosis"):
        assert merged[name] == pytest.approx(whole[name], rel=1e-12)
    assert merged.hist_counts.tolist() == whole.hist_counts.tolist()


def test_strided_shards(spread):
    """FSDP2 over tensor parallelism cuts what the other has cut: the pieces are still put in their places."""
    whole = np.arange(16.0)
    cut = Arrangement({"dp": "_S(0, 2)", "tp": "S(0)"}, {"dp": 2, "tp": 2}, frozenset({"dp"}))
    record = next(tt.open(spread("one", {"fc": whole[:4]})).records())
    at = [cut.positions(Piece(record, {"dp": dp, "tp": tp}), (16,)) for dp in (0, 1) for tp in (0, 1)]
    assert [found.tolist() for found in at] == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]


def test_what_ranks_recorded_comes_before_what_sizes_say(spread):
    """A known placement is kept, and gives the shape of the whole."""
    records = [
        next(tt.open(spread(name, {"fc": half})).records()) for name, half in zip("ab", np.split(X, 2), strict=True)
    ]
    pieces = [Piece(record, {"tp": n}) for n, record in enumerate(records)]
    known = arrange(pieces, {"tp": "S(1)"}, frozenset(), None, member=False)
    assert known.placements == {"tp": "S(1)"} and whole_shape(pieces, known) == (4, 12)


def test_meshes():
    """A mesh is what ranks recorded; ranks of several like it are told apart; without any there is one side."""
    part = {"mesh": {"ddp": 2}, "placements": ["R"], "ranks": [0, 2], "shape": [2], "summand": False}
    said = {rank: {"w:param": {**part, "at": [rank // 2]}} for rank in range(4)}
    mesh = mesh_of([0, 1, 2, 3], said, None)
    assert mesh.coordinates(3) == {"group": 1, "ddp": 1} and mesh.data == {"ddp", "group"}
    assert mesh_of([0, 1], {}, None).sides == {"rank": 2}
    cut = {**part, "mesh": {"tp": 2}, "placements": ["S(0)"]}
    for rank in range(4):
        said[rank]["v:output"] = {**cut, "at": [rank % 2], "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}
    mesh = mesh_of([0, 1, 2, 3], said, None)
    assert mesh.coordinates(3) == {"ddp": 1, "tp": 1} and mesh.data == {"ddp"}


def test_other_batches_and_seeds_are_explained(spread):
    """When the model's input or all its first parameters differ, that is said, and no list of what follows from it."""
    runs = [spread(name, {":input": x, "fc": x * 2}) for name, x in (("a", X), ("b", X + 1))]
    found = tt.diff(*runs)
    assert found.cause.kind == "input" and "do not read the same batch at step 0" in str(found)
    assert "fc:output" not in str(found)
    runs = [spread(name, {"v.w:param": x, "u.w:param": x, "fc": x}) for name, x in (("c", X), ("d", X + 1))]
    found = tt.diff(*runs)
    assert "begin with other parameters" in str(found) and "fc:output" not in str(found)


def test_the_cause_is_not_what_comes_first_in_time(spread):
    """Of what differs in a step, parameters before it come first, then values, gradients of modules, of parameters."""
    sites = ("a.w:grad", "a:grad_output", "b:output", "a.w:update")
    assert first_cause([]) is None
    for last, kind in ((1, "gradient"), (2, "loss"), (3, "forward")):
        one = dict.fromkeys(sites, X)
        other = {site: X * 2 if n < last else X for n, site in enumerate(sites)}
        found = tt.diff(spread(f"one{last}", one), spread(f"two{last}", other))
        assert (found.cause.kind, found.cause.site) == (kind, sites[last - 1])


@pytest.mark.parametrize("keep", [FULL, [tt.stats()]], ids=["full", "stats"])
@pytest.mark.parametrize(
    ("late", "kind", "step"),
    [("in time", None, None), ("never", "update", 0), ("too late", "update", 0), ("stops", "update", 1)],
)
def test_updates_that_are_sent_after_the_step(make_run, keep, late, kind, step):
    """A rank whose update is zero where another's is not is right where the next step has the parameter in time."""
    steps = [{"fc.w:param": X + n, "fc": X * (n + 1), "out": X * (n + 1), "fc.w:update": X * 0 + 1} for n in range(3)]
    other = [dict(sites, **{"fc.w:update": X * 0}) for sites in steps]
    if late == "never":
        for n, sites in enumerate(other):
            sites["fc.w:param"] = X
            sites["fc"] = X * (n + 2) if n else X
    if late == "too late":
        other[1]["fc"] = other[1]["out"] = X
    if late == "stops":
        other[2]["fc.w:param"] = X + 1
    one = make_run([(sites, {}) for sites in steps], name="one", rank=0, keep=keep)
    for rank, of in enumerate((steps, other)):
        two = make_run([(sites, {}) for sites in of], name="two", rank=rank, keep=keep)
    cause = tt.diff(one, two).cause
    assert (cause and (cause.kind, cause.step, cause.site, cause.rank)) == (kind and (kind, step, "fc.w:update", 1))
    found = list(tt.open(two).findings("replicas_differ"))
    assert bool(found) == (late in ("never", "stops"))


def test_parts_of_an_update_that_are_sent_after_the_step(make_run):
    """Ranks that each change a piece of a parameter have the whole update together; where a piece is wrong it shows."""
    steps = [{"fc.w:param": X + n, "fc": X, "fc.w:update": X} for n in range(2)]
    one = make_run([(sites, {}) for sites in steps], name="one", rank=0, keep=FULL)
    for name, factor in (("good", 1), ("bad", 2)):
        for rank in (0, 1):
            piece = np.where(np.arange(8)[:, None] // 4 == rank, X, 0).astype(np.float32) * (factor if rank else 1)
            two = make_run(
                [(dict(sites, **{"fc.w:update": piece}), {}) for sites in steps], name=name, rank=rank, keep=FULL
            )
        cause = tt.diff(one, two).cause
        assert (cause and (cause.kind, cause.step)) == (None if factor == 1 else ("update", 0))
