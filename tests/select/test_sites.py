"""Sites: the pattern language against a naive reference, the selection, and what the errors say."""

from __future__ import annotations

import fnmatch
import pickle
import time
from collections import Counter

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensortap.errors import PatternError
from tensortap.select.ports import PORTS
from tensortap.select.sites import Candidate, Match, Pattern, select, split

exact = settings(derandomize=True, deadline=None, max_examples=examples(400))
MODULE = ("output", "input", "grad_output", "grad_input")
PARAM = ("param", "grad", "update")


def module(path: str, kind: str = "Linear", leaf: bool = True) -> Candidate:
    return Candidate(path, (kind, "Module"), MODULE, leaf)


SITES = [
    module("", "Net", leaf=False),
    module("blocks", "ModuleList", leaf=False),
    *(
        site
        for i in range(12)
        for site in (
            module(f"blocks.{i}", "Block", leaf=False),
            module(f"blocks.{i}.attn", "Attention"),
            module(f"blocks.{i}.norm", "LayerNorm"),
            module(f"blocks.{i}.mlp", "Linear"),
        )
    ),
    module("head"),
    Candidate("head.weight", ("Parameter", "Tensor"), PARAM),
    Candidate("head.bias", ("Parameter", "Tensor"), PARAM),
]


def chosen(pattern: object, candidates: list[Candidate] = SITES) -> list[str]:
    return [f"{match.candidate.path}:{match.port}" for match in select([pattern], candidates)[0]]


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("head", ["head:output"]),
        ("", [":output"]),
        (":input", [":input"]),
        ("blocks", ["blocks:output"]),
        ("blocks.3.mlp", ["blocks.3.mlp:output"]),
        ("blocks.1?.mlp", ["blocks.10.mlp:output", "blocks.11.mlp:output"]),
        ("blocks.{2,10}.{attn,mlp}:input", [f"blocks.{i}.{x}:input" for i in (2, 10) for x in ("attn", "mlp")]),
        ("blocks.{2.attn,1{0,1}.mlp}", ["blocks.2.attn:output", "blocks.10.mlp:output", "blocks.11.mlp:output"]),
        ("blocks.3.**", ["blocks.3:output", *(f"blocks.3.{x}:output" for x in ("attn", "norm", "mlp"))]),
        ("blocks.3.*", [f"blocks.3.{x}:output" for x in ("attn", "norm", "mlp")]),
        ("*", ["blocks:output", "head:output"]),
        ("**.head", ["head:output"]),
        ("**:grad", ["head.weight:grad", "head.bias:grad"]),
        ("head.*:*", [f"head.{x}:{port}" for x in ("weight", "bias") for port in PARAM]),
        ("head:{input,output}", ["head:output", "head:input"]),
        ("head:grad_*", ["head:grad_output", "head:grad_input"]),
        ("head:{in,out}put", ["head:output", "head:input"]),
        ("head:output.logits", ["head:output"]),
        ("type:Net", [":output"]),
        ("type:Net:input", [":input"]),
        ("type:*Norm", [f"blocks.{i}.norm:output" for i in range(12)]),
        ("type:Parameter:grad", ["head.weight:grad", "head.bias:grad"]),
        (r"re:blocks\.1.\.mlp:grad_output", ["blocks.10.mlp:grad_output", "blocks.11.mlp:grad_output"]),
        (r"re:(?:he)?ad", ["head:output"]),
        (lambda site: site.leaf and site.path.startswith("he"), ["head:output"]),
    ],
)
def test_select(pattern: object, sites: list[str]) -> None:
    """Each form of pattern chooses exactly the sites its reader expects."""
    assert chosen(pattern) == sites


def test_double_star_is_everything() -> None:
    """`**` alone chooses every site that has the port, the root included."""
    assert chosen("**") == [f"{site.path}:output" for site in SITES if "output" in site.ports]
    assert len(chosen("type:Module")) == len(chosen("**"))


def test_a_class_means_its_name() -> None:
    """A class chooses what `type:` and its name chooses."""

    class LayerNorm: ...

    assert chosen(LayerNorm) == chosen("type:LayerNorm")


def test_select_keeps_the_patterns_apart() -> None:
    """There is one list for each pattern, in order, and a site may be in several."""
    first, second = select(["head", Pattern.parse("*")], SITES)
    assert [type(match) for match in first] == [Match]
    assert first[0].candidate is second[1].candidate
    assert (first[0].pattern.text, second[0].pattern.text) == ("head", "*")


