"""The table of roles is the one place that describes them."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import mindrlhf
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.flags import TrainFlags
from mindrlhf.model_roles import CRITIC, GENERATOR, POLICY, ROLES, SAVED, TRAINED, role_of
from mindrlhf.phases import PHASES
from mindrlhf.token_arrays import TOKEN_ARRAYS

PACKAGE = Path(mindrlhf.__file__).parent
TRANSLATORS = ("migration/",)  # of other suites' settings


def distinct(names) -> bool:
    names = list(names)
    return len(names) == len(set(names))


def test_each_role_has_a_part():
    from mindrlhf.roles.parts import PARTS

    # The reward functions open a role's models that they list.
    assert PARTS.keys() == {name for name, role in ROLES.items() if not role.listed}
    assert all(part.role is ROLES[name] for name, part in PARTS.items())


def test_roles_share_no_name():
    assert distinct(role.checkpoint for role in SAVED)
    assert distinct(role.folder for role in TRAINED)
    assert distinct(role.training.counter for role in TRAINED)
    assert distinct(role.training.metrics for role in TRAINED)
    assert distinct(group for role in ROLES.values() if role is not GENERATOR for group in role.weights)
    phases = [part.phase for role in ROLES.values() for part in (role.scoring, role.training) if part]
    assert distinct(phases)
    assert set(phases) <= PHASES.keys()


def test_a_row_names_what_there_is():
    flags = {field.name for field in fields(TrainFlags)}
    for role in ROLES.values():
        assert role.flag is None or role.flag in flags
        assert role.settings is None or role.settings in GRPOSettings.model_fields
        assert role.scoring is None or (role.scoring.array in TOKEN_ARRAYS) == (role.listed is None)
        assert role.names(GRPOSettings()) == [role.name] * (role.name in ("policy", "reference", "generator"))


def test_a_role_may_have_several_models():
    """One for each distinct model that the reward functions name, alongside functions without one."""
    first, second = ({"name": "model", "path": path} for path in ("a", "b"))
    functions = [first, "format", {"name": "judge", "path": "a"}, second, {**first, "weight": 2.0}]
    role = ROLES["reward_model"]
    config = GRPOSettings(reward={"functions": functions})
    names = role.names(config)
    assert names == ["reward_model.0", "reward_model.1", "reward_model.2"]
    assert [settings.path for settings in role.listed(config)] == ["a", "a", "b"]
    assert all(role_of(name) is role for name in names)


@pytest.mark.parametrize("role", [CRITIC, ROLES["teacher"]], ids=lambda role: role.name)
def test_only_its_own_files_name_a_role(role):
    """A new role with its own model is a row, a part and its settings."""
    own = {
        "model_roles.py",
        "token_arrays.py",
        "roles/parts.py",
        f"roles/{role.name}.py",
        "configs/grpo.py",
        "configs/algorithm.py",
    }
    named = set()
    for path in PACKAGE.rglob("*.py"):
        words = {role.name, role.name.upper(), role.name.title()}
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(node, "value", None) if isinstance(node, ast.Constant) else getattr(node, "id", None)
            if isinstance(name, str) and name in words:
                named.add(str(path.relative_to(PACKAGE)))
    assert {name for name in named - own if not name.startswith(TRANSLATORS)} <= ALSO[role.name]


ALSO = {
    "critic": {"configs/model.py"},  # HF's class with one output
    "teacher": {"configs/choices.py"},  # an option of one advantage
}


def test_the_policy_is_updated_last():
    updates = [phase for phase in PHASES if PHASES[phase].kind == "update"]
    assert updates[-1] == POLICY.training.phase
