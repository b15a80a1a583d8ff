"""Laying settings over one another: deep merge by its properties, overrides, and where a value came from."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.configs.layers import COMMAND_LINE, deep_merge, flatten, merge, parse_override
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError

keys = st.sampled_from(["a", "b", "c", "d"])
leaves = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.lists(st.integers(), max_size=2))
mappings = st.recursive(
    st.dictionaries(keys, leaves, max_size=3),
    lambda inner: st.dictionaries(keys, st.one_of(leaves, inner), max_size=3),
    max_leaves=12,
)


def paths(values, prefix=()):
    """All (path, leaf) of a nested mapping; an empty group is a leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from paths(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def at(values, path):
    for part in path:
        values = values[part]
    return values


@given(mappings, mappings)
def test_the_upper_value_wins_and_the_lower_shows_where_nothing_covers_it(base, over):
    before = copy.deepcopy((base, over))
    merged = deep_merge(base, over)
    assert (base, over) == before
    above = dict(paths(over))
    for path, leaf in above.items():
        if leaf != {}:
            assert at(merged, path) == leaf
    for path, leaf in paths(base):
        touched = any(path[: len(other)] == other or other[: len(path)] == path for other in above)
        if not touched:
            assert at(merged, path) == leaf
    covered = {path for path, _ in paths(base)} | set(above)
    for path, _ in paths(merged):
        assert path in covered


@given(mappings)
def test_merging_with_nothing_or_itself_changes_nothing(values):
    assert deep_merge(values, {}) == values
    assert deep_merge({}, values) == values
    assert deep_merge(values, values) == values


def test_an_empty_group_says_nothing_but_null_replaces_a_value():
    base = {"optimizer": {"lr": 1}, "steps": 3}
    assert deep_merge(base, {"optimizer": None, "steps": None}) == {"optimizer": {"lr": 1}, "steps": None}


def test_lists_are_replaced_whole():
    assert deep_merge({"a": [1, 2, 3]}, {"a": [4]}) == {"a": [4]}


def test_overrides_are_read_as_yaml():
    assert parse_override("a.b=1e-6") == (("a", "b"), 1e-6)
    assert parse_override("a= [x, 2]") == (("a",), ["x", 2])
    assert parse_override("a.b=") == (("a", "b"), None)
    assert parse_override("a=k=v") == (("a",), "k=v")
    assert parse_override("a='1'") == (("a",), "1")


def test_overrides_reach_into_lists_and_append():
    base = Layer({"reward": {"functions": [{"name": "x", "weight": 1}]}}, {})
    layered = merge([base], ["reward.functions.0.weight=2", "reward.functions.1.name=y", "new.group.key=3"])
    assert layered.values == {
        "reward": {"functions": [{"name": "x", "weight": 2}, {"name": "y"}]},
        "new": {"group": {"key": 3}},
    }
    assert base.values == {"reward": {"functions": [{"name": "x", "weight": 1}]}}, "the layer itself is not changed"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("no equals sign", ["'no equals sign'", "group.key=value"]),
        ("=3", ["group.key=value"]),
        ("a..b=3", ["group.key=value"]),
        ("a.b=[1", ["a.b=[1", "not valid YAML", "quotes"]),
        ("list.5.x=1", ["list.5.x", "'5'", "list of 1", "0 to 1"]),
        ("list.first=1", ["'first'", "list of 1"]),
        ("value.deeper=1", ["value.deeper", "a value and no group", "write value=value"]),
    ],
)
def test_an_override_that_cannot_be_placed_is_refused(override, words):
    with pytest.raises(UserError) as caught:
        merge([Layer({"list": [{"x": 0}], "value": 5}, {})], [override])
    message = str(caught.value)
    assert message.startswith("command line: ")
    for word in words:
        assert word in message


def placed(file, values, lines):
    return Layer(values, {(): file} | {path: f"{file}:{line}" for path, line in lines.items()})


def test_a_value_knows_the_place_that_gave_it():
    base = placed("base.yaml", {"a": {"x": 1, "y": 1}}, {("a", "x"): 2, ("a", "y"): 3, ("a",): 1})
    top = placed("top.yaml", {"a": {"x": 2}}, {("a", "x"): 7, ("a",): 6})
    layered = merge([base, top], ["b.0=1"])
    assert layered.where(("a", "x")) == "top.yaml:7"
    assert layered.where(("a", "y")) == "base.yaml:3"
    assert layered.where(("a", "z")) == "top.yaml:6", "a missing key is the nearest group's"
    assert layered.where(("b", "0")) == COMMAND_LINE


def test_a_list_hides_the_list_below_it_and_an_override_only_its_own_entry():
    base = placed("base.yaml", {"list": [{"x": 1, "y": 1}]}, {("list", 0, "y"): 2})
    top = placed("top.yaml", {"list": [{"x": 2}]}, {("list", 0): 4, ("list", 0, "x"): 4})
    assert merge([base, top]).where(("list", 0, "y")) == "top.yaml:4"
    assert merge([base], ["list.0.x=5"]).where(("list", 0, "y")) == "base.yaml:2"
    assert merge([base], ["list.0.x=5"]).where(("list", 0, "x")) == COMMAND_LINE


def test_flattened_settings_are_texts_under_dotted_names():
    assert flatten({"a": {"b": [1, 2], "c": None}, "d": {}}) == {"a.b": "[1, 2]", "a.c": "null", "d": "{}"}