def test_parse_is_done_once() -> None:
    """A parsed pattern is itself, cannot be changed, and travels to other processes."""
    pattern = Pattern.parse("blocks.*/@matmul#1:input[0]")
    assert Pattern.parse(pattern) is pattern
    with pytest.raises(AttributeError):
        pattern.text = "other"
    copied = pickle.loads(pickle.dumps(pattern))
    assert copied.matches_op("blocks.1", "mm", 1, "input", {"matmul": frozenset(["mm"])})
    assert repr(copied) == "Pattern('blocks.*/@matmul#1:input[0]')"


@pytest.mark.parametrize(
    "path",
    [
        "a*b",
        "what?",
        "{x,y}",
        "{open",
        "a b-c",
        "层.注意力",
        "<b>bold</b>",
        "a/b",
        "a:b",
        "a[0]",
        "a..b",
        "x\ny",
        "(a|b)+",
        "op",
        "type",
        "re",
        "**x",
    ],
)
def test_odd_names_match_themselves(path: str) -> None:
    """A path is a pattern for itself whatever characters it has, and `**` finds it."""
    candidates = [module("other"), module(path)]
    assert chosen(path, candidates) == [f"{path}:output"]
    assert chosen(f"{path}:input", candidates) == [f"{path}:input"]
    assert f"{path}:output" in chosen("**", candidates)


def test_named_values_with_a_slash() -> None:
    """A value named with a slash is found by its name and by a glob, though both could mean an operation."""
    candidates = [module("my/value"), module("my/other")]
    assert chosen("my/value", candidates) == ["my/value:output"]
    assert chosen("dense/kernel:param", [Candidate("dense/kernel", (), PARAM)]) == ["dense/kernel:param"]
    assert chosen("my/*", candidates) == ["my/value:output", "my/other:output"]


@pytest.mark.parametrize(
    ("pattern", "slot", "matched"),
    [
        ("enc", "", True),
        ("enc", "[1].x", True),
        ("enc:output.hidden", ".hidden", True),
        ("enc:output.hidden", ".hidden[3]", True),
        ("enc:output.hidden", ".hidden_states", False),
        ("enc:output.hidden", "", False),
        ("enc:output[1]", "[1]", True),
        ("enc:output[1]", "[10]", False),
        ("enc:output[1]", "[0]", False),
        ("enc:output[*].x", "[7].x", True),
        ("enc:output.{a,b}", ".b", True),
        ("enc:output.{a,b}", ".c", False),
        ("enc:*.x", ".x", True),
        ("type:Encoder:input.x", ".y", False),
        ("op:matmul:input[0]", "[0]", True),
        ("op:matmul:input[0]", "[1]", False),
    ],
)
def test_slots(pattern: str, slot: str, matched: bool) -> None:
    """A slot chooses itself and what lies below; without one everything is chosen."""
    assert Pattern.parse(pattern).matches_slot(slot) is matched


GROUPS = {"matmul": frozenset(["matmul", "mm", "bmm"])}


@pytest.mark.parametrize(
    ("pattern", "op", "matched"),
    [
        ("op:matmul", ("blocks.3.attn", "matmul", 0, "output"), True),
        ("op:matmul", ("", "matmul", 5, "output"), True),
        ("op:matmul", ("blocks.3.attn", "bmm", 0, "output"), False),
        ("op:matmul", ("blocks.3.attn", "matmul", 0, "input"), False),
        ("op:matmul:input", ("blocks.3.attn", "matmul", 0, "input"), True),
        ("op:*", ("a", "aten.mm.default", 0, "output"), True),
        ("op:*:*", ("a", "softmax", 0, "grad_input"), True),
        ("op:*mm", ("a", "addmm", 0, "output"), True),
        ("op:@matmul", ("a", "bmm", 0, "output"), True),
        ("op:@matmul", ("a", "softmax", 0, "output"), False),
        ("op:@norm", ("a", "bmm", 0, "output"), False),
        ("op:{@matmul,softmax}", ("a", "softmax", 0, "output"), True),
        ("op:{@matmul,softmax}", ("a", "mm", 0, "output"), True),
        ("op:matmul#1", ("a", "matmul", 1, "output"), True),
        ("op:matmul#1", ("a", "matmul", 11, "output"), False),
        ("blocks.*.attn/matmul#1:output", ("blocks.3.attn", "matmul", 1, "output"), True),
        ("blocks.*.attn/matmul#1:output", ("blocks.3.attn", "matmul", 0, "output"), False),
        ("blocks.**/softmax", ("blocks", "softmax", 0, "output"), True),
        ("blocks.**/softmax", ("head", "softmax", 0, "output"), False),
        ("what?{/matmul", ("what?{", "matmul", 0, "output"), True),
        ("/matmul", ("", "matmul", 0, "output"), True),
        ("/matmul", ("a", "matmul", 0, "output"), False),
        ("blocks.3.attn", ("blocks.3.attn", "matmul", 0, "output"), False),
    ],
)
def test_operations(pattern: str, op: tuple[str, str, int, str], matched: bool) -> None:
    """An operation is chosen by module, name or group, number and port."""
    assert Pattern.parse(pattern).matches_op(*op, groups=GROUPS) is matched


