"""Rules of the translation for experts and for models that see."""

from mindrlhf.migration.verl.command import Keys
from mindrlhf.migration.verl.result import VerlTranslation
from mindrlhf.migration.verl.table import NAMES

ROUTER_REPLAY = tuple(f"actor.{engine}router_replay.mode" for engine in ("", "megatron.", "veomni."))
FROZEN_TOWER = "actor.freeze_vision_tower"


def routing(keys: Keys, result: VerlTranslation) -> None:
    """Translate the replay of experts' routing, which verl's engines have a key for, too."""
    mode = keys.first(*ROUTER_REPLAY)
    result.judge("needless", "generation records what training replays", "rollout.enable_rollout_routing_replay")
    if mode is None:
        return
    if keys(mode) in NAMES["routing_replay"]:
        result.put("rollout.routing_replay", NAMES["routing_replay"][keys(mode)], mode)
    else:
        result.refuse(mode, f"it is one of {', '.join(NAMES['routing_replay'])}")


def frozen_tower(keys: Keys, result: VerlTranslation) -> None:
    """Translate a tower that does not train; verl's has the merger in it."""
    if keys(FROZEN_TOWER):
        result.put("train.freeze", ["vision", "merger"], FROZEN_TOWER)
    else:
        result.judge("needless", "the tower trains with the text here too", FROZEN_TOWER)
