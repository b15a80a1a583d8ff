"""Mesh: its formula, and the properties that every mesh must have."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.parallel.mesh import Coordinates, Mesh

AXES = ("pp", "dp", "ep", "tp")
meshes = st.builds(Mesh, dp=st.integers(1, 4), pp=st.integers(1, 4), tp=st.integers(1, 4), ep=st.integers(1, 3))
axis_sets = st.sets(st.sampled_from(AXES)).map(tuple)


def groups(mesh, *axes):
    """Every group along `axes`, ordered by first rank."""
    return sorted({mesh.group(rank, *axes) for rank in mesh.ranks})


def test_users_example_of_eight_ranks():
    train, infer = Mesh(dp=1, pp=2, tp=4), Mesh(dp=2, tp=4)
    assert train.size == infer.size == 8
    assert groups(train, "tp") == groups(infer, "tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(train, "pp") == groups(infer, "dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert train.group(6, "dp") == (6,)
    assert train.coordinates(6) == Coordinates(pp=1, dp=0, tp=2)
    assert infer.coordinates(6) == Coordinates(pp=0, dp=1, tp=2)


def test_all_axes_differ():
    mesh = Mesh(dp=3, pp=2, tp=4)
    assert mesh.coordinates((1 * 3 + 2) * 4 + 3) == Coordinates(pp=1, dp=2, tp=3)
    assert mesh.group(23, "tp") == (20, 21, 22, 23)
    assert mesh.group(23, "dp") == (15, 19, 23)
    assert mesh.group(23, "pp") == (11, 23)
    assert mesh.group(23, "dp", "tp") == tuple(range(12, 24))
    spread = Mesh(dp=2, pp=2, tp=2, ep=3)
    assert spread.coordinates(((1 * 2 + 1) * 3 + 2) * 2 + 1) == Coordinates(pp=1, dp=1, ep=2, tp=1)
    assert spread.group(23, "ep") == (19, 21, 23)
    assert spread.group(23, "dp") == (17, 23)
    assert spread.replicas == 6


@given(meshes)
def test_ranks_number_the_grid_in_row_major_order(mesh):
    grid = np.arange(mesh.size).reshape(mesh.pp, mesh.dp, mesh.ep, mesh.tp)
    for rank in range(mesh.size):
        where = mesh.coordinates(rank)
        assert grid[where] == rank


@given(meshes, axis_sets)
def test_groups_partition_the_ranks(mesh, axes):
    every = groups(mesh, *axes)
    assert sorted(rank for group in every for rank in group) == list(range(mesh.size))
    length = int(np.prod([getattr(mesh, axis) for axis in axes], dtype=int))
    assert {len(group) for group in every} == {length}
    for group in every:
        assert list(group) == sorted(group)
        for rank in group:
            assert mesh.group(rank, *axes) == group


@given(meshes, axis_sets)
def test_group_shares_the_other_coordinates(mesh, axes):
    for group in groups(mesh, *axes):
        fixed = {tuple(getattr(mesh.coordinates(rank), axis) for axis in AXES if axis not in axes) for rank in group}
        assert len(fixed) == 1


@given(meshes)
def test_two_axes_meet_in_one_rank(mesh):
    for rank in range(mesh.size):
        assert set(mesh.group(rank, "tp")) & set(mesh.group(rank, "dp")) == {rank}
        assert mesh.group(rank, *AXES) == tuple(range(mesh.size))


def test_a_mesh_on_some_of_the_ranks():
    mesh = Mesh(dp=2, tp=2, ranks=(2, 3, 6, 7))
    assert [mesh.coordinates(rank)[1:] for rank in mesh.ranks] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert groups(mesh, "tp") == [(2, 3), (6, 7)]
    assert groups(mesh, "dp") == [(2, 6), (3, 7)]
    with pytest.raises(ValueError, match="rank 0 is outside of a mesh of 4"):
        mesh.coordinates(0)


@given(meshes, st.data())
def test_a_mesh_on_some_ranks_is_that_of_all_with_other_names(mesh, data):
    ranks = tuple(sorted(data.draw(st.sets(st.integers(0, 200), min_size=mesh.size, max_size=mesh.size))))
    some = replace(mesh, ranks=ranks)
    axes = data.draw(axis_sets)
    for place, rank in enumerate(ranks):
        assert some.coordinates(rank) == mesh.coordinates(place)
        assert some.group(rank, *axes) == tuple(ranks[other] for other in mesh.group(place, *axes))


@pytest.mark.parametrize("ranks", [(0,), (1, 0), (1, 1), (-1, 0), (0, 1, 2)])
def test_other_ranks_than_a_mesh_has_are_refused(ranks):
    with pytest.raises(ValueError, match="a mesh of 2 has as many ascending ranks"):
        Mesh(dp=2, ranks=ranks)


@pytest.mark.parametrize("lengths", [{"dp": 0}, {"pp": -1}, {"tp": 0}, {"ep": 0}])
def test_empty_axis_is_refused(lengths):
    with pytest.raises(ValueError, match=next(iter(lengths))):
        Mesh(**lengths)


def test_outside_of_the_mesh_is_refused():
    mesh = Mesh(dp=2, tp=2)
    with pytest.raises(ValueError, match="rank 4"):
        mesh.coordinates(4)
    with pytest.raises(ValueError, match="rank -1"):
        mesh.group(-1, "tp")