def test_operations_are_not_missed_at_set_up() -> None:
    """A pattern for operations may choose no site, and tells what it waits for."""
    assert select(["op:{@matmul,softmax}", "blocks.*.attn/mm"], SITES) == [[], []]
    pattern = Pattern.parse("op:{@matmul,softmax}")
    assert (pattern.is_op, pattern.op, pattern.groups) == (True, "{@matmul,softmax}", {"matmul"})
    assert (Pattern.parse("head").is_op, Pattern.parse("head").op) == (False, "")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("blocks.3.mlp:output", ("blocks.3.mlp", "", None, "output", "")),
        (":output", ("", "", None, "output", "")),
        ("fc", ("fc", "", None, "output", "")),
        ("fc.weight:grad", ("fc.weight", "", None, "grad", "")),
        ("enc:output.hidden_states[3].x", ("enc", "", None, "output", ".hidden_states[3].x")),
        ("a.attn/matmul#1:grad_input[0]", ("a.attn", "matmul", 1, "grad_input", "[0]")),
        ("/softmax:output", ("", "softmax", None, "output", "")),
        ("dense/kernel:param", ("dense/kernel", "", None, "param", "")),
        ("a:b:input", ("a:b", "", None, "input", "")),
        ("a:output[b:input]", ("a", "", None, "output", "[b:input]")),
        ("<i>x</i>:output", ("<i>x</i>", "", None, "output", "")),
    ],
)
def test_split(text: str, parts: tuple[object, ...]) -> None:
    """A site's name comes apart into path, operation, number, port and slot."""
    assert split(text) == parts


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("head.weight", "'head.weight' has no output; it has param, grad, update: write 'head.weight:param'"),
        ("**.weight", "'**.weight' matches nothing: 'head.weight' has no output"),
        ("**.weight", "write '**.weight:param'"),
        ("type:Parameter", "write 'type:Parameter:param'"),
        (
            "head:grad",
            "'head' has no grad; it has output, input, grad_output, grad_input: write 'head:output' or 'head.*:grad'",
        ),
        ("head:outputs", "no port 'outputs', only output, input"),
        ("head:outputs", "Did you mean 'head:output'?"),
        ("head:{input,outputs}", "no port '{input,outputs}'"),
        ("type:Linear:outputs", "Did you mean 'type:Linear:output'?"),
        ("op:matmul:outputs", "Did you mean 'op:matmul:output'?"),
        ("typ:Linear", "Did you mean 'type:Linear'?"),
        ("op:matmul:param", "an operation has no param; it has output, input, grad_output, grad_input"),
        ("op:", "must name an operation: write 'op:matmul'"),
        ("op:blocks/mm", "write 'blocks/mm'"),
        ("type:", "must name a class: write 'type:Linear'"),
        ("block.3.mlp", "matches none of 53 sites. Did you mean 'blocks.3.mlp' or"),
        ("block.*.mpl:input", "Did you mean 'blocks.*.mlp:input'"),
        ("attn", "Did you mean '**.attn'"),
        ("zzz", "There are '', 'blocks', 'blocks.0'"),
        ("type:Liner", "Did you mean 'type:Linear'?"),
        ("type:Qqq", "There are 'Net', 'Module'"),
        ("re:nothing", "'re:nothing' matches none of 53 sites. There are"),
        ("re:(a", "missing ), unterminated subpattern at position 0 of '(a'"),
        ("{a,b}" * 12, "at most 1000 alternatives"),
        (7, "must be text, a class or a function, got 7: write"),
        (["q", "o"], "got ['q', 'o']: write the patterns one by one, 'q', 'o'"),
        (
            lambda site: site.no_such_thing,
            "the pattern <lambda> must be a function (site) -> bool, but for '' it raised",
        ),
        (lambda site: False, "'<lambda>' matches none of 53 sites"),
    ],
)
def test_errors_say_what_to_write(pattern: object, said: str) -> None:
    """A pattern that chooses nothing or cannot be read says what is near and what to write."""
    with pytest.raises(PatternError) as error:
        select([pattern], SITES)
    assert said in str(error.value)


def test_container_without_ports() -> None:
    """For a module that is never called itself, its children are offered."""
    candidates = [Candidate("blocks", ("ModuleList",), ()), module("blocks.0")]
    with pytest.raises(PatternError, match=r"Did you mean 'blocks\.\*'"):
        select(["blocks"], candidates)


def test_no_candidates() -> None:
    """A model without sites is said to be so, and no patterns choose nothing."""
    with pytest.raises(PatternError, match="offers no sites"):
        select(["**"], [])
    assert select([], SITES) == []


def naive(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(naive(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and naive(pattern[1:], path[1:])


segments = st.text("ab", min_size=1, max_size=4)
globs = st.just("**") | st.text("ab*?", min_size=1, max_size=5)


@exact
@given(st.lists(globs, min_size=1, max_size=6), st.lists(segments, max_size=6))
@example(["**", "a", "**", "a", "b"], ["a", "b", "a", "a", "b"])
@example(["*a*ab"], ["aabaab"])
def test_globs_against_a_naive_matcher(pattern: list[str], path: list[str]) -> None:
    """The compiled expression agrees with a matcher that tries every division."""
    found = Pattern.parse(".".join(pattern)).matches(module(".".join(path)), "output")
    assert found is naive(pattern, path)


@exact
@given(st.lists(st.text("a{},", max_size=8), max_size=3), segments)
def test_braces_are_the_union_of_their_parts(words: list[str], tail: str) -> None:
    """`{x,y}` chooses what x or y chooses."""
    words = [word.translate({ord(c): None for c in "{},"}) for word in words] or ["a"]
    pattern = Pattern.parse("x{" + ",".join(words) + "}." + tail)
    for word in [*words, "b"]:
        assert pattern.matches(module(f"x{word}.{tail}"), "output") is (word in words)


@exact
@given(st.text(max_size=20), st.sampled_from(PORTS))
def test_every_text_is_a_pattern_for_itself(path: str, port: str) -> None:
    """Any name at all is found by its own text."""
    if path.startswith(("re:", "op:", "type:")) or path.count("{") > 3:
        return
    candidate = Candidate(path, (), PORTS)
    assert Pattern.parse(f"{path}:{port}").matches(candidate, port)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("**.**.**.**.**.x", ".".join("a" * 3000)),
        ("**.a.**.a.**.a.**.a.**.a.**.x", ".".join("a" * 1000)),
        ("*a*a*a*a*a*a*a*a*a*x", "a" * 3000),
        ("**.*a*.**.?*?.**.x", ".".join(["aaaa"] * 1000)),
    ],
)
def test_no_pattern_hangs(pattern: str, path: str) -> None:
    """Stars upon stars on a deep path are decided at once; a regex that tried all ways to part it would take years."""
    begun = time.process_time()
    assert not Pattern.parse(pattern).matches(module(path), "output")
    assert time.process_time() - begun < 20


def test_large_models_are_asked_once() -> None:
    """Each site of a large model is asked once by each pattern, however many there are."""
    sites = [
        module(f"model.layers.{i}.{part}.{j}", "Linear") for i in range(100) for part in "abcde" for j in range(20)
    ]
    asked: Counter[str] = Counter()

    def odd(candidate: Candidate) -> bool:
        asked[candidate.path] += 1
        return candidate.path.endswith("1")

    _, by_function, by_type = select(["model.**.{a,b}.*", odd, "type:Line*"], sites)
    assert set(asked.values()) == {1} and len(asked) == len(sites)
    assert {match.candidate.path for match in by_type} == {site.path for site in sites}
    assert len({match.candidate.path for match in by_function}) == len(sites) // 10
